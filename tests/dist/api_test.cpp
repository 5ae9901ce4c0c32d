// SPDX-License-Identifier: Apache-2.0
// The public interface of several ranks, C and C++: partitions, transports made of callbacks, plans, and the sentence
// of every refusal. Results against one call of the library. Implements docs/scale_out.md.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "tessera/dist.hpp"
#include "tessera/nccl.h"
#include "tests/dist/api_data.hpp"

namespace tessera {
namespace {

// --- partitions

TEST(Partitions, HoldEveryRowOnce) {
  for (const PartitionKind kind : {PartitionKind::zigzag, PartitionKind::contiguous, PartitionKind::balanced})
    for (const int slices : {1, 2}) {
      const PartitionArgs args{.lengths = {300, 0, 77, 1},
                               .ranks = 4,
                               .kind = kind,
                               .slices = slices,
                               .align = 16,
                               .options = {.causal = true}};
      const Partition p(args);
      ASSERT_EQ(p.ranks(), 4);
      std::map<std::pair<std::int64_t, std::int64_t>, int> held;
      for (int r = 0; r < 4; ++r) {
        std::int64_t rows = 0;
        for (const tessera_span& s : p.spans(r))
          for (std::int64_t i = s.begin; i < s.end; ++i) ++held[{s.sequence, i}], ++rows;
        EXPECT_EQ(p.rows(r), rows);
      }
      EXPECT_EQ(held.size(), 378u);
      for (const auto& [row, times] : held) EXPECT_EQ(times, 1);
    }
}

TEST(Partitions, OfOnesOwn) {
  const Partition p({{{0, 10, 20}}, {{0, 0, 10}, {1, 0, 3}}}, {.lengths = {20, 3}});
  EXPECT_EQ(p.rows(0), 10);
  EXPECT_EQ(p.rows(1), 13);
  EXPECT_EQ(p.rows(2), 0);
  EXPECT_EQ(p.spans(-1).size(), 0u);
}

TEST(Partitions, Refusals) {
  using Spans = std::vector<std::vector<tessera_span>>;
  const auto own = [](const Spans& spans) { return caught([&] { Partition(spans, {.lengths = {20}}); }); };
  EXPECT_EQ(own({{{0, 0, 10}}, {{0, 11, 20}}}),
            "partition: holds row 10 of sequence 0 not at all; every row must be held once");
  EXPECT_EQ(own({{{0, 0, 11}}, {{0, 10, 20}}}),
            "partition: holds row 10 of sequence 0 twice; every row must be held once");
  EXPECT_EQ(own({{{0, 0, 10}}}), "partition: holds row 10 of sequence 0 not at all; every row must be held once");
  EXPECT_EQ(own({{{0, 0, 21}}}), "partition: holds rows 0 to 21 of sequence 0, which are no rows of the sequences");
  EXPECT_EQ(own({{{1, 0, 5}}}), "partition: holds rows 0 to 5 of sequence 1, which are no rows of the sequences");
  EXPECT_EQ(own({{{0, 5, 5}}}), "partition: holds row 0 of sequence 0 not at all; every row must be held once");
  EXPECT_EQ(own({{{0, 0, 20}, {0, 6, 5}}}),
            "partition: holds rows 6 to 5 of sequence 0, which are no rows of the sequences");
  for (const tessera_span& nowhere : {tessera_span{0, 21, 21}, {0, -1, -1}, {1, 0, 0}, {-1, 0, 0}})
    EXPECT_EQ(own({{{0, 0, 20}, nowhere}}),
              "partition: holds rows " + std::to_string(nowhere.begin) + " to " + std::to_string(nowhere.end) +
                  " of sequence " + std::to_string(nowhere.sequence) + ", which are no rows of the sequences");
  const auto made = [](const PartitionArgs& args) { return caught([&] { const Partition p(args); }); };
  EXPECT_EQ(made({.lengths = {20}, .ranks = 0}), "ranks: is 0; must be from 1 to 1048576");
  EXPECT_EQ(made({.lengths = {20}, .ranks = 4, .slices = 3}), "slices: is 3; must be positive and divide the 4 ranks");
  EXPECT_EQ(made({.lengths = {20}, .align = 0}), "align: is 0; must be positive");
  EXPECT_EQ(made({.lengths = {-1}}), "lengths: holds -1; must be 0 or more");
  EXPECT_EQ(made({.lengths = {std::int64_t(1) << 48, 1}}), "lengths: are more than 2^48 tokens together");
  EXPECT_EQ(made({.lengths = {20}, .kind = PartitionKind(9)}),
            "kind: is 9; must be TESSERA_ZIGZAG, TESSERA_CONTIGUOUS or TESSERA_BALANCED");
  tessera_partition_args args;
  tessera_partition_args_init(&args);
  tessera_partition* p = nullptr;
  EXPECT_EQ(said(tessera_partition_make(&args, nullptr)), "partition: is NULL; it is required");
  EXPECT_EQ(said(tessera_partition_make(nullptr, &p)), "partition_args: is NULL; it is required");
  args.sequences = -1;
  EXPECT_EQ(said(tessera_partition_make(&args, &p)), "sequences: is -1; must be from 0 to 2147483647");
  args.sequences = 1;
  EXPECT_EQ(said(tessera_partition_make(&args, &p)), "lengths: is NULL; it is required");
  const std::int64_t length = 4, counts[] = {-1}, one[] = {1};
  args.lengths = &length;
  EXPECT_EQ(said(tessera_partition_from_spans(&args, nullptr, nullptr, &p)), "counts: is NULL; it is required");
  EXPECT_EQ(said(tessera_partition_from_spans(&args, nullptr, counts, &p)), "counts: holds -1; must be 0 or more");
  EXPECT_EQ(said(tessera_partition_from_spans(&args, nullptr, one, &p)), "spans: is NULL; it is required");
  args.size -= 1;
  EXPECT_EQ(said(tessera_partition_make(&args, &p)),
            "partition_args: size is " + std::to_string(args.size) +
                ", which ends inside a field; must be the size of a tessera_partition_args that some header declares");
  EXPECT_EQ(p, nullptr);
  EXPECT_EQ(tessera_partition_ranks(nullptr), 0);
}

// --- a transport of the caller's own: mailboxes between threads

struct Post {
  std::mutex mutex;
  std::map<std::pair<int, int>, std::deque<std::string>> boxes;
  std::optional<std::string> failure;
  int destroyed = 0;
  std::map<int, std::set<std::thread::id>> callers;  // by rank, the threads that have begun groups
};

class Mail : public Transport {
 public:
  Mail(Post& post, int rank, int size, bool aside = false) : post(post), me(rank), size(size), aside(aside) {}
  ~Mail() override {
    const std::lock_guard lock(post.mutex);
    ++post.destroyed;
  }
  int rank() const override { return me; }
  int ranks() const override { return size; }
  bool own_thread() const override { return aside; }
  void start(std::span<const tessera_message> messages) override {
    group.assign(messages.begin(), messages.end());
    const std::lock_guard lock(post.mutex);
    post.callers[me].insert(std::this_thread::get_id());
    if (down) throw std::runtime_error("the post is on strike");
    for (const tessera_message& m : group)
      if (m.send) post.boxes[{me, m.peer}].emplace_back(static_cast<char*>(m.data), m.bytes);
  }
  void test(std::span<std::uint8_t> done) override {
    const std::lock_guard lock(post.mutex);
    for (std::size_t i = 0; i < group.size(); ++i) {
      if (done[i]) continue;
      std::deque<std::string>& box = post.boxes[{group[i].peer, me}];
      if (!group[i].send && box.empty()) continue;
      if (!group[i].send) std::memcpy(group[i].data, box.front().data(), group[i].bytes), box.pop_front();
      done[i] = 1;
    }
  }
  std::optional<std::string> notice() override {
    const std::lock_guard lock(post.mutex);
    return post.failure;
  }
  void fail(const char* sentence) noexcept override {
    const std::lock_guard lock(post.mutex);
    if (!post.failure) post.failure = sentence;
  }
  bool down = false;

