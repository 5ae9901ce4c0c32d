// SPDX-License-Identifier: Apache-2.0
// Lengths, mask and addresses of one sequence; see sequence.hpp.
#include "core/sequence.hpp"

#include <cstring>

#include "core/limits.hpp"

namespace tessera {

alignas(64) const char zero_row[most_dims * 8] = {};

namespace {

char* byte_address(const Tensor& t, std::int64_t element) {
  // A tensor without elements may have no memory; its address is never used, but must not look like "not given".
  static char nothing;
  return t.data ? static_cast<char*>(t.data) + element * size_of(t.type) : &nothing;
}

}  // namespace

Sequence lengths_of(const Problem& p, const Call& call, std::int64_t b) {
  const Inputs& in = call.inputs;
  Sequence s{.b = b};
  s.q_begin = p.packed ? entry(in.cu_seqlens_q, b) : 0;
  s.q_capacity = p.packed ? entry(in.cu_seqlens_q, b + 1) - s.q_begin : p.Nq;
  s.nq = in.seqused_q ? entry(in.seqused_q, b) : s.q_capacity;
  if (p.pages) {
    s.leftpad = in.leftpad_k ? entry(in.leftpad_k, b) : 0;
    s.nk = s.k_capacity = entry(in.seqused_k, b) - s.leftpad;
  } else {
    s.k_begin = p.packed ? entry(in.cu_seqlens_k, b) : 0;
    s.k_capacity = p.packed ? entry(in.cu_seqlens_k, b + 1) - s.k_begin : p.Nk;
    s.nk = in.seqused_k ? entry(in.seqused_k, b) : s.k_capacity;
  }

  const Options& o = p.options;
  s.row0 = o.row0 + (in.seq_row0 ? place_entry(in.seq_row0, b) : 0);
  s.col0 = o.col0 + (in.seq_col0 ? place_entry(in.seq_col0, b) : 0);
  s.batch = o.batch0 + (in.seq_batch0 ? place_entry(in.seq_batch0, b) : b);
  return s;
}

namespace {

// Where each query stands, and its bits of the tree.
RowMask rows_of_queries(const Problem& p, const Call& call, const Sequence& s) {
  const Options& o = p.options;
  RowMask rows{.part = s.row0 - s.col0,
               .shift = s.shift,
               .tree_begin = s.nk - s.nq,
               .causal = o.causal,
               .left = o.window_left,
               .right = o.window_right};
  if (p.positions) {
    const Tensor& t = call.inputs.positions;
    const std::int64_t first = p.packed ? s.q_begin * stride(t, 0) : s.b * stride(t, 0);
    rows.positions = reinterpret_cast<const Int32*>(byte_address(t, first));
    rows.position_stride = stride(t, t.ndim - 1);
    bool in_line = true;  // neighbours in the sequence, as without positions
    for (std::int64_t i = 1; i < s.nq; ++i) in_line = in_line && rows.place(i) - i == rows.place(0);
    if (in_line && s.nq > 0) rows.shift = rows.place(0), rows.positions = nullptr;
  }
  if (p.tree_words > 0) {
    const Tensor& t = call.inputs.tree_mask;
    const std::int64_t first = p.packed ? s.q_begin * stride(t, 0) : s.b * stride(t, 0);
    rows.tree = reinterpret_cast<const Int32*>(byte_address(t, first));
    rows.row_stride = stride(t, t.ndim - 2), rows.word_stride = stride(t, t.ndim - 1);
  }
  return rows;
}

// The last key that query i sees by the tree or, before it, by `causal`. Windows are not looked at.
std::int64_t last_seen(const RowMask& rows, std::int64_t i, std::int64_t nq, std::int64_t nk) {
  const std::int64_t before = rows.causal ? rows.place(i) : nk - 1;
  if (!rows.tree) return before;
  for (std::int64_t t = nq - 1; t >= 0; --t)
    if (rows.bit(i, t)) return rows.tree_begin + t;
  return lesser(before, rows.tree_begin - 1);
}

// The narrowest band that holds all that the rows see: that of `causal` for a chain of tokens, whose bits then do not
// differ from it.
BandMask band_around(const RowMask& rows, std::int64_t nq, std::int64_t nk) {
  BandMask band{.low = BandMask::unbounded, .high = -BandMask::unbounded, .keys = nk, .rows = nq};
  for (std::int64_t i = 0; i < nq; ++i) {
    const std::int64_t place = rows.place(i);
    const std::int64_t from = rows.left >= 0 ? bounded(place - bounded(rows.left)) - i : -BandMask::unbounded;
    std::int64_t to = rows.causal || rows.tree ? last_seen(rows, i, nq, nk) - i : BandMask::unbounded;
    if (rows.right >= 0) to = lesser(to, bounded(place + bounded(rows.right)) - i);
    band.low = lesser(band.low, from), band.high = greater(band.high, to);
  }
  return band;
}

}  // namespace

Sequence sequence_of(const Problem& p, const Call& call, std::int64_t b) {
  Sequence s = lengths_of(p, call, b);
  const Options& o = p.options;
  const std::int64_t off = diagonal_offset(static_cast<int>(o.alignment), s.nq, s.nk, o.diagonal_offset);
  s.shift = diagonal_shift(off, s.row0, s.col0);
  s.mask = band_mask(s.nq, s.nk, o.causal, o.window_left, o.window_right, off, s.row0, s.col0);
  s.rows.shift = s.shift;
  if (!p.positions && p.tree_words == 0) return s;
  s.rows = rows_of_queries(p, call, s);
  s.shift = s.rows.shift;
  if (s.nq > 0) s.mask = band_around(s.rows, s.nq, s.nk);
  return s;
}

TokenRows token_rows(const Tensor& t, const Problem& p, std::int64_t b, std::int64_t begin) {
  if (!t) return {};
  if (p.packed) return {t.type, byte_address(t, begin * stride(t, 0)), stride(t, 0), stride(t, 1)};
  return {t.type, byte_address(t, b * stride(t, 0)), stride(t, 1), stride(t, 2)};
}

// Where the scales of these keys lie. `t` has 1 to 4 dimensions; the third, or the last of fewer, is the heads.
static KeyRows scaled(KeyRows rows, const Tensor& t, const Sequence& s, std::int64_t kv) {
  if (!t) return rows;
  const bool per_key = t.ndim >= 3, paged = rows.table != nullptr;
  std::int64_t first = kv * stride(t, per_key ? 2 : t.ndim - 1);
  if (t.ndim == 2 || (per_key && !paged)) first += s.b * stride(t, 0);
  if (per_key && !paged) first += s.k_begin * stride(t, 1);
  rows.scales = reinterpret_cast<const float*>(byte_address(t, first));
  rows.scale_stride = per_key ? stride(t, 1) : 0;
  rows.scale_page_stride = per_key ? stride(t, 0) : 0;
  if (t.ndim == 4) rows.scale_groups = t.shape[3], rows.scale_group_stride = stride(t, 3);
  return rows;
}

// K or V; v's table is `apart` from k's if given.
static KeyRows rows_of(const Tensor& t, const Tensor& apart, const Problem& p, const Call& call, const Sequence& s,
                       std::int64_t kv) {
  const std::int64_t bytes = size_of(t.type);
  if (!p.pages) {
    const TokenRows rows = token_rows(t, p, s.b, s.k_begin);
    return {.type = t.type, .base = static_cast<const char*>(rows.at(0, kv)), .stride = rows.token * bytes};
  }
  const Inputs& in = call.inputs;
  const Tensor& table = apart ? apart : p.pages->indptr ? in.page_indices : in.block_table;
  const std::int64_t first = p.pages->indptr ? entry(in.page_indptr, s.b) * stride(table, 0) : s.b * stride(table, 0);
  return {.type = t.type,
          .base = byte_address(t, kv * stride(t, 2)),
          .stride = stride(t, 1) * bytes,
          .table = reinterpret_cast<const Int32*>(byte_address(table, first)),
          .table_stride = stride(table, table.ndim - 1),
          .pages = t.shape[0],
          .page_size = p.pages->size,
          .page_stride = stride(t, 0) * bytes,
          .leftpad = s.leftpad};
}

KeyRows keys_of(const Problem& p, const Call& call, const Sequence& s, std::int64_t kv) {
  return scaled(rows_of(call.inputs.k, {}, p, call, s, kv), call.inputs.k_scale, s, kv);
}

KeyRows values_of(const Problem& p, const Call& call, const Sequence& s, std::int64_t kv) {
  return scaled(rows_of(call.inputs.v, call.inputs.v_block_table, p, call, s, kv), call.inputs.v_scale, s, kv);
}

void report_pages(const Problem& p, const Call& call) {
  if (!call.outputs.status) return;
  bool outside = false;
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = sequence_of(p, call, b);
    if (s.nq == 0 || s.nk == 0) continue;
    for (const KeyRows& rows : {keys_of(p, call, s, 0), values_of(p, call, s, 0)})
      for (Int64 n = s.leftpad / rows.page_size; n <= (s.leftpad + s.nk - 1) / rows.page_size; ++n)
        outside = outside || !rows.page_at(n);
  }
  auto* word = static_cast<std::int32_t*>(call.outputs.status.data);
  if (outside) __atomic_fetch_or(word, page_outside_pool, __ATOMIC_RELAXED);
}

