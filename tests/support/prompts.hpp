// SPDX-License-Identifier: Apache-2.0
// Prefill over the pages of a cache, as kernels of several families are tested on it: chunks of prompts behind keys
// that are cached already, judged by float64 and bit for bit by keys in one piece, with NaN wherever no key lies; and
// batches of prompts and of decoding sequences. Included by the tests of paged prefill of tests/mma and tests/sm90.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/kernel.hpp"
#include "gpu/pages.hpp"
#include "tests/support/far_pages.hpp"
#include "tests/support/senseless.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {

// Prompts of several lengths, a chunk of each, in a padded batch.
inline Case chunks(std::int64_t D, std::int64_t Dv = 0) {
  Case c{.name = "chunks", .B = 4, .Nq = 70, .Nk = 300, .Hq = 2, .Hk = 1, .D = D, .Dv = Dv};
  c.type = Type::bf16, c.backward = false, c.options.causal = true;
  c.used_q = {70, 1, 33, 5}, c.used_k = {300, 257, 33, 0};
  return c;
}

// A batch of prompts and of sequences that decode, in one call: rows, queries times three heads, around the 64 that
// divide them.
inline Case mixed_batch(Type type, std::int64_t D) {
  Case c{.name = "mixed", .Hq = 3, .Hk = 1, .D = D, .type = type};
  c.packed_q = {1, 90, 21, 0, 22, 4}, c.packed_k = {257, 300, 21, 9, 65, 1};
  c.options.causal = true, c.options.max_seqlen_q = 90, c.backward = false, c.seed = 5;
  return c;
}

// Of a prompt of few rows, and of one of more.
inline bool has_few_rows(const Case& c, std::int64_t queries) { return queries * c.Hq <= gpu::few_rows * c.Hk; }

// A family's kernels, run somewhere.
struct Prefill {
  std::function<void(const Call& call, const std::string& kernel)> run;
  std::string kernel;           // for prompts: "mma"
  std::int64_t page_size = 16;  // of the smallest pages that it takes, or of usual ones

  static Call call_of(CaseData& data) {
    Call call{};
    call.inputs = data.inputs(), call.options = data.options(), call.outputs = data.outputs();
    return call;
  }
  static void judge(const CaseData& data, const Expectation& expected) {
    for (const OutputReport& report : {compare("o", data.o, expected.o), compare_lse(data.lse, expected.lse)})
      EXPECT_TRUE(report.ok) << report.name << " " << report.detail;
  }

  // Keys in one piece, judged by float64.
  CaseData judged(const Case& spec) const {
    CaseData data = build(spec);
    const Expectation expected = expect(data);
    run(call_of(data), kernel);
    judge(data, expected);
    return data;
  }

  // The paged call has these bits, and sets these of the status word.
  void expect_paged(const CaseData& expected, const PagedCase& paged, std::int32_t bits) const {
    CaseData data = build(expected.spec);
    std::int32_t status = 4;  // somebody else's bit
    Call call = call_of(data);
    call.inputs = paged.in, call.outputs.status = Tensor(&status, Type::i32, {1});
    run(call, kernel);
    expect_same_bits(expected.o, data.o, "o");
    expect_same_bits(expected.lse, data.lse, "lse");
    EXPECT_EQ(status, 4 | bits);
    EXPECT_TRUE(data.o.margins_intact() && data.lse.margins_intact());
  }

  // Pages behind a window have been given back: their entries say anything, and nobody reads them.
  void expect_unseen_pages_unread(const std::vector<std::int64_t>& page_sizes) const {
    Case spec = chunks(64);
    spec.options.window_left = 100, spec.B = 1, spec.used_q = {}, spec.used_k = {};
    const CaseData expected = judged(spec);
    for (const std::int64_t P : page_sizes) {
      PagedCase paged(expected, {.page_size = P, .leftpad = {40}});
      // Query 0 stands at key 230 and sees no key before 130.
      for (std::int64_t j = 0; j + P <= 130; ++j) paged.entry(0, j) = PagedCase::never_read;
      expect_paged(expected, paged, 0);
    }
  }

