// SPDX-License-Identifier: Apache-2.0
// From a case to its tensors: shapes, layouts, values; and the f64 copies that the reference kernel reads.
// Part of tessera_cases; see case.hpp.
// Implements docs/algorithm.md's tensor table as data.
#include "cases/case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cases/generator.hpp"

namespace tessera::cases {

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Every tensor has its own number: it picks the random stream and, in some styles, the layout.
enum Slot : unsigned {
  Q,
  K,
  V,
  O,
  DO,
  DQ,
  DK,
  DV,
  LSE,
  DLSE,
  Bias,
  Mask,
  DBias,
  SlopesSlot,
  SinksSlot,
  DSinks,
  Ints,
  Qv
};

Style style_of(Style style, Slot slot) {
  static constexpr Style rotation[] = {Style::gaps, Style::heads_first, Style::shifted};
  return style == Style::mixed ? rotation[slot % 3] : style;
}

// Stride 0, as PyTorch's expand() makes: K of one sequence for all, V of one row, dO of a sum.
unsigned broadcast_dims(Slot slot, std::size_t rank) {
  if (rank < 3) return 0;
  const unsigned head = 1U << (rank - 2), row = 1U << (rank - 3), batch = rank == 4 ? 1U : 0U;
  switch (slot) {
    case Q:
      return head;
    case K:
      return batch;
    case V:
      return row;
    case DO:
      return head | row | batch;
    case Bias:
      return 1U << 2;
    case Mask:
      return 1U << 3;
    default:
      return 0;
  }
}

Layout layout_of(Style style, Slot slot, std::size_t rank) {
  if (style == Style::contiguous) return {};
  const bool has_rows = slot <= DV || slot == Qv;
  Layout layout{.nonsense = true};
  switch (style_of(style, slot)) {
    case Style::gaps:
      layout.gap = 1 + (slot * 5) % 7;
      if (!has_rows) layout.step = 2;
      break;
    case Style::heads_first:
      if (has_rows) layout.order = rank == 4 ? std::array{0, 2, 1, 3} : std::array{1, 0, 2, 3};
      // Only tensors like Q need a last dimension of stride 1; the others are fully transposed.
      if (!has_rows) std::reverse(layout.order.begin(), layout.order.begin() + static_cast<std::int64_t>(rank));
      break;
    case Style::shifted:
      layout.shift = 1;
      break;
    case Style::broadcast:
      layout.broadcast = broadcast_dims(slot, rank);
      break;
    default:
      break;
  }
  return layout;
}

std::int64_t total(const std::vector<std::int32_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
}

std::vector<Sequence> sequences_of(const Case& c) {
  std::vector<Sequence> all(static_cast<std::size_t>(c.batches()));
  std::int64_t row_q = c.front_q, row_k = c.front_k;
  for (std::size_t b = 0; b < all.size(); ++b) {
    Sequence& s = all[b];
    const std::int64_t length_q = c.packed() ? c.packed_q[b] : c.Nq, length_k = c.packed() ? c.packed_k[b] : c.Nk;
    s.Nq = c.used_q.empty() ? length_q : c.used_q[b];
    s.Nk = c.used_k.empty() ? length_k : c.used_k[b];
    s.row_q = row_q, s.row_k = row_k;
    s.lse_first = c.packed() ? row_q : row_q * c.Hq;
    s.lse_head = c.packed() ? c.tokens_q() : c.Nq;
    s.off = c.options.alignment == Alignment::bottom_right ? s.Nk - s.Nq
            : c.options.alignment == Alignment::offset     ? c.options.diagonal_offset
                                                           : 0;
    row_q += length_q, row_k += length_k;
  }
  return all;
}

// Builds the buffers of one case; the members are the shapes that several tensors share.
struct Builder {
  const Case& c;
  const std::vector<Sequence>& sequences;
  std::int64_t Tq = c.tokens_q(), Tk = c.tokens_k();
  std::int64_t max_q = 0, max_k = 0;

