// SPDX-License-Identifier: Apache-2.0
// The C++ API as users meet it: the exception, views, plans that are made without data, moved, shared between threads,
// run in another workspace or in a forked child.
// Links tessera_cases. Implements include/tessera/tessera.hpp and the contract's "Promises".
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <thread>
#include <type_traits>

#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

Case small() {
  return {.name = "small", .B = 2, .Nq = 70, .Nk = 410, .Hq = 4, .Hk = 2, .D = 24, .options = {.causal = true}};
}

std::string sentence_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TESSERA_INVALID_ARGUMENT);
    return error.what();
  }
  return "no error";
}

// --- the types ------------------------------------------------------------------------------------------------------

TEST(Api, ErrorCarriesStatusAndSentence) {
  static_assert(std::is_base_of_v<std::runtime_error, Error>);
  const Error error(TESSERA_UNSUPPORTED, "no");
  EXPECT_EQ(error.status(), TESSERA_UNSUPPORTED);
  EXPECT_STREQ(error.what(), "no");
  EXPECT_THROW(forward({}, {}), Error);
}

TEST(Api, TensorsAreViews) {
  float memory[120];
  const Tensor t(memory, Type::f32, {2, 3, 4, 5});
  EXPECT_EQ(t.ndim, 4);
  EXPECT_EQ(t.strides, (std::array<std::int64_t, 4>{60, 20, 5, 1}));
  EXPECT_EQ(t.elements(), 120);
  EXPECT_TRUE(t);
  const Tensor turned = t.transposed(1, 2);
  EXPECT_EQ(turned.shape, (std::array<std::int64_t, 4>{2, 4, 3, 5}));
  EXPECT_EQ(turned.strides, (std::array<std::int64_t, 4>{60, 5, 20, 1}));
  EXPECT_EQ(turned.data, t.data);
  EXPECT_FALSE(Tensor{});
  EXPECT_EQ(Tensor{}.elements(), 0);
  EXPECT_EQ(Tensor(nullptr, Type::u8, {0, 7}).elements(), 0);
  EXPECT_EQ(Tensor(memory, Type::f32, {1, 2, 3, 4, 5}).ndim, 5) << "too many, and the library says so";
}

TEST(Api, DefaultsAreThoseOfTheCAbi) {
  tessera_options c;
  tessera_options_init(&c);
  const tessera_options from_cpp = detail::to_c(Options{});
  EXPECT_EQ(std::memcmp(&c, &from_cpp, sizeof(c)), 0);
  tessera_execution e;
  tessera_execution_init(&e);
  const tessera_execution e_from_cpp = detail::to_c(Execution{});
  EXPECT_EQ(std::memcmp(&e, &e_from_cpp, sizeof(e)), 0);
  EXPECT_EQ(TESSERA_DEFAULT_SCALE, default_scale);
  EXPECT_EQ(version(), tessera_version());
  EXPECT_NE(info().find("kernels"), std::string::npos);
}

TEST(Api, PlansMoveAndDoNotCopy) {
  static_assert(!std::is_copy_constructible_v<Plan> && !std::is_copy_assignable_v<Plan>);
  static_assert(std::is_nothrow_move_constructible_v<Plan> && std::is_nothrow_move_assignable_v<Plan>);
  CaseData data = build(small());
  Plan a = Plan::forward(data.inputs(), data.outputs(), data.options(), {.kernel = "reference"});
  Plan b = std::move(a);
  EXPECT_EQ(b.kernel(), "reference");
  EXPECT_EQ(a.kernel(), "") << "what was moved from answers with nothing";
  EXPECT_EQ(sentence_of([&] { a.run(data.inputs(), data.outputs(), data.options()); }),
            "plan: is NULL; it is required");
  Plan c = Plan::forward(data.inputs(), data.outputs(), data.options());
  const std::string kernel = c.kernel();
  b = std::move(c);
  EXPECT_EQ(b.kernel(), kernel);
  b.run(data.inputs(), data.outputs(), data.options());
  EXPECT_FALSE(data.o.untouched(0));
}

// --- plans ----------------------------------------------------------------------------------------------------------