 private:
  Post& post;
  int me, size;
  bool aside;
  std::vector<tessera_message> group;
};

const Options options{.causal = true, .dropout = 0.1};
const DistArgs args{.query_heads = heads, .key_heads = kv_heads, .head_dim = dim, .value_dim = dim, .timeout = 20};

void copy_rows(Data& all, Data& part, const Partition& partition, int rank, bool in) {
  std::int64_t at = 0;
  for (const tessera_span& s : partition.spans(rank)) {
    const auto move = [&](std::vector<float>& global, std::vector<float>& local, std::int64_t row) {
      auto g = global.begin() + s.begin * row, l = local.begin() + at * row;
      const std::int64_t n = (s.end - s.begin) * row;
      in ? std::copy(g, g + n, l) : std::copy(l, l + n, g);
    };
    if (in) move(all.q, part.q, heads * dim), move(all.k, part.k, kv_heads * dim), move(all.v, part.v, kv_heads * dim);
    if (in) move(all.d_o, part.d_o, heads * dim);
    if (!in) move(all.o, part.o, heads * dim), move(all.dq, part.dq, heads * dim);
    if (!in) move(all.dk, part.dk, kv_heads * dim), move(all.dv, part.dv, kv_heads * dim);
    at += s.end - s.begin;
  }
}

// Both passes, with another seed than the plan's, against one call. The partition has one sequence of `tokens` rows,
// number `sequence`, and perhaps empty ones.
void expect_one_devices_answer(std::vector<Communicator> communicators, Scheme scheme, const Partition& partition,
                               std::int64_t sequence = 0) {
  Data all(tokens), one(tokens);
  all.fill(), one.fill();
  Options seeded = options;
  seeded.seed = 77;
  {
    Options alone = seeded;
    alone.batch0 = sequence;  // which the dropout mask counts
    Inputs in;
    in.q = Tensor(one.q.data(), Type::f32, {1, tokens, heads, dim});
    in.k = Tensor(one.k.data(), Type::f32, {1, tokens, kv_heads, dim});
    in.v = Tensor(one.v.data(), Type::f32, {1, tokens, kv_heads, dim});
    const Tensor o(one.o.data(), Type::f32, {1, tokens, heads, dim}),
        lse(one.lse.data(), Type::f32, {1, heads, tokens});
    tessera::forward(in, {o, lse, {}, {}}, alone);
    tessera::backward(in, {o, lse, Tensor(one.d_o.data(), Type::f32, {1, tokens, heads, dim}), {}},
                      {Tensor(one.dq.data(), Type::f32, {1, tokens, heads, dim}),
                       Tensor(one.dk.data(), Type::f32, {1, tokens, kv_heads, dim}),
                       Tensor(one.dv.data(), Type::f32, {1, tokens, kv_heads, dim}),
                       {},
                       {}},
                      alone);
  }
  std::vector<std::string> faults(communicators.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < partition.ranks(); ++r)
    threads.emplace_back([&, r] {
      faults[std::size_t(r)] = caught([&] {
        DistArgs mine = args;
        mine.scheme = scheme;
        DistPlan plan(communicators[std::size_t(r)], partition, mine, options, {.threads = 1});
        Data part(partition.rows(r));
        copy_rows(all, part, partition, r, true);
        plan.forward(part.inputs(), part.outputs(), seeded);
        plan.backward(part.inputs(), part.saved(), part.gradients(), seeded);
        copy_rows(all, part, partition, r, false);
      });
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& fault : faults) EXPECT_EQ(fault, "");
  EXPECT_LT(largest_difference(all.o, one.o), 1e-5);
  EXPECT_LT(largest_difference(all.dq, one.dq), 1e-5);
  EXPECT_LT(largest_difference(all.dk, one.dk), 1e-5);
  EXPECT_LT(largest_difference(all.dv, one.dv), 1e-5);
}

Partition zigzag_of_four(int slices) {
  return Partition({.lengths = {tokens}, .ranks = 4, .slices = slices, .align = 8});
}

TEST(Plans, GiveOneDevicesAnswerOnThreads) {
  expect_one_devices_answer(Communicator::threads(4), Scheme::gather, zigzag_of_four(1));
  expect_one_devices_answer(Communicator::threads(4), Scheme::ring, zigzag_of_four(2));
}

// Spans without rows at both ends of a sequence, inside others' rows and in empty sequences, ranks that have no other
// and a rank that has none at all.
TEST(Plans, TakeSpansWithoutRows) {
  for (int ranks = 1; ranks <= 8; ++ranks)
    for (const int slices : {1, 2}) {
      if (ranks % slices != 0) continue;
      const int holders = ranks > 2 ? ranks - 2 : ranks;
      const Partition rows({.lengths = {0, tokens, 0}, .ranks = holders, .align = 8});
      std::vector<std::vector<tessera_span>> spans(static_cast<std::size_t>(ranks));
      for (int r = 0; r < holders; ++r) {
        std::vector<tessera_span>& mine = spans[std::size_t(r)];
        for (const tessera_span& s : rows.spans(r))
          mine.insert(mine.end(), {{0, 0, 0}, {1, tokens / 2 + r, tokens / 2 + r}, s, {1, s.end, s.end}});
        mine.insert(mine.end(), {{1, tokens, tokens}, {2, 0, 0}});
      }
      if (ranks > 2) spans[std::size_t(ranks - 2)] = {{1, 7, 7}, {1, 0, 0}, {2, 0, 0}};
      const Partition partition(spans, {.lengths = {0, tokens, 0}, .slices = slices});
      for (int r = 0; r < ranks; ++r) {  // as they were given
        ASSERT_EQ(partition.spans(r).size(), spans[std::size_t(r)].size());
        EXPECT_EQ(partition.rows(r), r < holders ? rows.rows(r) : 0);
      }
      for (const Scheme scheme : {Scheme::ring, Scheme::gather})
        expect_one_devices_answer(Communicator::threads(ranks), scheme, partition, 1);
    }
}

TEST(Plans, DescribeTheirBalance) {
  std::vector<Communicator> four = Communicator::threads(4);
  std::vector<std::string> texts(4);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < 4; ++r)
    threads.emplace_back([&, r] { texts[r] = DistPlan(four[r], zigzag_of_four(1), args, options).describe(); });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : texts)
    EXPECT_NE(text.find("balance of work 1.000 forward"), std::string::npos) << text;
}

TEST(Plans, GiveItOverTheCallersTransport) {
  Post post;
  std::vector<Communicator> all;
  for (int r = 0; r < 4; ++r) all.emplace_back(std::make_unique<Mail>(post, r, 4));
  EXPECT_EQ(all[2].rank(), 2);
  EXPECT_EQ(all[2].size(), 4);
  expect_one_devices_answer(std::move(all), Scheme::ring, zigzag_of_four(1));
  EXPECT_EQ(post.destroyed, 4);
}

TEST(Plans, RunOnAThreadOfTheTransport) {
  Post post;
  std::vector<Communicator> all;
  for (int r = 0; r < 4; ++r) all.emplace_back(std::make_unique<Mail>(post, r, 4, r != 2));
  std::vector<std::thread::id> mine(4);
  const Partition partition = zigzag_of_four(1);
  std::vector<std::thread> threads;
  for (int r = 0; r < 4; ++r)
    threads.emplace_back([&, r] {
      mine[std::size_t(r)] = std::this_thread::get_id();
      Data part(partition.rows(r));
      DistPlan plan(all[std::size_t(r)], partition, args, options, {.threads = 1});
      plan.forward(part.inputs(), part.outputs());
    });
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < 4; ++r) {  // one for all calls
    EXPECT_EQ(post.callers[r].size(), 1u);
    EXPECT_EQ(post.callers[r].contains(mine[std::size_t(r)]), r == 2);
  }
  all.clear();
  EXPECT_EQ(post.destroyed, 4);
}