  Builder(const Case& spec, const std::vector<Sequence>& list) : c(spec), sequences(list) {
    for (const Sequence& s : sequences) max_q = std::max(max_q, s.Nq), max_k = std::max(max_k, s.Nk);
  }

  Buffer make(Slot slot, Type type, const Shape& shape) const {
    Layout layout = layout_of(c.style, slot, shape.size());
    if (c.endless_k > 0 && (slot == K || slot == V)) layout.broadcast |= 1U << (shape.size() - 3);
    if (c.endless_k > 0 && (slot == Bias || slot == Mask)) layout.broadcast |= 1U << 3;
    return Buffer(type, shape, layout);
  }
  Buffer rows(Slot slot, Type type, bool keys, std::int64_t heads, std::int64_t dim) const {
    if (c.packed()) return make(slot, type, {keys ? Tk : Tq, heads, dim});
    return make(slot, type, {c.B, keys ? c.Nk : c.Nq, heads, dim});
  }
  Buffer lse_like(Slot slot, Type type) const {
    return c.packed() ? make(slot, type, {c.Hq, Tq}) : make(slot, type, {c.B, c.Hq, c.Nq});
  }
  Buffer scores_like(Slot slot, Type type, const Dims& dims) const {
    // Packed: any size that covers the longest sequence is legal, so it is made a little larger.
    const std::int64_t longest_q = c.packed() ? max_length(c.packed_q) + 2 : c.Nq;
    const std::int64_t longest_k = c.packed() ? max_length(c.packed_k) + 3 : c.Nk;
    return make(slot, type,
                {dims.b ? c.batches() : 1, dims.h ? c.Hq : 1, dims.i ? longest_q : 1, dims.j ? longest_k : 1});
  }
  static std::int64_t max_length(const std::vector<std::int32_t>& lengths) {
    return *std::max_element(lengths.begin(), lengths.end());
  }

  // The Q-like tensor's rows inside used lengths get values; the others stay NaN.
  template <class Value>
  void fill_rows(Buffer& buffer, bool keys, Value value) const {
    const int rank = buffer.tensor().ndim;
    const std::int64_t heads = buffer.size(rank - 2), dim = buffer.size(rank - 1);
    for (const Sequence& s : sequences) {
      std::int64_t e = (keys ? s.row_k : s.row_q) * heads * dim;
      for (std::int64_t i = 0; i < (keys ? s.Nk : s.Nq); ++i)
        for (std::int64_t h = 0; h < heads; ++h)
          for (std::int64_t d = 0; d < dim; ++d) buffer.set(e++, value(i, h, d));
    }
  }

  template <class Value>
  void fill_lse(Buffer& buffer, Value value) const {
    for (const Sequence& s : sequences)
      for (std::int64_t h = 0; h < c.Hq; ++h)
        for (std::int64_t i = 0; i < s.Nq; ++i) buffer.set(s.lse_first + h * s.lse_head + i, value());
  }

  // Tensors shaped like the scores (bias, mask): what no sequence may read stays poisoned.
  template <class Value>
  void fill_scores(Buffer& buffer, Value value) const {
    const std::int64_t Mq = buffer.size(2), Mk = buffer.size(3);
    std::int64_t e = 0;
    for (std::int64_t b = 0; b < buffer.size(0); ++b) {
      const bool alone = buffer.size(0) > 1;
      const std::int64_t limit_q = alone ? sequences[static_cast<std::size_t>(b)].Nq : max_q;
      const std::int64_t limit_k = alone ? sequences[static_cast<std::size_t>(b)].Nk : max_k;
      for (std::int64_t h = 0; h < buffer.size(1); ++h)
        for (std::int64_t i = 0; i < Mq; ++i)
          for (std::int64_t j = 0; j < Mk; ++j, ++e)
            if ((Mq == 1 || i < limit_q) && (Mk == 1 || j < limit_k)) buffer.set(e, value(b, h, i, j));
    }
  }
};

// Values of Q, K, V and dO.
class Source {
 public:
  Source(const Case& spec, Slot which) : c(spec), slot(which), random(spec.seed, which + 1) {
    const double scale = std::abs(c.scale()), d = static_cast<double>(c.D);
    if (c.distribution == Distribution::cold) amplitude = scale > 0 ? std::sqrt(120 / (scale * d)) : 1;
    if (c.distribution == Distribution::huge) amplitude = scale > 0 ? std::sqrt(1e5 / (scale * std::sqrt(d))) : 1;
  }