Inputs without_data(Inputs in) {
  for (Tensor* t : {&in.q, &in.k, &in.v, &in.bias, &in.mask, &in.slopes, &in.sinks, &in.cu_seqlens_q, &in.cu_seqlens_k,
                    &in.seqused_q, &in.seqused_k, &in.rng})
    t->data = nullptr;
  return in;
}
Tensor without_data(Tensor t) {
  t.data = nullptr;
  return t;
}

// Forward and backward plans for a case, made from shapes alone.
struct Plans {
  Plan forward, backward;
  Plans(const CaseData& d, const Execution& e) :
      forward(Plan::forward(without_data(d.inputs()), {.o = without_data(d.o.tensor()), .lse = d.lse.tensor()},
                            d.options(), e)),
      backward(Plan::backward(without_data(d.inputs()), d.saved(),
                              {.dq = without_data(d.dq.tensor()),
                               .dk = without_data(d.dk.tensor()),
                               .dv = without_data(d.dv.tensor()),
                               .dbias = {},
                               .dsinks = {}},
                              d.options(), e)) {}

  void run(const CaseData& d, const Execution& e = {}) const {
    forward.run(d.inputs(), d.outputs(), d.options(), e);
    backward.run(d.inputs(), d.saved(), d.gradients(), d.options(), e);
  }
};

void expect_same_results(const CaseData& a, const CaseData& b, const std::string& what) {
  expect_same_bits(a.o, b.o, what + " o");
  expect_same_bits(a.lse, b.lse, what + " lse");
  expect_same_bits(a.dq, b.dq, what + " dq");
  expect_same_bits(a.dk, b.dk, what + " dk");
  expect_same_bits(a.dv, b.dv, what + " dv");
}

TEST(Plans, MadeWithoutDataRunWithIt) {
  for (const std::string& kernel : available_kernels()) {
    const Execution e{.kernel = kernel.c_str()};
    CaseData direct = build(small()), planned = build(small());
    run(direct, e);
    const Plans plans(planned, e);
    EXPECT_EQ(plans.forward.kernel(), kernel);
    plans.run(planned);
    expect_same_results(direct, planned, kernel);
  }
}

// Exactly the bytes that the plan names, at any address, full of NaN: same bits, and nothing beside them is touched.
TEST(Plans, RunInTheirExactWorkspace) {
  for (const std::string& kernel : available_kernels())
    for (std::size_t shift : {0, 1, 60}) {
      const Execution e{.threads = 3, .kernel = kernel.c_str()};
      CaseData direct = build(small()), planned = build(small());
      run(direct, e);
      const Plans plans(planned, e);
      const std::size_t bytes = std::max(plans.forward.workspace_size(), plans.backward.workspace_size());
      std::vector<unsigned char> memory(bytes + 256, 0xff);
      const auto run_in = [&](const Plan& plan, auto... arguments) {
        Execution here;
        here.workspace = memory.data() + 64 + shift, here.workspace_bytes = plan.workspace_size();
        std::fill(memory.begin(), memory.end(), 0xff);
        plan.run(arguments..., planned.options(), here);
        for (std::size_t n = 0; n < 64 + shift; ++n) ASSERT_EQ(memory[n], 0xff);
        for (std::size_t n = 64 + shift + plan.workspace_size(); n < memory.size(); ++n) ASSERT_EQ(memory[n], 0xff);
      };
      run_in(plans.forward, planned.inputs(), planned.outputs());
      run_in(plans.backward, planned.inputs(), planned.saved(), planned.gradients());
      expect_same_results(direct, planned, kernel);
      if (plans.backward.workspace_size() == 0) continue;
      Execution little;
      little.workspace = memory.data(), little.workspace_bytes = plans.backward.workspace_size() - 1;
      EXPECT_EQ(sentence_of([&] { plans.run(planned, little); }).rfind("workspace_bytes: is ", 0), 0u);
    }
}