TEST(Plans, AFailingTransportIsHeardOfEverywhere) {
  Post post;
  std::vector<Communicator> all;
  for (int r = 0; r < 2; ++r) {
    auto mail = std::make_unique<Mail>(post, r, 2);
    mail->down = r == 1;
    all.emplace_back(std::move(mail));
  }
  const Partition partition({.lengths = {tokens}, .ranks = 2});
  std::vector<std::string> faults(2);
  std::thread other([&] { faults[1] = caught([&] { DistPlan(all[1], partition, args); }); });
  faults[0] = caught([&] { DistPlan(all[0], partition, args); });
  other.join();
  EXPECT_EQ(faults[1], "the post is on strike");
  EXPECT_EQ(faults[0], "rank 1: the post is on strike");
}

// Who waits for nobody cannot hear the others' complaints, nor they its own.
TEST(Plans, AWrongTimeoutIsHeardOfEverywhere) {
  const Partition partition({.lengths = {tokens}, .ranks = 2});
  for (const auto& [timeout, is] : {std::pair(0.0, "0"), std::pair(double(NAN), "nan")}) {
    const std::vector<Communicator> all = Communicator::threads(2);
    DistArgs wrong = args;
    wrong.timeout = timeout;
    const std::string sentence = std::string("timeout: is ") + is + "; must be a positive number of seconds";
    EXPECT_EQ(caught([&] { DistPlan(all[1], partition, wrong); }), sentence);
    EXPECT_EQ(caught([&] { DistPlan(all[0], partition, args); }), "rank 1: " + sentence);
  }
}