  // A used entry outside of the pool reads as zeros and sets the bit; other sequences keep theirs.
  void expect_bad_entries_read_as_zeros() const {
    const std::int64_t P = page_size;
    for (const Table table : tables)
      for (const std::int32_t bad : {std::numeric_limits<std::int32_t>::min(), 0}) {
        CaseData data = build(chunks(64));
        PagedCase paged(data, {.page_size = P, .table = table});
        const std::int32_t entry = bad == 0 ? static_cast<std::int32_t>(paged.pages) : bad;
        for (const std::int64_t j : {std::int64_t{0}, 5 * P, std::int64_t{256}}) {
          paged.entry(1, j) = entry;
          for (const bool side : {false, true}) {
            if (table == Table::apart && side) continue;  // the other table is as it was
            Buffer& rows = side ? data.v : data.k;
            for (std::int64_t key = j / P * P; key < std::min<std::int64_t>(257, j / P * P + P); ++key)
              for (std::int64_t e = 0; e < 64; ++e) rows.set((data.sequences[1].row_k + key) * 64 + e, 0);
          }
        }
        run(call_of(data), kernel);
        expect_paged(data, paged, gpu::page_outside_pool);
        if (testing::Test::HasFailure()) return;
      }
  }

  // Pages far apart; each below the one before it, too, unless the kernel refuses that.
  void expect_far_pages_read(bool downwards) const {
    const CaseData expected = judged(chunks(64));
    for (const std::int64_t distance : {far_apart, -far_apart}) {
      if (distance < 0 && !downwards) continue;
      PagedCase paged(expected, {.page_size = page_size, .table = Table::apart});
      const FarPages far(paged, distance);
      expect_paged(expected, paged, 0);
    }
  }

  // A length beyond what the table holds, or a negative one, is cut and told; the other sequences keep their bits.
  void expect_lengths_beyond_the_table_cut() const {
    const Case spec = chunks(64);
    const CaseData expected = judged(spec);
    for (const auto& [b, length] : {std::pair<std::size_t, std::int32_t>{3, 1 << 30}, {3, -7}, {1, 1 << 30}}) {
      PagedCase paged(expected, {.page_size = page_size});
      paged.lengths[b] = length;
      CaseData data = build(spec);
      std::int32_t status = 0;
      Call call = call_of(data);
      call.inputs = paged.in, call.outputs.status = Tensor(&status, Type::i32, {1});
      run(call, kernel);
      EXPECT_TRUE(status & gpu::beyond_bounds);
      for (std::size_t other = 0; other < 4; ++other) {
        if (other == b) continue;
        EXPECT_EQ(bits_of_sequence(data, other, false), bits_of_sequence(expected, other, false)) << other;
      }
      EXPECT_TRUE(data.o.margins_intact() && data.lse.margins_intact());
    }
  }

  // A sequence of a packed case, alone: its own call, whose kernel its own number of rows chooses.
  CaseData alone(const CaseData& batch, std::size_t b, std::int64_t pages_of) const {
    const Sequence& s = batch.sequences[b];
    Case spec = batch.spec;
    const bool few = has_few_rows(spec, s.Nq);
    spec.packed_q = {static_cast<std::int32_t>(s.Nq)}, spec.packed_k = {static_cast<std::int32_t>(s.Nk)};
    spec.options.max_seqlen_q = few ? s.Nq : batch.spec.options.max_seqlen_q;
    CaseData data = build(spec);
    const auto copy = [](const Buffer& from, Buffer& to, std::int64_t row, std::int64_t count, std::int64_t width) {
      for (std::int64_t e = 0; e < count * width; ++e) to.set(e, from.get(row * width + e));
    };
    copy(batch.q, data.q, s.row_q, s.Nq, spec.Hq * spec.D);
    copy(batch.k, data.k, s.row_k, s.Nk, spec.Hk * spec.D);
    copy(batch.v, data.v, s.row_k, s.Nk, spec.Hk * spec.dim_v());
    const PagedCase paged(data, {.page_size = pages_of, .seed = b + 1});
    Call call = call_of(data);
    call.inputs = paged.in;
    run(call, few ? "decode_queue" : kernel);
    return data;
  }

  // One call is right, and each of its sequences has the bits that it has alone, in other pages: few rows those of
  // `decode`, many those of the family's kernel.
  void expect_sequences_as_alone(const Case& spec, const std::string& mixed, std::int64_t other_page_size) const {
    CaseData data = build(spec);
    const Expectation expected = expect(data);
    const PagedCase paged(data, {.page_size = page_size, .leftpad = {0, 5, 16, 0, 1, 3}});
    std::int32_t status = 0;
    Call call = call_of(data);
    call.inputs = paged.in, call.outputs.status = Tensor(&status, Type::i32, {1});
    run(call, mixed);
    EXPECT_EQ(status, 0);
    judge(data, expected);
    for (std::size_t b = 0; b < data.sequences.size(); ++b) {
      if (data.sequences[b].Nq == 0) continue;
      const CaseData lone = alone(data, b, other_page_size);
      EXPECT_EQ(bits_of_sequence(data, b, false), bits_of_sequence(lone, 0, false)) << "sequence " << b;
    }
  }
};

}  // namespace tessera::test
