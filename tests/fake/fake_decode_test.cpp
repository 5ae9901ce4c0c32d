// SPDX-License-Identifier: Apache-2.0
// `decode` on GPUs that are not there: every case of the tables that it takes, and keys in pages, with its two
// launches, their pointers in bounds and the workspace; who gets it, and what a plan says of it. Links tessera_cases
// and the fake libcuda and NVRTC. Implements docs/architecture.md, "One call on a GPU".
#include "cases/random.hpp"
#include "cuda/device.hpp"
#include "tests/fake/support.hpp"

namespace tessera::test {
namespace {

constexpr const char* decode_kernel = "decode";

// GPUs from sm_80 on take turns.
int device_of_turn(std::size_t turn) { return static_cast<int>(1 + turn % (fake::machine().gpus.size() - 1)); }

// The same shape in 16 bits with few queries, aligned.
Case few_queries(Case c) {
  c.backward = c.options.accumulate = false;
  if (c.type == Type::f32) c.type = Type::bf16;
  if (c.style != Style::heads_first) c.style = Style::contiguous;
  const std::int64_t unit = c.cached_k.plain() && c.cached_v.plain() ? 8 : 16;  // 16 bytes
  const auto aligned = [&](std::int64_t dims) { return std::min<std::int64_t>((dims + unit - 1) / unit * unit, 256); };
  c.Dv = aligned(c.dim_v()), c.D = aligned(c.D);
  const std::int64_t most = c.Hk > 0 && c.Hq >= c.Hk ? 64 / (c.Hq / c.Hk) : 1;
  c.Nq = std::min(c.Nq, most);
  for (auto& length : c.packed_q) length = std::min(length, static_cast<std::int32_t>(most));
  for (auto& length : c.used_q) length = std::min(length, static_cast<std::int32_t>(most));
  if (c.packed()) c.options.max_seqlen_q = most;
  return c;
}

class FakeDecode : public FakeGpu {};

TEST_F(FakeDecode, LaunchesAreLegalAndInBounds) {
  std::vector<Case> cases = suite("all");
  for (const Case& c : random_cases(16'500, 150)) cases.push_back(c);
  for (const Case& c : suite("caches")) cases.push_back(c);
  std::size_t turn = 0;
  int ran = 0, as_they_are = 0, of_caches = 0;
  for (const Case& original : cases)
    for (const bool few : {false, true}) {
      const Case spec = few ? few_queries(original) : original;
      CaseData data = build(spec);
      const OnFake on(data, device_of_turn(turn++));
      SCOPED_TRACE(describe(spec));
      std::size_t launches = 0;
      if (!keeps_promises(on.call(FakePass::forward, decode_kernel), turn % 3 * 8, launches)) continue;
      EXPECT_TRUE(launches == 2 || launches == 0) << launches;
      ran += launches > 0, as_they_are += !few && launches > 0;
      of_caches += launches > 0 && (!spec.cached_k.plain() || spec.qv || spec.tree != Tree::none || spec.positions);
      if (HasFailure()) return;
    }
  EXPECT_GT(ran, 150);
  EXPECT_GT(as_they_are, 10);
  EXPECT_GT(of_caches, 10);
}

// Memory of a paged call, in every form of table.
struct Paged {
  std::int64_t B = 3, Nq = 2, Hq = 8, Hk = 2, D = 64, Dv = 128, P = 16, pages = 40, entries = 9;
  int device = 0;
  bool indptr = false, apart = false, leftpad = false, status = false, heads_first = false;
  std::vector<std::unique_ptr<DeviceMemory>> held{};

  Tensor tensor(Type type, std::initializer_list<std::int64_t> shape) {
    std::int64_t elements = 1;
    for (const std::int64_t size : shape) elements *= size;
    const Device where{DeviceType::cuda, device};
    held.push_back(std::make_unique<DeviceMemory>(where, static_cast<std::size_t>(elements) * cases::size_of(type)));
    return {held.back()->data(), type, shape, where};
  }
  Tensor pool(std::int64_t width) {
    Tensor t = tensor(Type::bf16, {pages, P, Hk, width});
    if (heads_first) t.strides = {P * Hk * width, width, P * width, 1};
    return t;
  }
  FakeCall call() {
    FakeCall c{.pass = FakePass::forward};
    c.execution = {.device = {DeviceType::cuda, device}, .kernel = decode_kernel};
    c.in.q = tensor(Type::bf16, {B, Nq, Hq, D}), c.in.k = pool(D), c.in.v = pool(Dv);
    c.in.seqused_k = tensor(Type::i32, {B});
    if (indptr)
      c.in.page_indptr = tensor(Type::i32, {B + 1}), c.in.page_indices = tensor(Type::i32, {entries});
    else
      c.in.block_table = tensor(Type::i32, {B, entries});
    if (apart) c.in.v_block_table = tensor(Type::i32, {B, entries});
    if (leftpad) c.in.leftpad_k = tensor(Type::i32, {B});
    if (status) c.out.status = tensor(Type::i32, {1});
    c.out.o = tensor(Type::bf16, {B, Nq, Hq, Dv}), c.out.lse = tensor(Type::f32, {B, Hq, Nq});
    return c;
  }
};

TEST_F(FakeDecode, PagesAndTablesAreInBounds) {
  int ran = 0;
  for (const int bits : {0, 1, 2, 4, 8, 16, 31 - 2, 31 - 1})
    for (const std::int64_t P : {1, 16, 528}) {
      Paged paged;
      paged.P = P, paged.device = device_of_turn(static_cast<std::size_t>(ran));
      paged.indptr = bits & 1, paged.apart = bits & 2, paged.leftpad = bits & 4, paged.status = bits & 8;
      paged.heads_first = bits & 16;
      SCOPED_TRACE(testing::Message() << "bits " << bits << " pages of " << P);
      std::size_t launches = 0;
      EXPECT_TRUE(keeps_promises(paged.call(), 0, launches));
      EXPECT_EQ(launches, 2U);
      ++ran;
    }
  EXPECT_EQ(ran, 24);
}

// What a captured graph, and a loop over layers, can afford: two launches, and of the driver nothing else but the
// question which device is current. The fake GPU's memory cannot be read on the host: a call that did would crash.
TEST_F(FakeDecode, AnAttendIsTwoLaunchesAndNothingElse) {
  for (const bool planned_before : {true, false}) {
    Paged paged;
    paged.device = fake::machine().device_of(9, 0), paged.status = true;
    const cuda::CurrentDevice current(paged.device);
    FakeCall call = paged.call();
    const Plan plan = planned(call);
    const Workspace workspace(call, plan);
    const auto attend = [&] {
      planned_before ? run(plan, call) : forward(call.in, call.out, call.options, call.execution);
    };
    attend();  // without a plan, the first call makes one
    fake::machine().forget();
    attend();
    std::vector<std::string> calls(fake::machine().calls.begin(), fake::machine().calls.end());
    EXPECT_EQ(calls,
              (std::vector<std::string>{"cuCtxGetCurrent", "cuCtxGetDevice", "cuLaunchKernelEx", "cuLaunchKernelEx"}));
    EXPECT_EQ(fake::machine().launches.size(), 2U);
  }
}

// Until it has run on a GPU, it is what a call gets by name only, and a plan says so. For pages there is no other.
TEST_F(FakeDecode, IsForThoseWhoAskForIt) {
  Paged paged;
  paged.device = fake::machine().device_of(9, 0);
  FakeCall call = paged.call();
  const std::string forced = planned(call).describe();
  EXPECT_NE(forced.find("kernel         decode\n"), std::string::npos) << forced;
  EXPECT_NE(forced.find("decode_schedule: 1 blocks"), std::string::npos) << forced;
  EXPECT_NE(forced.find("decode_attend: "), std::string::npos) << forced;
  EXPECT_NE(forced.find("tiles of 8 rows x 64 keys"), std::string::npos) << forced;
  call.execution.kernel = nullptr;
  try {
    planned(call);
    FAIL() << "another kernel takes pages";
  } catch (const Error& error) {
    const std::string said = error.what();
    EXPECT_NE(said.find("decode: this kernel has not run on a GPU yet; a call gets it if it asks for it by name"),
              std::string::npos)
        << said;
    EXPECT_NE(said.find("naive: k and v are paged; this kernel takes padded and packed ones"), std::string::npos)
        << said;
  }
  Plain plain;
  plain.Nq = 1;
  FakeCall padded = plain.call(FakePass::forward, decode_kernel, paged.device);
  padded.execution.kernel = nullptr;
  const std::string chosen = planned(padded).describe();
  EXPECT_NE(chosen.find("not decode     refused: this kernel has not run on a GPU yet"), std::string::npos) << chosen;
}

}  // namespace
}  // namespace tessera::test