// --- refusals

struct One {  // a plan of a single rank
  Partition partition{{.lengths = {tokens}}};
  std::vector<Communicator> alone = Communicator::threads(1);
  DistPlan plan{alone[0], partition, args, options, {.threads = 1}};
  Data data{tokens};
  One() { data.fill(); }
};

std::string planned(const DistArgs& wanted, const Execution& execution = {}, const Options& o = {}) {
  const Partition partition({.lengths = {tokens}});
  const std::vector<Communicator> alone = Communicator::threads(1);
  return caught([&] { DistPlan(alone[0], partition, wanted, o, execution); });
}

TEST(Refusals, OfPlans) {
  DistArgs wrong = args;
  EXPECT_EQ(planned(wrong), "");
  EXPECT_EQ(planned(wrong, {.kernel = "reference"}),
            "kernel: is 'reference'; over several ranks the library chooses it");
  EXPECT_EQ(planned(wrong, {.device = {DeviceType::vulkan, 0}}),
            "device: is Vulkan's; over several ranks rows are on CPUs or CUDA GPUs");
  // In f32 no kernel for GPUs carries a state.
  EXPECT_TRUE(planned(wrong, {.device = {DeviceType::cuda, 0}}).starts_with("no kernel can run this: "));
  EXPECT_EQ(planned(wrong, {}, {.softcap = -1}),
            "softcap: is -1; must be 0 (none) or a positive number from 1e-18 to 1e18");
  wrong.scheme = Scheme(7);
  EXPECT_EQ(planned(wrong), "scheme: is 7; must be TESSERA_RING or TESSERA_GATHER");
  wrong = args, wrong.key_heads = 0;
  EXPECT_EQ(planned(wrong), "partition: has 1 slices; there are 0 key heads to share out");
  tessera_dist_args c;
  tessera_dist_args_init(&c);
  tessera_dist_plan* plan = nullptr;
  EXPECT_EQ(said(tessera_dist_plan_make(nullptr, nullptr, nullptr, &plan)), "dist_args: is NULL; it is required");
  EXPECT_EQ(said(tessera_dist_plan_make(&c, nullptr, nullptr, &plan)), "communicator: is NULL; it is required");
  const std::vector<Communicator> alone = Communicator::threads(1);
  c.communicator = alone[0].c();
  EXPECT_EQ(said(tessera_dist_plan_make(&c, nullptr, nullptr, &plan)), "partition: is NULL; it is required");
  // Who has failed once is told to begin anew.
  EXPECT_EQ(said(tessera_dist_plan_make(&c, nullptr, nullptr, &plan)),
            "communicator: has failed before (partition: is NULL; it is required); make a new one, and a plan with it");
  EXPECT_EQ(plan, nullptr);
  EXPECT_EQ(said(tessera_dist_forward(nullptr, nullptr, nullptr, nullptr)), "plan: is NULL; it is required");
  EXPECT_STREQ(tessera_dist_plan_describe(nullptr), "");
}

