// SPDX-License-Identifier: Apache-2.0
// One sequence of a call, padded or packed: its lengths, its mask, and where its rows lie in memory. This is the only
// place that knows how cu_seqlens, seqused and strides turn into addresses. Included by backends that run on the host.
#pragma once

#include <cstdint>

#include "core/kernel.hpp"
#include "core/key_rows.hpp"
#include "core/row_mask.hpp"
#include "core/tensor.hpp"
#include "math/mask.hpp"
#include "math/score.hpp"

namespace tessera {

// Rows of a [B,N,H,D] or [T,H,D] tensor that belong to one sequence: element (i, h, d) is at base + i*token + h*head +
// d.
struct TokenRows {
  Type type = Type::f32;
  char* base = nullptr;
  std::int64_t token = 0, head = 0;

  void* at(std::int64_t i, std::int64_t h) const { return base + (i * token + h * head) * size_of(type); }
  explicit operator bool() const { return base != nullptr; }
};

// One number per query and head, from [B,H,N] or [H,T]: LSE, dLSE.
struct RowNumbers {
  Type type = Type::f32;
  char* base = nullptr;
  std::int64_t row = 0, head = 0;

  double get(std::int64_t i, std::int64_t h) const { return load_element(base, type, i * row + h * head); }
  void set(std::int64_t i, std::int64_t h, double x) const { store_element(base, type, i * row + h * head, x); }
  explicit operator bool() const { return base != nullptr; }
};

// bias, mask, dBias of one sequence: strides are 0 in dimensions of size 1.
struct PairNumbers {
  Type type = Type::f32;
  char* base = nullptr;
  std::int64_t head = 0, row = 0, key = 0;

  std::int64_t index(std::int64_t h, std::int64_t i, std::int64_t j) const { return h * head + i * row + j * key; }
  double get(std::int64_t h, std::int64_t i, std::int64_t j) const { return load_element(base, type, index(h, i, j)); }
  explicit operator bool() const { return base != nullptr; }
};

struct Sequence {
  std::int64_t b = 0;
  std::int64_t q_begin = 0, k_begin = 0;        // first token in the packed tensors; 0 when padded
  std::int64_t q_capacity = 0, k_capacity = 0;  // rows that memory holds
  std::int64_t nq = 0, nk = 0;                  // rows in use: Nq_b, Nk_b
  std::int64_t leftpad = 0;                     // paged keys: places before key 0
  std::int64_t row0 = 0, col0 = 0, batch = 0;   // global positions of query 0 and key 0, and number of the sequence
  std::int64_t shift = 0;                       // the diagonal is j - i = shift: off + row0 - col0
  BandMask mask{};
  RowMask rows{};  // where queries stand; if given, what they see, and the mask is a band around it
};

Sequence sequence_of(const Problem& problem, const Call& call, std::int64_t b);
// Its lengths and places alone, without a mask: nothing but lengths is read.
Sequence lengths_of(const Problem& problem, const Call& call, std::int64_t b);

TokenRows token_rows(const Tensor& t, const Problem& p, std::int64_t b, std::int64_t begin);
// K and V of one KV head, padded, packed or paged.
KeyRows keys_of(const Problem& p, const Call& call, const Sequence& s, std::int64_t kv);
KeyRows values_of(const Problem& p, const Call& call, const Sequence& s, std::int64_t kv);

// Sets a bit of the caller's status word, if there is one, where a used table entry is outside of the pool.
void report_pages(const Problem& problem, const Call& call);

RowNumbers row_numbers(const Tensor& t, const Problem& p, const Sequence& s);
PairNumbers pair_numbers(const Tensor& t, const Sequence& s);

// The numbers of sequence b's head h, times `unit` where they stand in an exponent.
ScoreNumbers<double> score_numbers_of(const Call& call, const Problem& p, std::int64_t b, std::int64_t h, double unit);
double sink_of(const Call& call, std::int64_t h);

// Seed and offset of dropout: from the options, or from the rng tensor in host memory.
struct DropoutSeed {
  std::uint64_t seed, offset;
};
DropoutSeed dropout_seed(const Options& options, const Tensor& rng);

// Gradient rows that no sequence uses (padding behind used lengths, gaps between packed sequences) get 0, unless the
// call accumulates: then += 0 leaves them as they are.
void clear_unused_rows(const Problem& problem, const Call& call);

// The backward pass of a problem without queries: every gradient is 0, or stays as it is if the call accumulates.
void clear_gradients(const Problem& problem, const Call& call);

}  // namespace tessera
