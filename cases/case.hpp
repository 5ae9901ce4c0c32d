// SPDX-License-Identifier: Apache-2.0
// One case: shapes, options, memory layout, input distribution and seed; and the tensors built from it.
// Included by tests/ and cli/ alike: one object serves test, check, gradient and bench.
// Implements docs/algorithm.md's tensor table as data.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cases/buffer.hpp"
#include "tessera/types.hpp"

namespace tessera::cases {

enum class Distribution {
  normal,      // N(0,1)
  small,       // N(0,1e-3)
  outlier,     // N(0,1) + N(0,100) * Bernoulli(0.001)
  cold,        // every logit near -120
  huge,        // |logit| beyond 5e4
  structured,  // small integers that differ along every index, so that swapped strides show
  identity     // one-hot rows; ancestor C's 4x4 case
};

enum class Style {
  contiguous,
  gaps,         // padding between rows, heads and sequences, a different one for each tensor
  heads_first,  // BHSD memory seen as BSHD
  shifted,      // contiguous, every pointer misaligned by one element
  mixed,        // a different one of the above for each tensor, so K and V, O and dO differ
  broadcast     // stride 0 in Q, K, V and dO
};

// Which dimensions of a [B,Hq,Nq,Nk] tensor are full; the others have size 1.
struct Dims {
  bool b = true, h = true, i = true, j = true;
};

enum class Slopes { none, per_head, per_batch_head };
enum class Sinks {
  none,
  finite,
  some_infinite,
  high  // so far above the scores that every probability is near the end of f32's range, or beyond it
};

// Of K or V: one for all keys, one for each KV head, for each sequence and head, or for each key and head.
enum class Scales { none, one, per_head, per_sequence, per_key, per_group };  // per_group: of 128 dims

// Which draft tokens a query sees: all before it, the first, or those on the way to a root at random (blind: some
// queries not even themselves).
enum class Tree { none, chain, star, random, blind };

// What K or V is if not of the case's type.
struct Cached {
  std::optional<Type> type{};
  Scales scales = Scales::none;
  double size = 1;  // of the scales, about
  bool plain() const { return !type && scales == Scales::none; }
};

struct Grads {
  bool dq = true, dk = true, dv = true, dbias = true, dsinks = true;  // the last two only where the input is given
  bool all() const { return dq && dk && dv && dbias && dsinks; }
  bool any() const { return dq || dk || dv || dbias || dsinks; }
};

struct Case {
  std::string name;
  std::int64_t B = 1, Nq = 64, Nk = 64, Hq = 2, Hk = 2, D = 64, Dv = 0;  // Dv = 0: as D
  Type type = Type::f32;
  Options options{};

  // Packed: the lengths of the sequences (B, Nq and Nk are then not read). Front: rows of the tensors before
  // cu_seqlens[0]. Tail: rows beyond cu_seqlens[-1].
  std::vector<std::int32_t> packed_q{}, packed_k{};
  std::int64_t front_q = 0, front_k = 0, tail_q = 0, tail_k = 0;
  std::vector<std::int32_t> used_q{}, used_k{};  // seqused, where not empty
  // K and V, and the key dimension of bias and mask, have this many tokens with stride 0: huge tensors that occupy one
  // row of memory. Nk or packed_k still give the keys that are valid, and used_k (if padded) those that are used. Such
  // a case has no dK, dV or dBias: their memory would have full size.
  std::int64_t endless_k = 0;

  Cached cached_k{}, cached_v{};  // a case with such keys or values has no backward pass
  Tree tree = Tree::none;         // nor one with a tree or positions
  bool positions = false;         // a query stands at its depth in the tree
  bool qv = false;                // nor one whose scores are scale * (q.k + qv.v)

  bool bias = false;
  Dims bias_dims{};
  bool bias_f32 = false;   // f32 although Q is a 16-bit type
  double masked_bias = 0;  // share of the bias that is -inf
  bool mask = false;
  Dims mask_dims{};
  double mask_density = 0.7;  // share of visible elements
  Slopes slopes = Slopes::none;
  Sinks sinks = Sinks::none;
  bool dlse = false;
  bool rng = false;     // seed and offset in a tensor instead of the options
  bool no_lse = false;  // the forward pass that is judged writes no LSE

  bool f32_o = false, f32_grads = false, f32_do = false;
  bool backward = true;
  Grads grads{};

  Distribution distribution = Distribution::normal;
  Style style = Style::contiguous;
  bool caller_workspace = true;  // poisoned with NaN, of exactly the size that the plan needs
  std::uint64_t seed = 1;

  bool packed() const { return !packed_q.empty(); }
  std::int64_t tokens_q() const;  // of the packed tensors
  std::int64_t tokens_k() const;
  std::int64_t batches() const { return packed() ? static_cast<std::int64_t>(packed_q.size()) : B; }
  std::int64_t dim_v() const { return Dv == 0 ? D : Dv; }
  Type k_type() const { return cached_k.type.value_or(type); }
  Type v_type() const { return cached_v.type.value_or(type); }
  double scale() const;  // the number that multiplies q.k
};

// Everything that distinguishes a case, on one human-readable line.
std::string describe(const Case& spec);
// The command that runs this case alone.
std::string reproduce(const Case& spec);

// Where one sequence's rows are in tensors seen as [rows, heads, dim] and in LSE seen as a flat array.
struct Sequence {
  std::int64_t Nq = 0, Nk = 0;  // used lengths
  std::int64_t row_q = 0, row_k = 0;
  std::int64_t lse_first = 0, lse_head = 0;  // LSE element of (h, i) is lse_first + h * lse_head + i
  std::int64_t off = 0;                      // the diagonal: j = i + off
};

// The tensors of one case. Inputs are filled; whatever lies beyond the used lengths stays NaN. Gradients hold
// numbers when the case accumulates, NaN otherwise.
struct CaseData {
  Case spec;
  Buffer q, k, v, bias, mask, slopes, sinks, cu_q, cu_k, used_q, used_k, rng;
  Buffer o, lse, d_o, d_lse;
  Buffer dq, dk, dv, dbias, dsinks;
  Buffer k_scale, v_scale, qv, tree_mask, positions;
  std::vector<Sequence> sequences;

  // What the elements of K and V mean: their numbers times their scales.
  std::vector<double> keys() const;
  std::vector<double> values() const;
  Options options() const;  // the case's, less the seed where a tensor carries it
  Inputs inputs() const;
  Outputs outputs() const;
  Saved saved() const;
  Gradients gradients() const;
  std::vector<const Buffer*> buffers() const;
  std::vector<Buffer*> buffers();
};

CaseData build(const Case& spec);
void build_scales(CaseData& data);  // a part of it: cases/scales.cpp
void build_trees(CaseData& data);   // another: cases/trees.cpp
// The same values as contiguous f64 tensors, for the reference kernel; every gradient present, nothing accumulated.
CaseData widened(const CaseData& data);

}  // namespace tessera::cases
