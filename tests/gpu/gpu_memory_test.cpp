// SPDX-License-Identifier: Apache-2.0
// Where things lie must not matter on the GPU: results have the same bits for tensors that are aligned and for tensors
// one element further, inputs and outputs apart; and lengths that make no sense neither hang a kernel nor touch other
// sequences. Links tessera_cases. Implements docs/numerics.md, "Deterministic, batch-invariant".
#include <tuple>

#include "tests/gpu/support.hpp"
#include "tests/support/senseless.hpp"

namespace tessera::test {
namespace {

std::vector<std::string> every_kernel() {
  std::vector<std::string> names = all_rungs();
  names.push_back(hopper_kernel);
  names.push_back(mma_kernel);
  return names;
}

// These take 16-bit types only, with every option.
bool is_16_bit(const std::string& kernel) { return kernel == hopper_kernel || kernel == mma_kernel; }
// The sums of `tiled` are atomic: their order is free.
bool has_exact_backward(const std::string& kernel) { return kernel != "tiled"; }

bool is_hopper() { return what_is_missing().empty() && cuda::properties(gpu.id).major == 9; }

class GpuKernels : public GpuWith<std::tuple<std::string, Type>> {
 protected:
  void SetUp() override {
    GpuWith::SetUp();
    const auto& [kernel, type] = GetParam();
    if (IsSkipped()) return;
    if (kernel == hopper_kernel && !is_hopper()) GTEST_SKIP() << "no GPU to test: it is not a Hopper";
    if (kernel == mma_kernel && type == Type::bf16 && cuda::properties(gpu.id).major < 8)
      GTEST_SKIP() << "no GPU to test: it has no bf16";
  }
};

// --- alignment -------------------------------------------------------------------------------------------------------

using Members = std::vector<Buffer CaseData::*>;

// The same numbers one element further.
void shift(CaseData& data, const Members& members) {
  for (Buffer CaseData::*member : members) {
    Buffer& buffer = data.*member;
    if (!buffer) continue;
    const Tensor& t = buffer.tensor();
    Buffer moved(t.type, Shape(t.shape.begin(), t.shape.begin() + t.ndim), Layout{.shift = 1});
    for (std::int64_t e = 0; e < buffer.elements(); ++e)
      if (!buffer.untouched(e)) moved.set(e, buffer.get(e));
    buffer = std::move(moved);
  }
}

// Head dims and options that give a kernel other tiles, other loads and other sums; D=84 takes no 16-byte loads of
// 16-bit types.
std::vector<Case> alignment_cases() {
  std::vector<Case> all;
  for (const std::int64_t D : {64, 84, 128, 160}) {
    const Case plain{.name = "plain", .B = 2, .Nq = 150, .Nk = 256, .Hq = 4, .Hk = 2, .D = D};
    const auto add = [&](const char* name, auto change) {
      Case c = plain;
      c.name = name;
      change(c);
      all.push_back(c);
    };
    add("plain", [](Case&) {});
    add("causal", [](Case& c) { c.options.causal = true; });
    add("bias", [](Case& c) { c.bias = true; });
    add("softcap_alibi", [](Case& c) { c.options.softcap = 5, c.slopes = Slopes::per_head; });
    add("everything", [](Case& c) {
      c.bias = c.mask = c.dlse = true, c.slopes = Slopes::per_head, c.sinks = Sinks::finite;
      c.options = {.softcap = 5, .causal = true, .dropout = 0.25, .seed = 3};
    });
    add("accumulate", [](Case& c) { c.options.accumulate = c.f32_grads = true; });
    add("packed", [](Case& c) { c.packed_q = {70, 129}, c.packed_k = {140, 66}, c.front_q = 5, c.front_k = 70; });
  }
  return all;
}

class GpuAlignment : public GpuKernels {};

TEST_P(GpuAlignment, DoesNotChangeBits) {
  const auto& [kernel, type] = GetParam();
  const Members inputs{&CaseData::q, &CaseData::k, &CaseData::v, &CaseData::d_o};
  const Members outputs{&CaseData::dq, &CaseData::dk, &CaseData::dv}, o{&CaseData::o};
  int compared = 0;
  for (Case spec : alignment_cases()) {
    spec.type = type;
    if (kernel == hopper_kernel && spec.D % 8 != 0) continue;  // has no aligned rows
    if (!is_general(kernel) && !is_16_bit(kernel) && !is_plain(spec)) continue;
    SCOPED_TRACE(kernel + " " + describe(spec));
    const auto run = [&](const Members& shifted, bool backward) {
      Case c = spec;
      c.backward = backward && has_exact_backward(kernel);
      CaseData data = build(c);
      shift(data, shifted);
      OnGpu on(data, kernel);
      on.run();
      on.finish();
      return data;
    };
    const auto compare = [&](const CaseData& a, const CaseData& b, const char* what) {
      SCOPED_TRACE(what);
      expect_same_bits(a.o, b.o, "o"), expect_same_bits(a.lse, b.lse, "lse");
      for (const auto& [name, member] : {std::pair{"dq", &CaseData::dq},
                                         {"dk", &CaseData::dk},
                                         {"dv", &CaseData::dv},
                                         {"dbias", &CaseData::dbias},
                                         {"dsinks", &CaseData::dsinks}})
        if (a.*member && b.*member) expect_same_bits(a.*member, b.*member, name);
      ++compared;
    };
    const CaseData expected = run({}, true);
    compare(expected, run(outputs, true), "gradients shifted");
    compare(expected, run(o, false), "o shifted");
    // Tensor copies, which hopper is made of, take aligned inputs only; it refuses others, and another kernel serves.
    if (kernel == hopper_kernel) continue;
    compare(expected, run(inputs, true), "inputs shifted");
    for (Buffer CaseData::*one : inputs) compare(expected, run({one}, true), "one input shifted");
    compare(expected, run(o, true), "o, saved, shifted");
    if (HasFailure()) return;
  }
  EXPECT_GE(compared, kernel == hopper_kernel ? 2 * 3 * 7 : 8 * 8);
}

// --- lengths that make no sense
// ----------------------------------------------------------------------------------------

class GpuSenselessLengths : public GpuKernels {};

TEST_P(GpuSenselessLengths, NeitherHangNorTouchOtherSequences) {
  const auto& [kernel, type] = GetParam();
  const std::string name = kernel;
  for (const bool backward : {false, true}) {
    if (backward && !has_exact_backward(kernel)) continue;
    for (const bool causal : {false, true})
      for (const std::int64_t D : {64, 128, 192}) {
        SCOPED_TRACE(kernel + (backward ? " backward D=" : " forward D=") + std::to_string(D));
        Case spec = senseless_base(D, type, causal);
        spec.backward = backward;
        check_senseless_lengths(spec, backward, [&](CaseData& data) {
          OnGpu on(data, name);
          if (backward)
            on.backward();
          else
            on.forward();
          on.download();
        });
        if (HasFailure()) return;
      }
  }
}

std::vector<std::tuple<std::string, Type>> kernels_and_types() {
  std::vector<std::tuple<std::string, Type>> all;
  for (const std::string& kernel : every_kernel())
    for (const Type type : {Type::f32, Type::f16, Type::bf16})
      if (!is_16_bit(kernel) || type != Type::f32) all.emplace_back(kernel, type);
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, GpuAlignment, testing::ValuesIn(kernels_and_types()));
INSTANTIATE_TEST_SUITE_P(All, GpuSenselessLengths, testing::ValuesIn(kernels_and_types()));

}  // namespace
}  // namespace tessera::test