TEST(Refusals, OfCalls) {
  const auto forward = [](auto change) {
    One one;
    Inputs in = one.data.inputs();
    Outputs out = one.data.outputs();
    std::optional<Options> o;
    change(one, in, out, o);
    return caught([&] { one.plan.forward(in, out, o); });
  };
  EXPECT_EQ(forward([](One&, Inputs&, Outputs&, auto&) {}), "");
  EXPECT_EQ(forward([](One&, Inputs&, Outputs&, auto& o) { o = Options{}; }),
            "options: are not those of the plan; only seed and seed_offset may differ");
  EXPECT_EQ(forward([](One&, Inputs& in, Outputs& out, auto&) { out.o = in.q; }),
            "o: shares memory with q; outputs must not overlap inputs or each other");
  EXPECT_EQ(forward([](One&, Inputs&, Outputs& out, auto&) { out.o.strides[0] = 0; }),
            "o: elements of shape [192,4,16] with strides [0,16,1] share memory; outputs must not overlap themselves");
  EXPECT_EQ(forward([](One&, Inputs&, Outputs& out, auto&) { out.status = Tensor(&out, Type::i32, {1}); }),
            "status and state: are given; over several ranks there are none");
  One one;
  EXPECT_EQ(said(tessera_dist_forward(nullptr, nullptr, nullptr, nullptr)), "plan: is NULL; it is required");
  Gradients g = one.data.gradients();
  g.dk = g.dv;
  EXPECT_NE(
      caught([&] { one.plan.backward(one.data.inputs(), one.data.saved(), g); }).find("dv: shares memory with dk"),
      std::string::npos);
}