  double operator()(std::int64_t i, std::int64_t h, std::int64_t d) {
    const Type type = slot == K ? c.k_type() : slot == V ? c.v_type() : c.type;
    return (type == Type::i8 ? 32 : 1) * number(i, h, d);
  }

 private:
  double number(std::int64_t i, std::int64_t h, std::int64_t d) {
    const bool logit = slot == Q || slot == K;
    switch (c.distribution) {
      case Distribution::small:
        return 1e-3 * random.normal();
      case Distribution::outlier: {
        const double x = random.normal(), spike = 10 * random.normal();  // variance 100
        return random.chance(0.001) ? x + spike : x;
      }
      case Distribution::cold: {
        const double sign = slot == K && c.scale() > 0 ? -1 : 1;
        return logit ? sign * amplitude * (1 + 0.01 * random.normal()) : random.normal();
      }
      case Distribution::huge:
        return (logit ? amplitude : 1) * random.normal();
      case Distribution::structured:
        return static_cast<double>((i * 7 + h * 5 + d * 3 + slot * 2) % 13 - 6) / 4;
      case Distribution::identity:
        return (i % c.D) == d ? 1 : 0;
      default:
        return random.normal();
    }
  }

  const Case& c;
  Slot slot;
  Generator random;
  double amplitude = 1;
};

void build_inputs(CaseData& data, const Builder& make) {
  const Case& c = data.spec;
  const Type do_type = c.f32_do && c.type != Type::f64 ? Type::f32 : c.type;
  data.q = make.rows(Q, c.type, false, c.Hq, c.D);
  data.k = make.rows(K, c.k_type(), true, c.Hk, c.D);
  data.v = make.rows(V, c.v_type(), true, c.Hk, c.dim_v());
  data.d_o = make.rows(DO, do_type, false, c.Hq, c.dim_v());
  make.fill_rows(data.q, false, Source(c, Q));
  make.fill_rows(data.k, true, Source(c, K));
  make.fill_rows(data.v, true, Source(c, V));
  make.fill_rows(data.d_o, false, Source(c, DO));
  if (!c.qv) return;
  data.qv = make.rows(Qv, c.type, false, c.Hq, c.dim_v());
  make.fill_rows(data.qv, false, Source(c, Qv));
}

void build_score_inputs(CaseData& data, const Builder& make) {
  const Case& c = data.spec;
  const Type wide = c.type == Type::f64 ? Type::f64 : Type::f32;
  if (c.bias) {
    Generator random(c.seed, Bias + 1);
    data.bias = make.scores_like(Bias, c.bias_f32 ? wide : c.type, c.bias_dims);
    make.fill_scores(data.bias, [&](auto...) {
      const double x = random.normal();
      return random.chance(c.masked_bias) ? -infinity : x;
    });
  }
  if (c.mask) {
    Generator random(c.seed, Mask + 1);
    data.mask = make.scores_like(Mask, Type::u8, c.mask_dims);
    make.fill_scores(data.mask, [&](std::int64_t, std::int64_t h, std::int64_t i, std::int64_t) {
      const bool blind_row = c.mask_dims.i && (i * 5 + h) % 16 == 11;  // some rows are fully masked
      const std::uint64_t any_nonzero = 1 + random.next() % 255;
      return random.chance(c.mask_density) && !blind_row ? static_cast<double>(any_nonzero) : 0.0;
    });
  }
  if (c.slopes != Slopes::none) {
    const bool per_batch = c.slopes == Slopes::per_batch_head;
    data.slopes = make.make(SlopesSlot, wide, per_batch ? Shape{c.batches(), c.Hq} : Shape{c.Hq});
    for (std::int64_t e = 0; e < data.slopes.elements(); ++e)
      data.slopes.set(e, std::exp2(-static_cast<double>(e % c.Hq + 1)) * (1 + 0.25 * static_cast<double>(e / c.Hq)));
  }
  if (c.sinks != Sinks::none) {
    Generator random(c.seed, SinksSlot + 1);
    data.sinks = make.make(SinksSlot, wide, {c.Hq});
    for (std::int64_t h = 0; h < c.Hq; ++h) {
      const double x = c.sinks == Sinks::high ? 88.0 + 6 * static_cast<double>(h) : 2 * random.normal();
      data.sinks.set(h, c.sinks == Sinks::some_infinite && h % 2 == 0 ? -infinity : x);
    }
  }
}

void build_integers(CaseData& data, const Builder& make) {
  const Case& c = data.spec;
  const auto cumulative = [&](const std::vector<std::int32_t>& lengths, std::int64_t front) {
    Buffer cu = make.make(Ints, Type::i32, {c.batches() + 1});
    cu.set(0, static_cast<double>(front));
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      const auto e = static_cast<std::int64_t>(b);
      cu.set(e + 1, cu.get(e) + lengths[b]);
    }
    return cu;
  };
  const auto copied = [&](const std::vector<std::int32_t>& lengths) {
    Buffer used = make.make(Ints, Type::i32, {c.batches()});
    used.fill({lengths.begin(), lengths.end()});
    return used;
  };
  if (c.packed()) data.cu_q = cumulative(c.packed_q, c.front_q), data.cu_k = cumulative(c.packed_k, c.front_k);
  if (!c.used_q.empty()) data.used_q = copied(c.used_q);
  if (!c.used_k.empty()) data.used_k = copied(c.used_k);
  if (c.rng) {
    data.rng = make.make(Ints, Type::i64, {2});
    data.rng.fill({static_cast<double>(c.options.seed), static_cast<double>(c.options.seed_offset)});
  }
}

