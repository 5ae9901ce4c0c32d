// SPDX-License-Identifier: Apache-2.0
// The `mma` backward kernels' own text, run on the host (tests/emulated), with the launches before them (delta, clear),
// on tiles of every class, against float64. Links tessera_cases; its include path puts tests/emulated before src.
#include <map>

#include "tests/emulated/backward.hpp"
#include "tests/emulated/steps.hpp"
#include "tests/mma/mma_cases.hpp"
#include "tests/support/senseless.hpp"

namespace tessera::mma {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];
}

#include "mma_backward_units.hpp"  // written while this is built

namespace tessera::mma {
namespace {

void run_backward(cases::CaseData& data, const char* architecture) {
  Call call = emulated::backward_call(data);
  // Tensors without elements have no memory: whoever reads them ends the test.
  if (data.spec.Hq == 0) call.inputs.q.data = call.saved.d_o.data = nullptr;
  const Problem problem = check_backward(call.inputs, call.saved, call.gradients, call.options, {});
  const gpu::Steps steps = steps_of(problem, architecture);
  ASSERT_EQ(steps.reason, "");
  emulated::run_steps(steps, problem, call, mma_backward_units, memory);
}

class MmaBackward : public testing::TestWithParam<const char*> {};

TEST_P(MmaBackward, AgreesWithTheReference) {
  int ran = 0;
  for (const MmaBackwardCase& c : mma_backward_cases()) {
    if (c.c.spec.name != GetParam()) continue;
    SCOPED_TRACE(c.architecture);
    emulated::check(c.c, [&](cases::CaseData& data) {
      forward(data.inputs(), data.outputs(), data.options(), {});
      run_backward(data, c.architecture);
    });
    if (HasFailure()) return;
    ++ran;
  }
  EXPECT_GT(ran, 0) << "there is no such group";
}

INSTANTIATE_TEST_SUITE_P(Groups, MmaBackward,
                         testing::Values("Full", "OneToManyTiles", "HeadDimsBetweenTiles", "GroupsOfHeads",
                                         "NoQueryHeads", "Causal", "QueriesThatSeeNothing", "Windows",
                                         "PackedSequences", "Fronts", "UsedLengths", "Layouts", "Unaligned",
                                         "SinksAndLseGradient", "WideGradients", "Accumulation", "SomeGradients",
                                         "ExtremeNumbers", "ScaleNotPositive", "Softcap", "Alibi", "Bias", "Mask",
                                         "Dropout", "Everything"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace tessera::mma
