// SPDX-License-Identifier: Apache-2.0
// Problem: the question that a plan answers, as a plain value without pointers. Equal problems get equal plans.
// Made by core/check.cpp from the caller's tensors; read by every backend.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "math/score.hpp"
#include "tessera/types.hpp"

namespace tessera {

enum class Pass { forward, backward };  // later: jvp, double_backward

// An optional tensor whose dimensions are each 1 or full: bias, mask.
struct Broadcast {
  Type type;
  std::array<std::int64_t, 4> shape;
  bool operator==(const Broadcast&) const = default;
};

// K and V in the pages of a cache.
struct Pages {
  std::int64_t count = 0, v_count = 0;  // of K's pool and of V's
  std::int64_t size = 0;                // keys that a page holds
  std::int64_t entries = 0;             // of a sequence's row of the table; listed by indptr: of all sequences
  bool indptr = false, v_table = false, leftpad = false, status = false;
  bool operator==(const Pages&) const = default;
};

struct Problem {
  Pass pass = Pass::forward;
  Device device{};
  // Bytes that divide every pointer and used stride of the inputs: q, k, v, and of the backward pass o and d_o; 16 at
  // most. That of outputs must not matter to a plan: it would decide about bits.
  int alignment = 16;
  bool far_strides = false;  // some stride of q, k, v or d_o is negative, or 2^40 bytes or more

  Type q_type = Type::f32, k_type = Type::f32, v_type = Type::f32, o_type = Type::f32;
  int k_scale = 0, v_scale = 0;  // dimensions of the scales: 0 (none), 1 [1|Hk], 2 [B,Hk], 3 [.,.,Hk], 4 [.,.,Hk,D/128]
  bool packed = false;
  // Packed: Nq, Nk are the total token counts. Paged: Nk is the most keys that the table has entries for.
  std::int64_t B = 0, Nq = 0, Nk = 0, Hq = 0, Hk = 0, D = 0, Dv = 0;
  std::int64_t tree_words = 0;  // of a row of the tree mask; 0: none
  bool positions = false;
  bool qv = false;  // scores are products of q with k and of qv with v
  bool seqused_q = false, seqused_k = false;
  std::optional<Pages> pages{};  // K and V have no batch or sequence of their own then, even if q is packed

  std::optional<Broadcast> bias{}, mask{};
  int slopes = 0;  // dimensions of the slopes: 0 (none), 1 [Hq], 2 [B,Hq]
  bool sinks = false, rng = false;
  bool state_in = false, state_out = false;                     // carried from call to call
  bool seq_row0 = false, seq_col0 = false, seq_batch0 = false;  // positions of each sequence

  bool lse = false;  // forward: asked for; backward: always
  bool d_lse = false;
  std::optional<Type> d_o{}, dq{}, dk{}, dv{}, dbias{}, dsinks{};

  Options options{};  // without seed and seed_offset, on which no plan depends; scale is the number itself

  bool operator==(const Problem&) const = default;

  // Whether there is a row of queries of some head at all. Where there is none, every gradient is 0.
  bool has_queries() const { return B > 0 && Hq > 0 && Nq > 0; }
  bool has_keys() const { return B > 0 && Hk > 0 && Nk > 0; }

  // A forward pass whose rows may go on from call to call, or whose bits do not depend on how it is cut into calls.
  bool carried() const { return pass == Pass::forward && (state_in || state_out || options.part_invariant); }

  ScoreOptions score_options() const;
  ScoreParameters<double> score_parameters() const;
  std::int64_t heads_per_kv() const { return Hk == 0 ? 1 : Hq / Hk; }
  // Upper bounds of one sequence's lengths, from shapes and hints alone.
  std::int64_t longest_q() const;
  std::int64_t longest_k() const;
};

// Whether K and V have q's type and no scales: what GPU kernels, matrix units and the backward pass take.
bool has_plain_keys(const Problem& problem);

// An option of scores, in words ("dropout is 0.1"), for kernels that know none of them; empty: there is none. A mask
// tensor is none of these: causal masks and windows are masks, too, and every kernel takes those.
std::string score_option_text(const Problem& problem);

// What makes a call a part of a problem beyond positions that all sequences share, in words; empty: nothing does.
std::string part_text(const Problem& problem);

// One paragraph for people, e.g. in `tessera plan`.
std::string text_of(const Problem& problem);

}  // namespace tessera
