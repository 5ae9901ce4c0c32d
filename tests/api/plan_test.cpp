// SPDX-License-Identifier: Apache-2.0
// What a plan promises: workspace that grows with N*D and never with N*N, a description that says what was chosen and
// why the others were not, and a clear sentence where nothing can be chosen.
// Links tessera_cases. Implements the contract's "Memory" and "No surprises".
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

// Planning reads no data, so these tensors have none.
struct Shapes {
  std::int64_t B = 1, Nq = 1024, Nk = 1024, Hq = 2, Hk = 2, D = 64;
  Type type = Type::f32;
  Device device{};

  Tensor rows(std::int64_t n, std::int64_t heads) const { return {nullptr, type, {B, n, heads, D}, device}; }
  Tensor lse() const { return {nullptr, Type::f32, {B, Hq, Nq}, device}; }
  Inputs inputs() const {
    Inputs in;
    in.q = rows(Nq, Hq), in.k = in.v = rows(Nk, Hk);
    return in;
  }
  Plan forward(const Execution& e = {}, const Options& o = {}) const {
    return Plan::forward(inputs(), {.o = rows(Nq, Hq), .lse = lse()}, o, e);
  }
  Plan backward(const Execution& e = {}, bool dq = true) const {
    const Tensor q = rows(Nq, Hq), k = rows(Nk, Hk);
    return Plan::backward(inputs(), {.o = q, .lse = lse(), .d_o = q, .d_lse = {}},
                          {.dq = dq ? q : Tensor{}, .dk = k, .dv = k, .dbias = {}, .dsinks = {}}, {}, e);
  }
};

double bytes(const Plan& plan) { return static_cast<double>(plan.workspace_size()); }

Shapes of_length(std::int64_t n, std::int64_t D = 64) {
  Shapes s;
  s.Nq = s.Nk = n, s.D = D;
  return s;
}

TEST(Workspace, ForwardDoesNotDependOnTheLengths) {
  for (const std::string& kernel : available_kernels()) {
    if (kernel == "amx") continue;  // packs K and V: tests/cpu/amx_test.cpp
    const Execution e{.threads = 2, .kernel = kernel.c_str()};
    EXPECT_EQ(bytes(of_length(1 << 20).forward(e)), bytes(of_length(1 << 10).forward(e))) << kernel;
  }
}

TEST(Workspace, BackwardGrowsWithTheLengthAndNotWithItsSquare) {
  for (const std::string& kernel : available_kernels())
    for (std::int64_t D : {1, 64, 576}) {
      if (kernel == "amx" || kernel == "avx512bf16") D = 64;  // their images have whole tiles of rows
      if (D > 512) D = 512;                                   // Dv is D here
      const Execution e{.threads = 2, .kernel = kernel.c_str()};
      for (std::int64_t n = 1 << 12; n <= 1 << 20; n *= 2)
        EXPECT_LE(bytes(of_length(2 * n, D).backward(e)), 2 * bytes(of_length(n, D).backward(e))) << kernel << " " << n;
      // Beyond a fixed part: a few images of dQ and two numbers per row, in f32.
      const double rows = 2 * (1 << 16), fixed = bytes(of_length(1, D).backward(e));
      EXPECT_LE(bytes(of_length(1 << 16, D).backward(e)), fixed + rows * static_cast<double>(4 * D + 2) * 4) << kernel;
    }
}

TEST(Workspace, KeysAloneAddNothingInTheLongRun) {
  Shapes few = of_length(1 << 13), many = few;
  many.Nk = 1 << 24;
  EXPECT_EQ(bytes(many.backward()), bytes(few.backward()));
}

TEST(Workspace, WhatIsNotAskedForTakesNoMemory) {
  const Shapes s = of_length(4096);
  EXPECT_LT(bytes(s.backward({}, false)), bytes(s.backward({}, true)) / 4);
}

TEST(Workspace, PackedBoundsHold) {
  Inputs in;
  in.q = in.k = in.v = Tensor(nullptr, Type::f32, {4096, 2, 64});
  in.cu_seqlens_q = in.cu_seqlens_k = Tensor(nullptr, Type::i32, {101});
  const Tensor lse(nullptr, Type::f32, {2, 4096});
  const auto packed = [&](const Options& options) {
    return bytes(Plan::backward(in, {.o = in.q, .lse = lse, .d_o = in.q, .d_lse = {}},
                                {.dq = in.q, .dk = in.k, .dv = in.v, .dbias = {}, .dsinks = {}}, options));
  };
  EXPECT_LE(packed({.max_seqlen_q = 64, .max_seqlen_k = 64}), packed({}));
}

// Does a text hold these words? How columns are padded does not matter.
bool holds(const std::string& text, const std::string& part) {
  std::string words;
  for (char c : text)
    if (c != ' ' || words.empty() || words.back() != ' ') words += c;
  return words.find(part) != std::string::npos;
}

TEST(Describe, NamesProblemKernelTilesAndWorkspace) {
  for (const std::string& kernel : available_kernels()) {
    const Plan plan = Shapes{}.backward({.threads = 2, .kernel = kernel.c_str()});
    const std::string text = plan.describe();
    EXPECT_EQ(plan.kernel(), kernel);
    EXPECT_TRUE(holds(text, "kernel " + kernel + "\n")) << text;
    EXPECT_TRUE(holds(text, "problem backward, cpu, f32, B=1 Nq=1024 Nk=1024 Hq=2 Hk=2 D=64 Dv=64")) << text;
    EXPECT_TRUE(holds(text, "workspace " + std::to_string(plan.workspace_size()) + " bytes")) << text;
    EXPECT_TRUE(holds(text, "2 threads")) << text;
    if (kernel != "reference") {
      EXPECT_TRUE(holds(text, "tiles of 64 queries x 192 keys")) << text;
    }
  }
}

TEST(Describe, SaysWhyOthersWereNotTaken) {
  Shapes s;
  const std::vector<std::string> kernels = available_kernels();
  if (kernels.size() > 1) {
    EXPECT_TRUE(holds(s.forward().describe(), "not reference could run it, but is slower")) << s.forward().describe();
    const std::string forced = s.forward({.kernel = "reference"}).describe();
    EXPECT_TRUE(holds(forced, "could run it, but another was asked for")) << forced;
  }
  s.type = Type::f64;
  const Plan plan = s.forward();
  EXPECT_EQ(plan.kernel(), "reference");
  for (const std::string& kernel : cpu_kernels()) {
    EXPECT_TRUE(holds(plan.describe(), "not " + kernel)) << plan.describe();
    EXPECT_TRUE(holds(plan.describe(), "refused: type is f64; this kernel takes f32, f16 and bf16")) << plan.describe();
  }
}

TEST(Describe, TellsOptions) {
  const Options options{.softcap = 3, .causal = true, .window_left = 5, .dropout = 0.25};
  const std::string text = Shapes{}.forward({}, options).describe();
  for (const char* part : {"causal", "window (5,-1)", "bottom right", "softcap 3", "dropout 0.25", "scale 0.125"})
    EXPECT_TRUE(holds(text, part)) << part << " in " << text;
}

// Asked of a kernel by name, so that the answer is the same with and without a GPU.
TEST(Refusal, NoKernelForTheDevice) {
  Shapes s;
  s.device = {DeviceType::cuda, 1};
  try {
    s.forward({.kernel = "reference"});
    FAIL() << "a plan for a device that this kernel does not run on";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TESSERA_UNSUPPORTED);
    EXPECT_STREQ(error.what(), "no kernel can run this: reference: device is cuda:1; this kernel runs on cpu");
  }
}

}  // namespace
}  // namespace tessera::test