TEST(Plans, RefuseWeakerAlignmentAndOtherProblems) {
  CaseData data = build(small());
  const Plans plans(data, {});
  Case shifted = small();
  shifted.style = Style::shifted;
  CaseData weak = build(shifted);
  EXPECT_EQ(sentence_of([&] { plans.run(weak); }),
            "plan: was made for pointers and strides aligned to 16 bytes but these are aligned to 4; plan with the "
            "tensors that are run");
  const auto refused = [&](auto change) {
    Options options = data.options();
    change(options);
    return sentence_of([&] { plans.forward.run(data.inputs(), data.outputs(), options); });
  };
  for (const std::string& sentence :
       {refused([](Options& o) { o.causal = false; }), refused([](Options& o) { o.scale = 2; }),
        refused([](Options& o) { o.window_left = 3; }), refused([](Options& o) { o.dropout = 0.5; })})
    EXPECT_EQ(sentence.rfind("plan: was made for forward, cpu, f32, B=2 Nq=70", 0), 0u) << sentence;
  EXPECT_EQ(sentence_of([&] {
              plans.backward.run(data.inputs(), data.outputs(), data.options());
            }).rfind("plan: was made for backward", 0),
            0u);
  EXPECT_TRUE(data.o.untouched(0));
}

TEST(Plans, StrongerAlignmentAndOtherSeedsAreFine) {
  Case spec = small();
  spec.options.dropout = 0.4;
  CaseData aligned = build(spec);
  spec.style = Style::shifted;
  const CaseData weak = build(spec);
  const Plans plans(weak, {});
  plans.run(aligned);
  CaseData other = build(small());
  Options seeded = aligned.options();
  seeded.seed = 5;
  plans.forward.run(aligned.inputs(), other.outputs(), seeded);
  EXPECT_NE(other.o.bits(), aligned.o.bits());
  forward(aligned.inputs(), aligned.outputs(), seeded);
  expect_same_bits(other.o, aligned.o, "o with another seed");
}

TEST(Plans, KernelIsForcedByName) {
  CaseData data = build(small());
  for (const std::string& kernel : available_kernels())
    EXPECT_EQ(Plan::forward(data.inputs(), data.outputs(), {}, {.kernel = kernel.c_str()}).kernel(), kernel);
  // The best comes last; those for bf16 take f32 only by name.
  std::vector<std::string> for_f32 = available_kernels();
  std::erase(for_f32, "avx512bf16"), std::erase(for_f32, "amx");
  EXPECT_EQ(Plan::forward(data.inputs(), data.outputs()).kernel(), for_f32.back());
  Case halves = small();
  halves.type = Type::bf16;
  CaseData other = build(halves);
  const std::string best = available_kernels().back(), chosen = Plan::forward(other.inputs(), other.outputs()).kernel();
  const bool may_be_slow = best == "avx512bf16";  // on Intel's processors
  EXPECT_TRUE(chosen == best || (may_be_slow && chosen == "avx512")) << chosen << ", not " << best;
}

// --- threads and processes ------------------------------------------------------------------------------------------

TEST(Threads, ShareAPlan) {
  CaseData expected = build(small());
  const Plans plans(expected, {.threads = 2});
  plans.run(expected);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller)
    callers.emplace_back([&] {
      for (int round = 0; round < 5; ++round) {
        CaseData mine = build(small());
        plans.run(mine);
        expect_same_results(expected, mine, "shared plan");
      }
    });
  for (std::thread& caller : callers) caller.join();
}

#if defined(__SANITIZE_THREAD__)
#define TESSERA_TEST_FORK 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TESSERA_TEST_FORK 0
#endif
#endif
#if !defined(TESSERA_TEST_FORK)
#define TESSERA_TEST_FORK 1
#endif

// The child has none of the parent's pool threads; calls there must finish all the same, with the same bits.
TEST(Fork, ChildComputesAfterTheParentDid) {
  if (!TESSERA_TEST_FORK) GTEST_SKIP() << "ThreadSanitizer does not follow threads that start after a fork";
  CaseData parent = build(small()), child = build(small());
  run(parent, {.threads = 4});
  const pid_t id = fork();
  ASSERT_GE(id, 0);
  if (id == 0) {
    alarm(60);  // a lost thread would wait for ever
    bool same = true;
    for (int round = 0; round < 3; ++round) {
      run(child, {.threads = 4});
      same = same && child.o.bits() == parent.o.bits() && child.dk.bits() == parent.dk.bits();
    }
    _exit(same ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(id, &status, 0), id);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace tessera::test
