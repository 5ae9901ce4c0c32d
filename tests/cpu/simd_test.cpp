// SPDX-License-Identifier: Apache-2.0
// One small case per feature and per way through the tiles, each a test of its own, on every kernel of this machine: a
// fault in the kernels shows here in seconds, under the name of what it broke. (cases_test runs the whole tables.)
// Links tessera_cases. Implements docs/algorithm.md against src/cpu/kernel; `make mutants` relies on the names.
#include <cmath>

#include "cases/tiles.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t several_groups = 4 * tile_k + 5;  // keys enough for two groups in the backward pass

std::vector<Case> feature_rows() {
  std::vector<Case> rows;
  for (const char* name : {"causal",
                           "causal_top_left",
                           "window",
                           "positions",
                           "mask_per_head",
                           "seqused_causal",
                           "packed_seqused",
                           "scale",
                           "softcap",
                           "alibi",
                           "alibi_per_batch",
                           "bias",
                           "bias_of_batch",
                           "bias_of_queries",
                           "bias_of_keys",
                           "bias_scalar",
                           "bias_infinite",
                           "dropout",
                           "dropout_positions",
                           "dropout_rng",
                           "sinks",
                           "dlse",
                           "dlse_sinks",
                           "accumulate",
                           "accumulate_packed",
                           "only_dk",
                           "value_narrower",
                           "multi_query",
                           "everything"})
    rows.push_back(find_case(std::string(name) + "_f32"));
  for (const char* name : {"cold_causal_f32", "huge_f32", "outlier_f32", "layout_mixed_f32"})
    rows.push_back(find_case(name));
  return rows;
}

std::vector<Case> long_rows() {
  const Case base{.name = "long", .Nq = tile_q + 2, .Nk = several_groups, .Hq = 2, .Hk = 1, .D = 24};
  std::vector<Case> rows(13, base);
  rows[1].name = "long_causal", rows[1].options.causal = true;
  rows[2].name = "long_window", rows[2].options.window_left = 30, rows[2].options.window_right = 7;
  rows[3].name = "long_packed", rows[3].packed_q = {tile_q + 1, 3}, rows[3].packed_k = {9, several_groups};
  rows[3].tail_q = 4, rows[3].tail_k = 5;
  // A bias with more rows than a sequence has queries: lanes without a query, in scratch memory that holds NaN.
  rows[4].name = "bias_beyond_the_lengths", rows[4].packed_q = {3, 9}, rows[4].packed_k = {20, 30};
  rows[4].bias = true, rows[4].grads = {.dq = false, .dk = false, .dv = false};
  rows[5].name = "strides_of_single_elements", rows[5].style = Style::gaps, rows[5].Nk = 20;
  rows[5].bias = true, rows[5].bias_dims = {.b = false, .h = false, .i = false, .j = false};
  // Few queries: keys in chunks, one of them all of a head group's.
  rows[6].name = "few_queries", rows[6].Nq = 3, rows[6].Hq = 6, rows[6].Hk = 2, rows[6].D = 32;
  rows[7] = rows[6], rows[7].name = "few_queries_window", rows[7].Nq = 2, rows[7].Hq = 9, rows[7].Hk = 1;
  rows[7].options.window_left = 500, rows[7].options.softcap = 3, rows[7].slopes = Slopes::per_head,
  rows[7].sinks = Sinks::finite;
  rows[8] = rows[6], rows[8].name = "few_queries_packed", rows[8].packed_q = {1, 8, 0, tile_q + 1};
  rows[8].packed_k = {several_groups, 9, 5, 30}, rows[8].options.causal = true, rows[8].D = 40;
  // 16-bit rows of whole pairs of vectors, and of a vector more.
  rows[9] = rows[6], rows[9].name = "few_queries_bf16_pairs", rows[9].type = Type::bf16, rows[9].D = 96;
  rows[10] = rows[9], rows[10].name = "few_queries_bf16_vector", rows[10].D = 64, rows[10].Dv = 48;
  rows[11] = rows[10], rows[11].name = "few_queries_f16_vector", rows[11].type = Type::f16, rows[11].D = 48;
  // Blocks of two and four vectors, of queries and of dims.
  rows[12].name = "long_bf16", rows[12].type = Type::bf16, rows[12].D = 96, rows[12].options.causal = true;
  return rows;
}

class Kernels : public testing::TestWithParam<Case> {};

TEST_P(Kernels, AgreeWithFloat64) {
  std::vector<Execution> executions;
  const std::vector<std::string> kernels = available_kernels();
  for (const std::string& kernel : kernels) executions.push_back({.kernel = kernel.c_str()});
  for (const CaseReport& report : run_case(GetParam(), executions)) expect_ok(report);
}

std::string name_of_row(const testing::TestParamInfo<Case>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Feature, Kernels, testing::ValuesIn(feature_rows()), name_of_row);
INSTANTIATE_TEST_SUITE_P(Tiles, Kernels, testing::ValuesIn(long_rows()), name_of_row);

// Scores that rise with the keys: O is rescaled from tile to tile, and m may lag behind the maximum for a while.
TEST(Maxima, RiseFromTileToTile) {
  const Case spec{.name = "rising", .Nq = tile_q + 3, .Nk = 4 * tile_k, .Hq = 1, .Hk = 1, .D = 20, .bias = true};
  for (const std::string& kernel : available_kernels())
    for (const double slope : {0.1, 0.02}) {
      CaseData data = build(spec);
      for (std::int64_t e = 0; e < data.bias.elements(); ++e)
        data.bias.set(e, slope * static_cast<double>(e % spec.Nk));
      expect_accurate(data, {.kernel = kernel.c_str()});
    }
}

// A row that sees no key takes no part in any gradient, whatever its q and dO hold: 0 * NaN must not come about.
TEST(BlindRows, MayHoldNan) {
  constexpr std::int64_t blind = tile_q + 6;  // a whole tile, and part of the next
  const Case spec{.name = "blind",
                  .Nq = 2 * tile_q,
                  .Nk = tile_k + 9,
                  .Hq = 1,
                  .Hk = 1,
                  .D = 20,
                  .options = {.causal = true, .alignment = Alignment::offset, .diagonal_offset = -blind}};
  for (const std::string& kernel : available_kernels()) {
    CaseData clean = build(spec), dirty = build(spec);
    for (std::int64_t e = 0; e < blind * spec.D; ++e)
      for (Buffer* rows : {&dirty.q, &dirty.d_o}) rows->set(e, std::nan(""));
    for (CaseData* data : {&clean, &dirty}) run(*data, {.kernel = kernel.c_str()});
    expect_same_bits(clean.o, dirty.o, kernel + " o");
    expect_same_bits(clean.dq, dirty.dq, kernel + " dq");
    expect_same_bits(clean.dk, dirty.dk, kernel + " dk");
    expect_same_bits(clean.dv, dirty.dv, kernel + " dv");
  }
}

}  // namespace
}  // namespace tessera::test
