// SPDX-License-Identifier: Apache-2.0
// The kernels' parameters; see arguments.hpp.
#include "gpu/arguments.hpp"

#include <algorithm>

#include "core/limits.hpp"
#include "core/tensor.hpp"

namespace tessera::gpu {

TokenRef token_ref(const Tensor& t, const Problem& p) {
  if (!t) return {};
  if (p.packed) return {t.data, 0, stride(t, 0), stride(t, 1)};
  return {t.data, stride(t, 0), stride(t, 1), stride(t, 2)};
}

TokenRef page_ref(const Tensor& t) { return {t.data, stride(t, 0), stride(t, 1), stride(t, 2)}; }

namespace {

RowRef row_ref(const Tensor& t, const Problem& p) {
  if (!t) return {};
  if (p.packed) return {static_cast<float*>(t.data), 0, stride(t, 0), stride(t, 1)};
  return {static_cast<float*>(t.data), stride(t, 0), stride(t, 1), stride(t, 2)};
}

PairRef pair_ref(const Tensor& t) {
  if (!t) return {};
  return {t.data, stride(t, 0), stride(t, 1), stride(t, 2), stride(t, 3)};
}

LengthRef length_ref(const Tensor& t) {
  if (!t) return {};
  return {static_cast<const Int32*>(t.data), stride(t, 0)};
}

// How far along a dimension bias and mask can be indexed: packed ones are as large as the caller made them.
Int64 most_elements(const Problem& p, std::size_t dimension) {
  Int64 most = BandMask::unbounded;
  for (const auto& pairs : {p.bias, p.mask})
    if (pairs && pairs->shape[dimension] != 1) most = lesser(most, pairs->shape[dimension]);
  return most;
}

Question question(const Problem& p, const Call& call, double score_scale) {
  const Inputs& in = call.inputs;
  const Options& o = p.options;
  const UInt32 threshold = dropout_threshold(o.dropout);
  Question x{.q = token_ref(in.q, p),
             .k = token_ref(in.k, p),
             .v = token_ref(in.v, p),
             // Where there are no rows, kernels have nothing to look for in however many sequences.
             .B = static_cast<Int32>(p.has_queries() || p.has_keys() ? p.B : 0),
             .Hq = static_cast<Int32>(p.Hq),
             .Hk = static_cast<Int32>(p.Hk),
             .score_scale = static_cast<float>(score_scale),
             .Nq = p.Nq,
             .Nk = p.Nk,
             .cu_seqlens_q = length_ref(in.cu_seqlens_q),
             .cu_seqlens_k = length_ref(in.cu_seqlens_k),
             .seqused_q = length_ref(in.seqused_q),
             .seqused_k = length_ref(in.seqused_k),
             .scale = static_cast<float>(o.scale),
             .parameters = rounded(p.score_parameters()),
             .causal = o.causal,
             .alignment = static_cast<Int32>(o.alignment),
             .window_left = o.window_left,
             .window_right = o.window_right,
             .diagonal_offset = o.diagonal_offset,
             .row0 = o.row0,
             .col0 = o.col0,
             .head0 = o.head0,
             .batch0 = o.batch0,
             .bias = pair_ref(in.bias),
             .mask = pair_ref(in.mask),
             .most_queries = most_elements(p, 2),
             .most_keys = most_elements(p, 3),
             .slopes = static_cast<const float*>(in.slopes.data),
             .slope_batch = p.slopes == 2 ? stride(in.slopes, 0) : 0,
             .slope_head = p.slopes ? stride(in.slopes, p.slopes - 1) : 0,
             .sinks = static_cast<const float*>(in.sinks.data),
             .sink_head = p.sinks ? stride(in.sinks, 0) : 0,
             .dropout_threshold = threshold,
             .keep_scale = static_cast<float>(dropout_scale(threshold)),
             .key = dropout_key(call.options.seed, call.options.seed_offset),
             .rng = static_cast<const Int64*>(in.rng.data),
             .rng_stride = p.rng ? stride(in.rng, 0) : 0};
  return x;
}

}  // namespace

Element element_of(Type type) {
  switch (type) {
    case Type::f16:
      return Element::f16;
    case Type::bf16:
      return Element::bf16;
    case Type::e4m3:
      return Element::e4m3;
    case Type::i8:
      return Element::i8;
    default:
      return Element::f32;
  }
}

ScoreConfig score_config(const Problem& p) {
  return ScoreConfig::of(p.score_options(), p.bias ? element_of(p.bias->type) : Element::none);
}

double corrected_scale(const Problem& p, bool halves) {
  const double length = static_cast<double>(p.D) / (halves ? 2 : 1);
  const double lost = p.q_type == Type::f16 ? std::min(length * 0x1p-28, 5 * 0x1p-24) : length * 1.25 * 0x1p-30;
  return p.options.scale * (1 + lost);
}

PageTables page_tables(const Problem& p, const Call& call) {
  if (!p.pages) return {};
  const Inputs& in = call.inputs;
  const auto table = [&](const Tensor& t, std::int64_t pages) {
    PageTable out{.entries = static_cast<const Int32*>(t.data), .sequence = 0, .entry = 0, .pages = pages};
    if (t) out.sequence = t.ndim == 2 ? stride(t, 0) : 0, out.entry = stride(t, t.ndim - 1);
    return out;
  };
  const Tensor& of_k = p.pages->indptr ? in.page_indices : in.block_table;
  return {.k = table(of_k, p.pages->count),
          .v = table(p.pages->v_table ? in.v_block_table : of_k, p.pages->v_count),
          .indptr = length_ref(in.page_indptr),
          .leftpad = length_ref(in.leftpad_k),
          .entries = p.pages->entries,
          .size = p.pages->size,
          .status = static_cast<Int32*>(call.outputs.status.data)};
}

ScaleRef scale_ref(const Tensor& t) {
  if (!t) return {};
  ScaleRef out{.data = static_cast<float*>(t.data), .sequence = 0, .page = 0, .place = 0, .head = 0};
  out.head = stride(t, t.ndim == 4 ? 2 : t.ndim - 1);  // with four dimensions, of the first 128 dims
  if (t.ndim == 2) out.sequence = stride(t, 0);
  if (t.ndim > 2) out.page = stride(t, 0), out.place = stride(t, 1);
  return out;
}

States states_of(const Problem& p, const Call& call) {
  const auto ref = [&](const State& s) {
    StateRef out{.o = token_ref(s.o, p), .m = row_ref(s.m, p), .l = static_cast<double*>(s.l.data)};
    const int n = s.l.ndim;
    if (s.l)
      out.l_batch = p.packed ? 0 : stride(s.l, 0), out.l_head = stride(s.l, n - 2), out.l_row = stride(s.l, n - 1);
    return out;
  };
  return {.in = ref(call.inputs.state), .out = ref(call.outputs.state)};
}

ForwardParams forward_params(const Problem& p, const Call& call, double score_scale) {
  return {.x = question(p, call, score_scale), .o = token_ref(call.outputs.o, p), .lse = row_ref(call.outputs.lse, p)};
}

namespace {

// Rows of one head's worth of queries (keys), over all sequences, times heads: how many rows delta, lse2 and the
// accumulators have.
std::int64_t query_rows(const Problem& p) { return p.Hq * (p.packed ? p.Nq : p.B * p.Nq); }
std::int64_t key_rows(const Problem& p) { return p.Hk * (p.packed ? p.Nk : p.B * p.Nk); }

// One after another, each at a multiple of 16 bytes.
class Carver {
 public:
  explicit Carver(void* workspace) : base(static_cast<float*>(workspace)) {}
  float* take(std::int64_t numbers) {
    float* at = base && numbers > 0 ? base + used : nullptr;
    used = tessera::sum({used, rounded_up(numbers, 4)});
    return at;
  }
  Sum sum(int copies, std::int64_t rows, int width) {
    const std::int64_t numbers = product({rows, padded_to_4(width)});
    return {.data = take(product({copies, numbers})), .copy = numbers, .copies = copies};
  }
  std::int64_t bytes() const { return product({used, sizeof(float)}); }