RowNumbers row_numbers(const Tensor& t, const Problem& p, const Sequence& s) {
  if (!t) return {};
  if (p.packed) return {t.type, byte_address(t, s.q_begin * stride(t, 1)), stride(t, 1), stride(t, 0)};
  return {t.type, byte_address(t, s.b * stride(t, 0)), stride(t, 2), stride(t, 1)};
}

PairNumbers pair_numbers(const Tensor& t, const Sequence& s) {
  if (!t) return {};
  return {t.type, byte_address(t, s.b * stride(t, 0)), stride(t, 1), stride(t, 2), stride(t, 3)};
}

static double slope_of(const Call& call, const Problem& p, std::int64_t b, std::int64_t h) {
  const Tensor& t = call.inputs.slopes;
  if (p.slopes == 0) return 0;
  return load_element(t.data, t.type, p.slopes == 1 ? h * stride(t, 0) : b * stride(t, 0) + h * stride(t, 1));
}

ScoreNumbers<double> score_numbers_of(const Call& call, const Problem& p, std::int64_t b, std::int64_t h, double unit) {
  return score_numbers(p.score_options(), p.options.scale, p.score_parameters(), slope_of(call, p, b, h), unit);
}

double sink_of(const Call& call, std::int64_t h) {
  const Tensor& t = call.inputs.sinks;
  return t ? load_element(t.data, t.type, h * stride(t, 0)) : -__builtin_inf();
}

