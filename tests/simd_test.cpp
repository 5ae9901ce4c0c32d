// One small case per feature and per way through the tiles, each a test of its own, on every kernel of this machine: a
// fault in the kernels shows here in seconds, under the name of what it broke. (cases_test runs the whole tables.)
// Links tessera_cases. Implements docs/algorithm.md against src/cpu/kernel; `make mutants` relies on the names.
#include "cases/tiles.hpp"
#include "tests/support.hpp"

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
  std::vector<Case> rows(4, base);
  rows[1].name = "long_causal", rows[1].options.causal = true;
  rows[2].name = "long_window", rows[2].options.window_left = 30, rows[2].options.window_right = 7;
  rows[3].name = "long_packed", rows[3].packed_q = {tile_q + 1, 3}, rows[3].packed_k = {9, several_groups};
  rows[3].tail_q = 4, rows[3].tail_k = 5;
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

}  // namespace
}  // namespace tessera::test
