// SPDX-License-Identifier: Apache-2.0
// Every rule for the caller's arguments refuses with its own sentence and leaves the outputs as they were.
// The rules are the rows of tests/api/check_rows.hpp, page_rows.hpp, part_rows.hpp and cache_rows.hpp.
// Links tessera_cases. Implements the contract's "No surprises" (docs/algorithm.md).
#include "core/check.hpp"
#include "api/attention.hpp"
#include "tests/api/cache_rows.hpp"
#include "tests/api/page_rows.hpp"
#include "tests/api/part_rows.hpp"
#include "tests/support/support.hpp"

// A row asks for more memory than any machine has; the sanitizers would end the program instead of refusing it.
extern "C" __attribute__((visibility("default"))) const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}

namespace tessera::test {
namespace {

Case valid_case(bool packed) {
  Case c{.name = "valid", .B = 2, .Nq = 5, .Nk = 7, .Hq = 4, .Hk = 2, .D = 8, .Dv = 6};
  c.bias = c.mask = c.dlse = true, c.slopes = Slopes::per_head, c.sinks = Sinks::finite;
  if (packed) c.packed_q = {2, 3}, c.packed_k = {4, 3};
  if (!packed) c.used_q = {5, 3}, c.used_k = {7, 4};
  return c;
}

// Two valid partial results, the merge's target and a mask beside the tensors of an attention call.
struct Prepared {
  CaseData data;
  Buffer o1, o2, lse1, lse2, dropout_mask, rng;
  Buffer pool_k, pool_v, block_table, page_indptr, page_indices, leftpad, status;
  Buffer state_o, state_m, state_l, places;
  Arguments a;

  explicit Prepared(bool packed) :
      data(build(valid_case(packed))), o1(filled(Type::f32, {2, 5, 4, 6}, 1)), o2(filled(Type::f32, {2, 5, 4, 6}, 2)),
      lse1(filled(Type::f32, {2, 4, 5}, 0)), lse2(filled(Type::f32, {2, 4, 5}, 0)),
      dropout_mask(Type::u8, {2, 4, 5, 7}), rng(of(Type::i64, {2}, {1, 2})), pool_k(filled(Type::f32, {4, 3, 2, 8}, 1)),
      pool_v(filled(Type::f32, {4, 3, 2, 6}, 1)), block_table(of(Type::i32, {2, 3}, {2, 0, 1, 3, 1, 99})),
      page_indptr(of(Type::i32, {3}, {0, 3, 5})), page_indices(of(Type::i32, {5}, {2, 0, 1, 3, 1})),
      leftpad(of(Type::i32, {2}, {1, 0})), status(of(Type::i32, {1}, {0})), state_o(Type::f32, {2, 5, 4, 6}),
      state_m(Type::f32, {2, 4, 5}), state_l(Type::f64, {2, 4, 5}), places(of(Type::i64, {2}, {0, 0})) {
    a.in = data.inputs(), a.out = data.outputs(), a.saved = data.saved(), a.grads = data.gradients();
    a.parts = {{.o = o1.tensor(), .lse = lse1.tensor()}, {.o = o2.tensor(), .lse = lse2.tensor()}};
    a.dropout_mask = dropout_mask.tensor(), a.rng = rng.tensor();
    a.q_lengths = packed ? std::vector{0, 2, 5} : std::vector{5, 3};
    a.k_lengths = packed ? std::vector{0, 4, 7} : std::vector{7, 4};
    a.page_indptr = page_indptr.tensor(), a.page_indices = page_indices.tensor();
    a.indptr = {0, 3, 5}, a.leftpad = {1, 0};
    a.state = {state_o.tensor(), state_m.tensor(), state_l.tensor()}, a.places = places.tensor();
    a.positions = {192, -384};
  }

  // The same call as a part of a problem: it starts from nothing, and ends with a state.
  void use_parts() {
    a.out = {.state = a.state};
    a.in.seq_row0 = a.in.seq_col0 = a.in.seq_batch0 = a.places, a.options.part_invariant = true;
  }