TEST(Refusals, OfCommunicators) {
  tessera_transport t;
  tessera_transport_init(&t);
  tessera_communicator* made = nullptr;
  const auto make = [&] { return said(tessera_communicator_make(&t, &made)); };
  EXPECT_EQ(said(tessera_communicator_make(nullptr, &made)), "transport: is NULL; it is required");
  EXPECT_EQ(said(tessera_communicator_make(&t, nullptr)), "communicator: is NULL; it is required");
  EXPECT_EQ(make(), "start: is NULL; it is required");
  t.start = [](void*, const tessera_message*, std::int64_t, char*) { return TESSERA_INTERNAL; };
  EXPECT_EQ(make(), "test: is NULL; it is required");
  t.test = [](void*, std::uint8_t*, std::int64_t, char*) { return TESSERA_OK; };
  t.own_thread = 2;
  EXPECT_EQ(make(), "own_thread: is 2; must be 0 or 1");
  t.own_thread = 0;
  t.rank = 1;
  EXPECT_EQ(make(), "rank: is 1; must be from 0 to 0");
  t.ranks = 0;
  EXPECT_EQ(make(), "ranks: is 0; must be from 1 to 1048576");
  EXPECT_EQ(said(tessera_communicator_threads(0, &made)), "ranks: is 0; must be from 1 to 1048576");
  EXPECT_EQ(said(tessera_communicator_threads(1, nullptr)), "communicators: is NULL; it is required");
  EXPECT_EQ(made, nullptr);
  EXPECT_EQ(tessera_communicator_size(nullptr), 0);
  EXPECT_EQ(said(tessera_fail(TESSERA_UNSUPPORTED, "a sentence of another library")), "a sentence of another library");
  // Without notice, fail and destroy, and with a failure that says nothing.
  t.rank = 0, t.ranks = 2;
  ASSERT_EQ(make(), "");
  const Communicator silent(made);
  const Partition partition({.lengths = {tokens}, .ranks = 2});
  EXPECT_EQ(caught([&] { DistPlan(silent, partition, args); }), "the transport has failed, and did not say why");
}

TEST(Refusals, OfNcclWhereItIsMissing) {
  setenv("TESSERA_NCCL", "/nowhere/libnccl.so.2", 1);  // before the library looks for it, once
  char id[TESSERA_NCCL_ID_BYTES];
  EXPECT_EQ(tessera_nccl_unique_id(id), TESSERA_DEVICE_ERROR);
  const std::string sentence = tessera_last_error();
  EXPECT_TRUE(sentence.starts_with("NCCL is missing: libnccl.so.2 could not be opened (/nowhere/libnccl.so.2"))
      << sentence;
  EXPECT_TRUE(sentence.ends_with("); install it, or set TESSERA_NCCL to its path")) << sentence;
}

}  // namespace
}  // namespace tessera
