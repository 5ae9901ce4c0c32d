// SPDX-License-Identifier: Apache-2.0
// Lengths that make no sense, as a kernel may find them in device memory, where nobody can refuse them: cu_seqlens that
// decrease, are negative or lead beyond the tensor, and such seqused. A call must end, write nothing outside its
// tensors, and leave the bits of the other sequences alone. Included by tests of the emulated machine and of GPUs.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "cases/case.hpp"

namespace tessera::test {

// Lengths at no multiple of any tile, padding behind them.
inline cases::Case senseless_base(std::int64_t D, Type type, bool causal) {
  cases::Case c{.name = "senseless", .Hq = 2, .Hk = 1, .D = D, .type = type, .options = {.causal = causal}};
  c.packed_q = {130, 70, 200, 64}, c.packed_k = {200, 130, 260, 70};
  c.used_q = c.packed_q, c.used_k = c.packed_k;
  c.tail_q = 40, c.tail_k = 90;
  return c;
}

struct Senseless {
  std::string name;
  std::vector<std::int64_t> cu_q{}, cu_k{}, used_q{}, used_k{};  // empty: as they are
  std::vector<std::size_t> kept{};                               // sequences that have nothing to do with it
};

inline std::vector<Senseless> senseless_lengths() {
  constexpr std::int64_t most = 2147483647, least = -most - 1;
  std::vector<Senseless> all = {
      {.name = "queries decrease", .cu_q = {0, 130, 100, 400, 464}, .kept = {0, 3}},
      {.name = "keys decrease", .cu_k = {0, 200, 150, 590, 660}, .kept = {0, 3}},
      {.name = "a negative entry", .cu_k = {0, -5, 330, 590, 660}, .kept = {2, 3}},
      {.name = "the first entry negative", .cu_q = {least, 130, 200, 400, 464}, .kept = {1, 2, 3}},
      {.name = "an entry beyond", .cu_q = {0, 130, 200, most, 464}, .kept = {0, 1}},
      {.name = "the last entry beyond",
       .cu_q = {0, 130, 200, 400, 505},
       .cu_k = {0, 200, 330, 590, 751},
       .kept = {0, 1, 2}},
      {.name = "the first block missing", .cu_k = {0, 390, 140, 400, 660}},
      {.name = "all negative", .cu_q = {-1, -1, -1, -1, -1}, .cu_k = {least, least, least, least, least}},
      {.name = "all beyond", .cu_q = {most, most, most, most, most}, .cu_k = {751, 751, 751, 751, 751}},
      {.name = "backwards", .cu_q = {464, 400, 200, 130, 0}, .cu_k = {660, 590, 330, 200, 0}},
      {.name = "used lengths", .used_q = {-7, 70, most, 64}, .used_k = {200, most, least, 70}, .kept = {1, 3}},
  };
  std::mt19937 random(7);
  for (int n = 0; n < 6; ++n) {
    Senseless one{.name = "random " + std::to_string(n)};
    for (auto* list : {&one.cu_q, &one.cu_k})
      for (int b = 0; b < 5; ++b) list->push_back(std::int64_t(random() % 1200) - (n % 3 == 0 ? 300 : 0));
    all.push_back(one);
  }
  return all;
}

inline void set_lengths(cases::CaseData& data, const Senseless& lengths) {
  const auto set = [](cases::Buffer& buffer, const std::vector<std::int64_t>& values) {
    for (std::size_t e = 0; e < values.size(); ++e) buffer.set(std::int64_t(e), double(values[e]));
  };
  set(data.cu_q, lengths.cu_q), set(data.cu_k, lengths.cu_k);
  set(data.used_q, lengths.used_q), set(data.used_k, lengths.used_k);
}

// The results of sequence b, bit by bit; whatever of them the call writes.
inline std::vector<std::uint64_t> bits_of_sequence(const cases::CaseData& data, std::size_t b, bool backward) {
  const cases::Sequence& s = data.sequences[b];
  std::vector<std::uint64_t> out;
  const auto take_rows = [&](const cases::Buffer& buffer, std::int64_t row, std::int64_t rows, std::int64_t width) {
    const std::vector<std::uint64_t> bits = buffer.bits();
    out.insert(out.end(), bits.begin() + row * width, bits.begin() + (row + rows) * width);
  };
  const cases::Case& c = data.spec;
  if (backward) {
    take_rows(data.dq, s.row_q, s.Nq, c.Hq * c.D);
    take_rows(data.dk, s.row_k, s.Nk, c.Hk * c.D), take_rows(data.dv, s.row_k, s.Nk, c.Hk * c.dim_v());
  } else {
    take_rows(data.o, s.row_q, s.Nq, c.Hq * c.dim_v());
    for (std::int64_t h = 0; h < c.Hq; ++h) take_rows(data.lse, s.lse_first + h * s.lse_head, s.Nq, 1);
  }
  return out;
}

// `run(data)`: a forward pass, or a backward pass of a case whose O and LSE are there.
template <class Run>
void check_senseless_lengths(const cases::Case& spec, bool backward, Run run) {
  const auto ready = [&] {
    cases::CaseData data = cases::build(spec);
    if (backward) forward(data.inputs(), data.outputs(), data.options(), {});
    return data;
  };
  cases::CaseData expected = ready();
  run(expected);
  for (const Senseless& lengths : senseless_lengths()) {
    SCOPED_TRACE(lengths.name);
    cases::CaseData data = ready();
    set_lengths(data, lengths);
    ASSERT_NO_THROW(run(data));
    for (const std::size_t b : lengths.kept)
      EXPECT_EQ(bits_of_sequence(data, b, backward), bits_of_sequence(expected, b, backward)) << "sequence " << b;
    for (const cases::Buffer* buffer : data.buffers())
      EXPECT_TRUE(buffer->margins_intact()) << "a margin or gap was written";
  }
}

}  // namespace tessera::test