 private:
  float* base;
  std::int64_t used = 0;
};

struct Carved {
  float *delta, *lse2;
  Sum dq, dk, dv;
  std::int64_t bytes;
};

Carved carve(const Problem& p, const Accumulators& a, void* workspace) {
  Carver carver(workspace);
  Carved out{};
  out.delta = carver.take(query_rows(p));
  out.lse2 = carver.take(query_rows(p));
  out.dq = carver.sum(a.dq, query_rows(p), static_cast<int>(p.D));
  out.dk = carver.sum(a.dk, key_rows(p), static_cast<int>(p.D));
  out.dv = carver.sum(a.dv, key_rows(p), static_cast<int>(p.Dv));
  out.bytes = carver.bytes();
  return out;
}

}  // namespace

std::int64_t workspace_bytes(const Problem& p, const Accumulators& a) {
  return p.pass == Pass::forward ? 0 : carve(p, a, nullptr).bytes;
}

BackwardParams backward_params(const Problem& p, const Call& call, const Accumulators& a, double score_scale) {
  const Carved carved = carve(p, a, call.execution.workspace);
  return {.x = question(p, call, score_scale),
          .o = token_ref(call.saved.o, p),
          .d_o = token_ref(call.saved.d_o, p),
          .lse = row_ref(call.saved.lse, p),
          .d_lse = row_ref(call.saved.d_lse, p),
          .dq = token_ref(call.gradients.dq, p),
          .dk = token_ref(call.gradients.dk, p),
          .dv = token_ref(call.gradients.dv, p),
          .delta = carved.delta,
          .lse2 = carved.lse2,
          .row_head = p.packed ? p.Nq : p.B * p.Nq,
          .row_batch = p.packed ? 0 : p.Nq,
          .key_head = p.packed ? p.Nk : p.B * p.Nk,
          .key_batch = p.packed ? 0 : p.Nk,
          .dq_sum = carved.dq,
          .dk_sum = carved.dk,
          .dv_sum = carved.dv,
          .dbias = pair_ref(call.gradients.dbias),
          .dbias_batches = static_cast<Int32>(p.dbias ? p.bias->shape[0] : 0),
          .dbias_heads = static_cast<Int32>(p.dbias ? p.bias->shape[1] : 0),
          .dbias_rows = p.dbias ? p.bias->shape[2] : 0,
          .dbias_keys = p.dbias ? p.bias->shape[3] : 0,
          .dsinks = static_cast<float*>(call.gradients.dsinks.data),
          .dsink_head = p.dsinks ? stride(call.gradients.dsinks, 0) : 0,
          .accumulate = p.options.accumulate};
}

std::int64_t query_blocks(const Problem& p, std::int64_t rows) {
  return !p.has_queries() ? 0 : product({p.Hq, block_count(p.packed, p.Nq, rows, p.B)});
}

std::int64_t key_blocks(const Problem& p, std::int64_t rows) {
  return !p.has_keys() ? 0 : product({p.Hk, block_count(p.packed, p.Nk, rows, p.B)});
}

std::int64_t heads_in_cache(const cuda::Target& target, std::int64_t head_bytes) {
  return std::max<std::int64_t>(1, std::int64_t{target.l2_bytes} * 2 / 5 / std::max<std::int64_t>(1, head_bytes));
}

}  // namespace tessera::gpu