void build_outputs(CaseData& data, const Builder& make) {
  const Case& c = data.spec;
  const Type wide = c.type == Type::f64 ? Type::f64 : Type::f32;
  const auto grad = [&](Type input) { return c.f32_grads ? wide : input; };
  data.o = make.rows(O, c.f32_o ? wide : c.type, false, c.Hq, c.dim_v());
  data.lse = make.lse_like(LSE, wide);
  if (!c.backward) return;
  if (c.dlse) {
    Generator random(c.seed, DLSE + 1);
    data.d_lse = make.lse_like(DLSE, wide);
    make.fill_lse(data.d_lse, [&] { return random.normal(); });
  }
  if (c.grads.dq) data.dq = make.rows(DQ, grad(c.type), false, c.Hq, c.D);
  const bool keys = c.endless_k == 0;  // whose gradients memory holds
  if (c.grads.dk && keys) data.dk = make.rows(DK, grad(c.type), true, c.Hk, c.D);
  if (c.grads.dv && keys) data.dv = make.rows(DV, grad(c.type), true, c.Hk, c.dim_v());
  if (c.grads.dbias && keys && c.bias) data.dbias = make.scores_like(DBias, grad(data.bias.type()), c.bias_dims);
  if (c.grads.dsinks && c.sinks != Sinks::none) data.dsinks = make.make(DSinks, wide, {c.Hq});
  if (!c.options.accumulate) return;
  Generator random(c.seed, DQ + 1);
  for (Buffer* gradient : {&data.dq, &data.dk, &data.dv, &data.dbias, &data.dsinks})
    for (std::int64_t e = 0; e < gradient->elements(); ++e) gradient->set(e, random.normal());
}

}  // namespace

std::int64_t Case::tokens_q() const { return front_q + total(packed_q) + tail_q; }
std::int64_t Case::tokens_k() const { return front_k + total(packed_k) + tail_k; }

double Case::scale() const {
  return options.scale == default_scale ? 1 / std::sqrt(static_cast<double>(D + (qv ? dim_v() : 0))) : options.scale;
}

