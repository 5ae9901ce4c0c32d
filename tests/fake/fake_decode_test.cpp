// SPDX-License-Identifier: Apache-2.0
// Serving on GPUs that are not there: every case of the tables that `decode` takes, and keys in pages, for few queries
// and for many, with their launches, pointers in bounds and the workspace; who gets which kernel, and what a plan says
// of it. Links tessera_cases and the fake libcuda and NVRTC. Implements docs/architecture.md, "One call on a GPU".
#include "cases/random.hpp"
#include "cuda/device.hpp"
#include "tests/fake/support.hpp"

namespace tessera::test {
namespace {

constexpr const char* decode_kernel = "decode_queue";

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
  int ran = 0, as_they_are = 0, of_caches = 0, direct = 0;
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
      if (keeps_promises(on.call(FakePass::forward, "decode_direct"), turn % 3 * 8, launches)) direct += launches > 0;
      if (HasFailure()) return;
    }
  EXPECT_GT(ran, 150);
  EXPECT_GT(direct, 100);
  EXPECT_GT(as_they_are, 10);
  EXPECT_GT(of_caches, 10);
}

// Memory of a paged call, in every form of table.
struct Paged {
  std::int64_t B = 3, Nq = 2, Hq = 8, Hk = 2, D = 64, Dv = 128, P = 16, pages = 40, entries = 9;
  int device = 0;
  const char* kernel = nullptr;    // null: whichever is chosen
  std::int64_t packed_tokens = 0;  // queries of all sequences, of Nq each at most; 0: padded
  bool indptr = false, apart = false, leftpad = false, status = false, heads_first = false, used_q = false;
  Type cached = Type::bf16;  // 8 bits: with a scale for each head
  bool grouped = false;      // with one for each 128 dims
  bool per_key = false;      // with one for each key
  bool qv = false, tree = false, positions = false;
  std::vector<std::unique_ptr<DeviceMemory>> held{};

  Tensor tensor(Type type, std::initializer_list<std::int64_t> shape) {
    std::int64_t elements = 1;
    for (const std::int64_t size : shape) elements *= size;
    const Device where{DeviceType::cuda, device};
    held.push_back(std::make_unique<DeviceMemory>(where, static_cast<std::size_t>(elements) * cases::size_of(type)));
    return {held.back()->data(), type, shape, where};
  }
  Tensor pool(std::int64_t width) {
    Tensor t = tensor(cached, {pages, P, Hk, width});
    if (heads_first) t.strides = {P * Hk * width, width, P * width, 1};
    return t;
  }
  FakeCall call() {
    FakeCall c{.pass = FakePass::forward};
    c.execution = {.device = {DeviceType::cuda, device}, .kernel = kernel};
    c.in.k = pool(D), c.in.v = pool(Dv);
    c.in.seqused_k = tensor(Type::i32, {B});
    if (indptr)
      c.in.page_indptr = tensor(Type::i32, {B + 1}), c.in.page_indices = tensor(Type::i32, {entries});
    else
      c.in.block_table = tensor(Type::i32, {B, entries});
    if (apart) c.in.v_block_table = tensor(Type::i32, {B, entries});
    if (leftpad) c.in.leftpad_k = tensor(Type::i32, {B});
    if (status) c.out.status = tensor(Type::i32, {1});
    if (cached != Type::bf16) c.in.k_scale = tensor(Type::f32, {Hk}), c.in.v_scale = tensor(Type::f32, {B, Hk});
    if (grouped) {
      c.in.k_scale = tensor(Type::f32, {c.in.k.shape[0], P, Hk, (D + 127) / 128});
      c.in.v_scale = tensor(Type::f32, {c.in.v.shape[0], P, Hk, (Dv + 127) / 128});
    }
    if (per_key) c.in.k_scale = c.in.v_scale = tensor(Type::f32, {pages, P, Hk});
    if (used_q) c.in.seqused_q = tensor(Type::i32, {B});
    const std::int64_t T = packed_tokens, words = (Nq + 31) / 32;
    if (qv) c.in.qv = T > 0 ? tensor(Type::bf16, {T, Hq, Dv}) : tensor(Type::bf16, {B, Nq, Hq, Dv});
    if (tree) c.in.tree_mask = T > 0 ? tensor(Type::i32, {T, words}) : tensor(Type::i32, {B, Nq, words});
    if (positions) c.in.positions = T > 0 ? tensor(Type::i32, {T}) : tensor(Type::i32, {B, Nq});
    if (T > 0) {
      c.in.q = tensor(Type::bf16, {T, Hq, D}), c.in.cu_seqlens_q = tensor(Type::i32, {B + 1});
      c.out.o = tensor(Type::bf16, {T, Hq, Dv}), c.out.lse = tensor(Type::f32, {Hq, T});
      c.options.max_seqlen_q = Nq;
    } else {
      c.in.q = tensor(Type::bf16, {B, Nq, Hq, D});
      c.out.o = tensor(Type::bf16, {B, Nq, Hq, Dv}), c.out.lse = tensor(Type::f32, {B, Hq, Nq});
    }
    return c;
  }
};