  // The same call with its keys in pages.
  void use_pages() {
    a.in.k = pool_k.tensor(), a.in.v = pool_v.tensor(), a.in.block_table = block_table.tensor();
    a.in.leftpad_k = leftpad.tensor(), a.out.status = status.tensor();
  }

  // The lengths' contents live in the arguments, so that a row can spoil them.
  void place_lengths(bool packed) {
    Tensor& q = packed ? a.in.cu_seqlens_q : a.in.seqused_q;
    Tensor& k = packed ? a.in.cu_seqlens_k : a.in.seqused_k;
    if (q) q.data = a.q_lengths.data();
    if (k) k.data = a.k_lengths.data();
    if (a.in.page_indptr) a.in.page_indptr.data = a.indptr.data();
    if (a.in.leftpad_k) a.in.leftpad_k.data = a.leftpad.data();
    for (Tensor* t : {&a.in.seq_row0, &a.in.seq_col0, &a.in.seq_batch0})
      if (*t) t->data = a.positions.data();
  }

  void expect_outputs_untouched() const {
    for (const Buffer* out : {&data.o, &data.lse, &data.dq, &data.dk, &data.dv, &data.dbias, &data.dsinks,
                              &dropout_mask, &state_o, &state_m, &state_l})
      for (std::int64_t e = 0; e < out->elements(); ++e) ASSERT_TRUE(out->untouched(e));
  }
};

void call(Entry entry, const Arguments& a, const Plan* plan) {
  if (entry == Entry::forward || entry == Entry::packed || entry == Entry::paged || entry == Entry::part)
    forward(a.in, a.out, a.options, a.execution);
  if (entry == Entry::backward || entry == Entry::packed_backward)
    backward(a.in, a.saved, a.grads, a.options, a.execution);
  if (entry == Entry::merge) merge(a.parts, a.out, a.execution);
  if (entry == Entry::dropout_mask) dropout_mask(a.dropout_mask, a.options, a.rng, a.execution);
  if (entry == Entry::plan_forward) plan->run(a.in, a.out, a.options, a.execution);
}

bool is_packed(Entry entry) { return entry == Entry::packed || entry == Entry::packed_backward; }

// The number of bytes is the planner's business: the sentence must hold one, which one does not matter here.
std::string without_bytes(const std::string& sentence, const std::string& expected) {
  const auto at = expected.find("WORKSPACE");
  if (at == std::string::npos || at >= sentence.size()) return sentence;
  const auto end = sentence.find_first_not_of("0123456789", at);
  return sentence.substr(0, at) + (end == at ? "" : "WORKSPACE") +
         (end == std::string::npos ? "" : sentence.substr(end));
}

// Which kernels there are depends on the processor and on the build; the sentence lists all of them.
std::string with_kernels(std::string sentence) {
  const auto at = sentence.find("KERNELS");
  if (at == std::string::npos) return sentence;
  const std::string lines = info(), key = "kernels ";
  const auto begin = lines.find_first_not_of(' ', lines.find(key) + key.size());
  return sentence.replace(at, 7, lines, begin, lines.find('\n', begin) - begin);
}

class Check : public testing::TestWithParam<Row> {};

TEST_P(Check, RefusesWithItsSentence) {
  const Row& row = GetParam();
  Prepared prepared(is_packed(row.entry));
  const Plan plan = Plan::forward(prepared.a.in, prepared.a.out);
  if (row.entry == Entry::paged) prepared.use_pages();
  if (row.entry == Entry::part) prepared.use_parts();
  row.spoil(prepared.a);
  prepared.place_lengths(is_packed(row.entry));
  try {
    call(row.entry, prepared.a, &plan);
    FAIL() << "no error; expected: " << row.sentence;
  } catch (const Error& error) {
    EXPECT_EQ(without_bytes(error.what(), row.sentence), with_kernels(row.sentence));
    EXPECT_EQ(error.status(), row.status);
  }
  prepared.expect_outputs_untouched();
}

INSTANTIATE_TEST_SUITE_P(All, Check, testing::ValuesIn(rows),
                         [](const testing::TestParamInfo<Row>& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Pages, Check, testing::ValuesIn(page_rows),
                         [](const testing::TestParamInfo<Row>& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Parts, Check, testing::ValuesIn(part_rows),
                         [](const testing::TestParamInfo<Row>& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(Caches, Check, testing::ValuesIn(cache_rows),
                         [](const testing::TestParamInfo<Row>& info) { return info.param.name; });

// The rows prove nothing unless the calls that they spoil are fine by themselves.
TEST(Unspoiled, EveryEntryAcceptsItsCall) {
  for (Entry entry : {Entry::forward, Entry::backward, Entry::packed, Entry::packed_backward, Entry::paged, Entry::part,
                      Entry::merge, Entry::dropout_mask, Entry::plan_forward}) {
    Prepared prepared(is_packed(entry));
    const Plan plan = Plan::forward(prepared.a.in, prepared.a.out);
    if (entry == Entry::paged) prepared.use_pages();
    if (entry == Entry::part) prepared.use_parts();
    prepared.place_lengths(is_packed(entry));
    EXPECT_NO_THROW(call(entry, prepared.a, &plan)) << static_cast<int>(entry);
  }
}

TEST(Unspoiled, PagesMayBeListed) {
  Prepared prepared(false);
  prepared.use_pages();
  use_indptr(prepared.a);
  prepared.place_lengths(false);
  EXPECT_NO_THROW(call(Entry::paged, prepared.a, nullptr));
}

template <class Body>
std::string sentence(Body body) {
  try {
    body();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "no error";
}

// The C ABI refuses these before the checks behind it can: they guard the library's own callers.
TEST(Inside, ChecksStandWithoutTheCAbi) {
  Prepared prepared(false);
  prepared.a.in.q.ndim = 9;
  EXPECT_EQ(sentence([&] { check_forward(prepared.a.in, prepared.a.out, {}, {}); }),
            "q: has 9 dimensions; tensors have 1 to 4");
  EXPECT_EQ(sentence([&] { check_merge({}, prepared.a.out, {}); }),
            "n: is 0; merging needs at least one partial result");
}

// A remembered plan must not answer for a name that was never one.
TEST(Inside, AnEmptyNameIsNoKernel) {
  Prepared prepared(false);
  prepared.place_lengths(false);
  const Arguments& a = prepared.a;
  forward(a.in, a.out);
  EXPECT_EQ(sentence([&] { forward(a.in, a.out, {}, {.kernel = ""}); }),
            with_kernels("kernel: is ''; must be one of KERNELS"));
}

// A device's memory is its caller's to give. No device is needed to see that: the plan is never run.
TEST(Inside, NothingIsAllocatedOnADevice) {
  class Hungry : public KernelPlan {
    std::size_t workspace_bytes() const override { return 1000; }
    std::string describe() const override { return ""; }
    void run(const Call&) const override { ADD_FAILURE() << "was run without its workspace"; }
  };
  Call call;
  call.inputs.q = call.inputs.k = call.inputs.v = Tensor(fake_memory, Type::f32, {1, 1, 1, 4}, gpu);
  call.outputs.o = Tensor(fake_memory + 16, Type::f32, {1, 1, 1, 4}, gpu);
  const Problem problem = check_forward(call.inputs, call.outputs, {}, {});
  const api::Planned planned{problem, nullptr, std::make_unique<Hungry>(), ""};
  EXPECT_EQ(sentence([&] { api::run(planned, problem, call); }),
            "workspace: is null but this plan needs " + std::to_string(planned.workspace_bytes()) +
                " bytes on cuda:3; nothing is allocated on a device but by its caller");
}

}  // namespace
}  // namespace tessera::test