DropoutSeed dropout_seed(const Options& options, const Tensor& rng) {
  if (!rng) return {options.seed, options.seed_offset};
  const auto* words = static_cast<const std::int64_t*>(rng.data);
  return {static_cast<std::uint64_t>(words[0]), static_cast<std::uint64_t>(words[stride(rng, 0)])};
}

namespace {

void clear_rows(const TokenRows& rows, std::int64_t begin, std::int64_t end, std::int64_t heads, std::int64_t width) {
  for (std::int64_t i = begin; i < end; ++i)
    for (std::int64_t h = 0; h < heads; ++h)
      std::memset(rows.at(i, h), 0, static_cast<std::size_t>(width * size_of(rows.type)));
}

void clear_side(const Tensor& t, const Problem& p, const Call& call, bool keys, std::int64_t width) {
  if (!t || t.elements() == 0) return;
  const std::int64_t heads = keys ? p.Hk : p.Hq;
  std::int64_t used_until = 0;  // packed: tokens before this one are done
  for (std::int64_t b = 0; b < p.B; ++b) {
    const Sequence s = sequence_of(p, call, b);
    const std::int64_t begin = keys ? s.k_begin : s.q_begin, n = keys ? s.nk : s.nq;
    const std::int64_t capacity = keys ? s.k_capacity : s.q_capacity;
    clear_rows(token_rows(t, p, b, begin), n, capacity, heads, width);
    if (p.packed) clear_rows(token_rows(t, p, 0, 0), used_until, begin, heads, width);
    used_until = begin + capacity;
  }
  if (p.packed) clear_rows(token_rows(t, p, 0, 0), used_until, keys ? p.Nk : p.Nq, heads, width);
}

}  // namespace

void clear_unused_rows(const Problem& p, const Call& call) {
  if (p.options.accumulate) return;
  clear_side(call.gradients.dq, p, call, false, p.D);
  clear_side(call.gradients.dk, p, call, true, p.D);
  clear_side(call.gradients.dv, p, call, true, p.Dv);
}

// dimension: the first one whose elements are cleared, of the part that begins at element `first`.
static void clear_tensor(const Tensor& t, int dimension = 0, std::int64_t first = 0) {
  if (dimension == t.ndim) return store_element(t.data, t.type, first, 0);
  for (std::int64_t n = 0; n < t.shape[static_cast<std::size_t>(dimension)]; ++n)
    clear_tensor(t, dimension + 1, first + n * stride(t, dimension));
}

void clear_gradients(const Problem& p, const Call& call) {
  if (p.options.accumulate) return;
  const Gradients& g = call.gradients;
  for (const Tensor* t : {&g.dq, &g.dk, &g.dv, &g.dbias, &g.dsinks})
    if (t->elements() > 0) clear_tensor(*t);
}

}  // namespace tessera