// Every form of table; few queries, many, and some of each; on GPUs in turn, and on Hopper, which has kernels of its
// own.
TEST_F(FakeDecode, PagesAndTablesAreInBounds) {
  struct Shape {
    std::int64_t Nq, tokens;
    bool used_q;
    std::size_t launches;
  };
  int ran = 0, alone = 0;
  const auto without_schedule = [](Paged& paged) {
    return planned(paged.call()).describe().find("no schedule") != std::string::npos;
  };
  for (const Shape& shape :
       {Shape{2, 0, false, 2}, {2, 5, false, 2}, {300, 0, false, 1}, {300, 0, true, 3}, {300, 700, false, 3}})
    for (const int bits : {0, 1, 2, 4, 8, 16, 31 - 2, 31 - 1})
      for (const std::int64_t P : {1, 1, 16, 16, 528, 528}) {
        Paged paged;
        paged.P = P;
        paged.device = ran % 2 ? fake::machine().device_of(9, 0) : device_of_turn(static_cast<std::size_t>(ran / 2));
        paged.Nq = shape.Nq, paged.packed_tokens = shape.tokens, paged.used_q = shape.used_q;
        paged.indptr = bits & 1, paged.apart = bits & 2, paged.leftpad = bits & 4, paged.status = bits & 8;
        paged.heads_first = bits & 16;
        if (P == 16 && bits > 4) paged.cached = bits % 2 ? Type::i8 : Type::e4m3;
        SCOPED_TRACE(testing::Message() << "up to " << shape.Nq << " queries, bits " << bits << " pages of " << P);
        std::size_t launches = 0;
        EXPECT_TRUE(keeps_promises(paged.call(), 0, launches));
        EXPECT_EQ(launches, without_schedule(paged) ? 1 : shape.launches);
        ++ran, alone += without_schedule(paged);
      }
  EXPECT_EQ(ran, 5 * 48);
  EXPECT_GT(alone, 20);
  for (const std::int64_t D : {64, 192}) {
    Paged paged;
    paged.device = fake::machine().device_of(9, 0), paged.grouped = true, paged.D = D, paged.Dv = 256;
    paged.cached = Type::e4m3;
    std::size_t launches = 0;
    EXPECT_TRUE(keeps_promises(paged.call(), 0, launches));
    EXPECT_EQ(launches, without_schedule(paged) ? 1U : 2U);
  }
}

// A table or lengths on the host, where the kernel would read them: refused by name, and nothing is launched.
TEST_F(FakeDecode, TablesOnTheHostAreRefused) {
  std::vector<std::int32_t> numbers(1000);
  for (const bool indptr : {false, true}) {
    Paged paged;
    paged.device = fake::machine().device_of(9, 0), paged.indptr = indptr, paged.leftpad = paged.status = true;
    paged.apart = !indptr;
    const FakeCall right = paged.call();
    const std::string gpu = "cuda:" + std::to_string(paged.device);
    const auto refused = [&](Tensor Inputs::*member, const char* name) {
      FakeCall call = right;
      Tensor& tensor = call.in.*member;
      tensor.data = numbers.data(), tensor.device = {DeviceType::cpu, 0};
      fake::machine().forget();
      try {
        forward(call.in, call.out, call.options, call.execution);
        ADD_FAILURE() << name << " on the host was taken";
      } catch (const Error& error) {
        EXPECT_EQ(error.what(),
                  std::string(name) + ": is on cpu but the call runs on " + gpu + "; all tensors must be there");
      }
      EXPECT_TRUE(fake::machine().launches.empty()) << name;
    };
    if (indptr) {
      refused(&Inputs::page_indptr, "page_indptr");
      refused(&Inputs::page_indices, "page_indices");
    } else {
      refused(&Inputs::block_table, "block_table");
      refused(&Inputs::v_block_table, "v_block_table");
    }
    refused(&Inputs::seqused_k, "seqused_k");
    refused(&Inputs::leftpad_k, "leftpad_k");
  }
}