CaseData build(const Case& spec) {
  CaseData data;
  data.spec = spec;
  data.sequences = sequences_of(spec);
  const Builder make(data.spec, data.sequences);
  build_inputs(data, make);
  build_score_inputs(data, make);
  build_integers(data, make);
  build_outputs(data, make);
  build_scales(data);
  build_trees(data);
  return data;
}

CaseData widened(const CaseData& data) {
  Case spec = data.spec;
  spec.type = Type::f64;
  spec.options.accumulate = false;
  spec.options.part_invariant = false, spec.options.segment_rows = 0;  // about bits that are not float64's
  spec.style = Style::contiguous, spec.endless_k = 0;
  spec.grads = {};
  spec.rng = false;
  spec.cached_k = spec.cached_v = {};
  CaseData wide = build(spec);
  wide.q.fill(data.q.values());
  wide.k.fill(data.keys());
  wide.v.fill(data.values());
  wide.d_o.fill(data.d_o.values());
  wide.qv.fill(data.qv.values());
  wide.bias.fill(data.bias.values());
  wide.mask.fill(data.mask.values());
  wide.slopes.fill(data.slopes.values());
  wide.sinks.fill(data.sinks.values());
  wide.d_lse.fill(data.d_lse.values());
  return wide;
}

Options CaseData::options() const {
  Options options = spec.options;
  if (spec.rng) options.seed = options.seed_offset = 0;
  return options;
}

// The same memory as `count` tokens (or keys) in one dimension.
static Tensor endless(Tensor t, std::int64_t count, int dimension) {
  const auto d = static_cast<std::size_t>(dimension);
  if (t && count > 0) t.shape[d] = count, t.strides[d] = 0;
  return t;
}

Inputs CaseData::inputs() const {
  Inputs in{.q = q.tensor(),
            .k = k.tensor(),
            .v = v.tensor(),
            .bias = bias.tensor(),
            .mask = mask.tensor(),
            .slopes = slopes.tensor(),
            .sinks = sinks.tensor(),
            .cu_seqlens_q = cu_q.tensor(),
            .cu_seqlens_k = cu_k.tensor(),
            .seqused_q = used_q.tensor(),
            .seqused_k = used_k.tensor(),
            .rng = rng.tensor(),
            .k_scale = k_scale.tensor(),
            .v_scale = v_scale.tensor(),
            .qv = qv.tensor(),
            .tree_mask = tree_mask.tensor(),
            .positions = positions.tensor()};
  const int tokens = spec.packed() ? 0 : 1;
  in.k = endless(in.k, spec.endless_k, tokens), in.v = endless(in.v, spec.endless_k, tokens);
  // A packed call's bias and mask need only reach the longest sequence.
  for (Tensor* t : {&in.bias, &in.mask})
    if (!spec.packed() && *t && t->shape[3] > 1) *t = endless(*t, spec.endless_k, 3);
  return in;
}

Outputs CaseData::outputs() const { return {.o = o.tensor(), .lse = lse.tensor()}; }

Saved CaseData::saved() const {
  return {.o = o.tensor(), .lse = lse.tensor(), .d_o = d_o.tensor(), .d_lse = d_lse.tensor()};
}

Gradients CaseData::gradients() const {
  return {.dq = dq.tensor(), .dk = dk.tensor(), .dv = dv.tensor(), .dbias = dbias.tensor(), .dsinks = dsinks.tensor()};
}

std::vector<Buffer*> CaseData::buffers() {
  return {&q,      &k,      &v,      &bias,    &mask,    &slopes, &sinks,     &cu_q,     &cu_k,
          &used_q, &used_k, &rng,    &o,       &lse,     &d_o,    &d_lse,     &dq,       &dk,
          &dv,     &dbias,  &dsinks, &k_scale, &v_scale, &qv,     &tree_mask, &positions};
}

std::vector<const Buffer*> CaseData::buffers() const {
  const std::vector<Buffer*> all = const_cast<CaseData*>(this)->buffers();  // one list, two kinds of pointers
  return {all.begin(), all.end()};
}

}  // namespace tessera::cases