// What a captured graph, and a loop over layers, can afford: launches, and of the driver nothing else but the question
// which device is current. The fake GPU's memory cannot be read on the host: a call that did would crash.
TEST_F(FakeDecode, AnAttendIsItsLaunchesAndNothingElse) {
  for (const std::size_t launches : {1, 3})
    for (const bool planned_before : {true, false}) {
      Paged paged;
      paged.device = fake::machine().device_of(9, 0), paged.status = true;
      if (launches == 3) paged.Nq = 300, paged.packed_tokens = 700;  // prompts beside decoding sequences
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
      std::vector<std::string> expected{"cuCtxGetCurrent", "cuCtxGetDevice"};
      expected.resize(2 + launches, "cuLaunchKernelEx");
      EXPECT_EQ(std::vector<std::string>(fake::machine().calls.begin(), fake::machine().calls.end()), expected);
      EXPECT_EQ(fake::machine().launches.size(), launches);
    }
}

// Until it has run on a GPU, it is what a call gets by name only, unless nothing else takes the call, and a plan says
// so.
TEST_F(FakeDecode, IsForThoseWhoAskForItAndForCaches) {
  Paged paged;
  paged.device = fake::machine().device_of(9, 0);
  const std::string chosen = planned(paged.call()).describe();
  for (const char* line :
       {"kernel         decode_direct\n", "decode_attend: ", "keys, 8 warps, no schedule",
        "not naive      refused: k and v are paged; this kernel takes padded and packed ones",
        "not mma        could run it, but is slower",
        "not mma_mixed  refused: every sequence has 2 queries; this is for batches of many and of few"})
    EXPECT_NE(chosen.find(line), std::string::npos) << line << " in\n" << chosen;

  Plain plain;
  plain.Nq = 1;
  FakeCall padded = plain.call(FakePass::forward, decode_kernel, paged.device);
  padded.execution.kernel = nullptr;
  const std::string other = planned(padded).describe();
  EXPECT_NE(other.find("not decode_direct refused: this kernel is not the fastest for few"), std::string::npos)
      << other;
}

// Long queries over pages are `hopper`'s where it can, else `mma`'s; together with short ones, which `decode` takes,
// `hopper_mixed`'s or `mma_mixed`'s.
TEST_F(FakeDecode, LeavesLongQueriesToOthers) {
  const auto expect_lines = [](const Paged& like, std::initializer_list<const char*> lines) {
    Paged paged;
    paged.Nq = like.Nq, paged.packed_tokens = like.packed_tokens, paged.D = like.D, paged.P = like.P;
    paged.cached = like.cached, paged.device = like.device, paged.kernel = like.kernel;
    const std::string plan = planned(paged.call()).describe();
    for (const char* line : lines) EXPECT_NE(plan.find(line), std::string::npos) << line << " in\n" << plan;
  };
  Paged prompts;
  prompts.Nq = 300;
  const auto on = [&](int major) { prompts.device = fake::machine().device_of(major, 0), prompts.packed_tokens = 0; };

  on(8);
  expect_lines(prompts,
               {"kernel         mma\n", "1 launches", "tiles of 128 queries x 48 keys in pages",
                "not decode_queue refused: Nq is 300 and 4 heads share a KV head; this kernel takes at most 64 rows",
                "not hopper     refused: the GPU is sm_80; this kernel needs sm_90a",
                "not vector     refused: k and v are paged; this kernel takes padded and packed ones"});
  prompts.packed_tokens = 700;
  for (const char* kernel : {static_cast<const char*>(nullptr), "mma", "mma_mixed"}) {
    prompts.kernel = kernel;
    expect_lines(prompts, {"kernel         mma_mixed\n", "3 launches", "mma_forward: ", "decode_schedule: 1 blocks",
                           "decode_attend: "});
  }

  on(9);
  for (const char* kernel : {static_cast<const char*>(nullptr), "hopper"}) {
    prompts.kernel = kernel;
    expect_lines(prompts, {"kernel         hopper\n", "1 launches",
                           "hopper_forward: ", "72 tiles of 128 queries x 128 keys in pages, 2 warpgroups",
                           "not hopper_mixed refused: every sequence has 300 queries"});
  }
  prompts.packed_tokens = 700;
  for (const char* kernel : {static_cast<const char*>(nullptr), "hopper", "hopper_mixed"}) {
    prompts.kernel = kernel;
    expect_lines(prompts, {"kernel         hopper_mixed\n", "3 launches",
                           "hopper_forward: ", "decode_schedule: 1 blocks", "decode_attend: "});
  }
  prompts.kernel = nullptr;
  // Pages that are too small for tensor copies, and 8 bits.
  prompts.P = 15;
  expect_lines(prompts, {"kernel         mma_mixed\n",
                         "not hopper     refused: pages hold 15 keys; tensor copies of them are too small below 16",
                         "not hopper_mixed refused: pages hold 15 keys; tensor copies"});
  prompts.P = 16, prompts.cached = Type::e4m3;
  expect_lines(prompts,
               {"kernel         mma_mixed\n",
                "not hopper     refused: k or v has another type than q, or scales; this kernel takes neither"});
  // Where `decode` cannot take the short ones, one kernel takes all.
  prompts.cached = Type::bf16, prompts.D = 60;
  expect_lines(prompts,
               {"kernel         mma\n", "not hopper     refused: pointers and strides are aligned to 8 bytes",
                "not mma_mixed  refused: decode, for sequences of at most 64 rows: q, k and v are aligned to 8 bytes; "
                "this kernel copies 16 at a time"});
}

// What the other kernels for many rows refuse, in prompts and in batches of prompts and others, on every GPU from sm_80
// on: two launches, and the plan says why.
TEST_F(FakeDecode, TakesManyRowsThatOthersRefuse) {
  struct Change {
    void (*apply)(Paged& paged);
    const char* line;
  };
  const Change changes[] = {
      {[](Paged& p) { p.per_key = true, p.cached = Type::e4m3; },
       "not mma        refused: k_scale has 3 dimensions; this kernel takes one for each head, or sequence and head"},
      {[](Paged& p) { p.grouped = true, p.cached = Type::i8; }, "not mma        refused: k_scale has 4 dimensions"},
      {[](Paged& p) { p.qv = true; }, "not mma        refused: qv is given; this kernel makes scores of q and k alone"},
      {[](Paged& p) { p.tree = true; }, "not mma        refused: a tree mask or positions are given"},
      {[](Paged& p) { p.positions = true; }, "not mma_mixed  refused: a tree mask or positions are given"},
      {[](Paged& p) { p.D = 64, p.Dv = 512, p.qv = true, p.Hk = 1, p.Hq = 128; },
       "not decode_queue refused: Nq is 300 and 128 heads share a KV head"}};
  int ran = 0;
  for (const Change& change : changes)
    for (const std::int64_t tokens : {0, 700})
      for (std::size_t turn = 0; turn + 1 < fake::machine().gpus.size(); ++turn) {
        Paged paged;
        paged.device = device_of_turn(turn), paged.Nq = 300, paged.packed_tokens = tokens;
        change.apply(paged);
        const FakeCall call = paged.call();
        const std::string plan = planned(call).describe();
        for (const char* line : {"kernel         decode_many\n", "decode_attend: ", change.line})
          EXPECT_NE(plan.find(line), std::string::npos) << line << " in\n" << plan;
        std::size_t launches = 0;
        EXPECT_TRUE(keeps_promises(call, 0, launches));
        EXPECT_EQ(launches, 2U);
        if (HasFailure()) return;
        ++ran;
      }
  EXPECT_GT(ran, 50);
}

// Blocks of `hopper` take tiles as they come to them where there are more tiles than blocks: a launch, and a count in
// the workspace beside what `decode` keeps there.
TEST_F(FakeDecode, HopperCountsItsTilesBesideDecode) {
  for (const bool leftpad : {false, true}) {
    Paged paged;
    paged.device = fake::machine().device_of(9, 0), paged.Nq = 3000, paged.packed_tokens = 8000;
    paged.leftpad = leftpad, paged.P = 48, paged.entries = 100;
    std::size_t launches = 0;
    EXPECT_TRUE(keeps_promises(paged.call(), 0, launches));
    EXPECT_EQ(launches, 4);
  }
}

}  // namespace
}  // namespace tessera::test
