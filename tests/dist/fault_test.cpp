// SPDX-License-Identifier: Apache-2.0
// Ranks that disagree, fail, vanish, dawdle or send nonsense: on every live rank one sentence within the limit of time
// and a second, outputs as they were, and nobody hangs.
// Implements docs/scale_out.md, "Failure".
#include <thread>

#include "tests/dist/fault_run.hpp"

namespace tessera::dist {
namespace {

TEST(Agreement, EveryFieldThatDiffersIsNamedOnEveryRank) {
  const std::vector<std::pair<const char*, Change>> rows = {
      {"D differs: rank 0 has 16, rank 2 has 8", [](int, Problem& p, Sharing&) { p.D = 8; }},
      {"Dv differs: rank 0 has 16, rank 2 has 24", [](int, Problem& p, Sharing&) { p.Dv = 24; }},
      {"Hq differs: rank 0 has 4, rank 2 has 2", [](int, Problem& p, Sharing&) { p.Hq = 2; }},
      {"Hk differs: rank 0 has 2, rank 2 has 1", [](int, Problem& p, Sharing&) { p.Hk = 1; }},
      {"type differs: rank 0 has 1, rank 2 has 3", [](int, Problem& p, Sharing&) { p.type = Type::bf16; }},
      {"sequences differs: rank 0 has 1, rank 2 has 2", [](int, Problem& p, Sharing&) { p.lengths.push_back(0); }},
      {"lengths differs between rank 0 and rank 2",
       [](int, Problem& p, Sharing& s) {
         p.lengths = {97};
         s.partition = zigzag(p.lengths, 4, 4);
       }},
      {"causal differs: rank 0 has 1, rank 2 has 0", [](int, Problem& p, Sharing&) { p.options.causal = false; }},
      {"scale differs: rank 0 has 1.79769e+308, rank 2 has 0.5",
       [](int, Problem& p, Sharing&) { p.options.scale = 0.5; }},
      {"softcap differs: rank 0 has 0, rank 2 has 30", [](int, Problem& p, Sharing&) { p.options.softcap = 30; }},
      {"window_left differs: rank 0 has -1, rank 2 has 9",
       [](int, Problem& p, Sharing&) { p.options.window_left = 9; }},
      {"window_right differs: rank 0 has -1, rank 2 has 9",
       [](int, Problem& p, Sharing&) { p.options.window_right = 9; }},
      {"diagonal_offset differs: rank 0 has 0, rank 2 has 3",
       [](int, Problem& p, Sharing&) { p.options.alignment = Alignment::offset, p.options.diagonal_offset = 3; }},
      {"dropout differs: rank 0 has 0, rank 2 has 0.1", [](int, Problem& p, Sharing&) { p.options.dropout = 0.1; }},
      {"seed differs: rank 0 has 0, rank 2 has 5", [](int, Problem& p, Sharing&) { p.options.seed = 5; }},
      {"seed_offset differs: rank 0 has 0, rank 2 has 5", [](int, Problem& p, Sharing&) { p.options.seed_offset = 5; }},
      {"scheme differs: rank 0 has 0, rank 2 has 1", [](int, Problem&, Sharing& s) { s.scheme = Scheme::gather; }},
      {"segment differs: rank 0 has 0, rank 2 has 4", [](int, Problem&, Sharing& s) { s.segment = 4; }},
      {"grain differs: rank 0 has 384, rank 2 has 192", [](int, Problem&, Sharing& s) { s.grain = 192; }},
      {"deterministic differs: rank 0 has 1, rank 2 has 0",
       [](int, Problem& p, Sharing&) { p.options.deterministic = false; }},
      {"part_invariant differs: rank 0 has 0, rank 2 has 1",
       [](int, Problem& p, Sharing&) { p.options.part_invariant = true; }},
      {"segment_rows differs: rank 0 has 0, rank 2 has 64",
       [](int, Problem& p, Sharing&) { p.options.segment_rows = 64; }},
      {"slices differs: rank 0 has 1, rank 2 has 2",
       [](int, Problem& p, Sharing& s) { s.partition = two_level(zigzag(p.lengths, 2, 4), 2, 1); }},
      {"partition differs between rank 0 and rank 2",
       [](int, Problem& p, Sharing& s) { s.partition = contiguous(p.lengths, 4, 4); }},
  };
  for (const auto& [sentence, change] : rows) {
    const Outcome out = run([&](int r, Problem& p, Sharing& s) {
      if (r == 2) change(r, p, s);
    });
    expect_all(out, sentence);
    expect_untouched(out);
    EXPECT_EQ(out.status[3], TESSERA_COMMUNICATION_ERROR);
  }
}

TEST(Agreement, WhatOneRankMayNotAskAllHear) {
  const std::vector<std::pair<const char*, Change>> rows = {
      {"partition: is for 3 ranks; the communicator has 4",
       [](int, Problem& p, Sharing& s) { s.partition = zigzag(p.lengths, 3, 4); }},
      {"partition: has 3 slices; must divide the 4 ranks", [](int, Problem&, Sharing& s) { s.partition.slices = 3; }},
      {"partition: has 4 slices; there are 2 key heads to share out",
       [](int, Problem&, Sharing& s) { s.partition.slices = 4; }},
      {"type: must be f32, f16 or bf16", [](int, Problem& p, Sharing&) { p.type = Type::f64; }},
      {"row0, col0, head0 and batch0: must be 0; the plan knows where each part lies",
       [](int, Problem& p, Sharing&) { p.options.col0 = 1; }},
      {"accumulate: is 1; must be 0 over several ranks",
       [](int, Problem& p, Sharing&) { p.options.accumulate = true; }},
      {"segment: is -1; must be 0 (none) or positive", [](int, Problem&, Sharing& s) { s.segment = -1; }},
      {"grain: is 0; must be positive", [](int, Problem&, Sharing& s) { s.grain = 0; }},
      {"segment: is 4; a ring's bits depend on the number of ranks, so it must be 0 there",
       [](int, Problem&, Sharing& s) { s.segment = 4; }},
      {"Hq: is 5; must be a multiple of Hk, 2", [](int, Problem& p, Sharing&) { p.Hq = 5; }},
      {"softcap: is -1; must be 0 (none) or a positive number from 1e-18 to 1e18",
       [](int, Problem& p, Sharing&) { p.options.softcap = -1; }},
  };
  for (const auto& [sentence, change] : rows) {
    const Outcome all = run(change);
    expect_all(all, sentence);
    expect_untouched(all);
    EXPECT_EQ(all.status[1], TESSERA_INVALID_ARGUMENT);
  }
}

TEST(Agreement, AnAbsentRankIsNamed) {
  const Outcome out = run({}, {}, [](int r) { return r != 3; });
  for (const int r : {0, 1, 2}) {
    const std::string& said = out.sentences[static_cast<std::size_t>(r)];
    EXPECT_NE(said.find("no answer within 1 s from rank 3"), std::string::npos) << said;
  }
  EXPECT_LT(out.seconds, timeout + 1);
  expect_untouched(out);
}

TEST(Agreement, ALateRankIsWaitedFor) {
  const Outcome out = run([](int r, Problem&, Sharing&) {
    if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  });
  expect_all(out, "");
}

TEST(Faults, ADeadLinkEndsAtTheLimit) {
  expect_heard(run({}, on_rank(1, {.kind = Fault::drop, .group = 2})), "no answer within 1 s from rank");
}

TEST(Faults, ALostMessageIsNoticedByTheNextOne) {
  expect_heard(run({}, on_rank(1, {.kind = Fault::lose, .group = 2})), "arrived damaged, or belongs to another call");
}

TEST(Faults, ACorruptedMessageIsNoticed) {
  expect_heard(run({}, on_rank(2, {.kind = Fault::corrupt, .group = 1})),
               "a message from rank 2 in step 0 arrived damaged, or belongs to another call");
}

TEST(Faults, AMessageOfAnotherSizeIsNoticed) {
  expect_heard(run({}, on_rank(0, {.kind = Fault::wrong_size, .group = 1})), "a message from rank 0 has ");
}

TEST(Faults, AFailingTransportIsReported) {
  expect_heard(run({}, on_rank(3, {.kind = Fault::fail, .group = 2})), "the network is down");
}

TEST(Faults, ADelayWithinTheLimitIsNone) {
  expect_all(run({}, on_rank(1, {.kind = Fault::delay, .group = 2, .seconds = 0.25})), "");
}

// The same while several groups are under way: those of a gather run ahead of the work.
TEST(Faults, AGatherThatRunsAheadEndsAsWell) {
  const Change gather = [](int, Problem&, Sharing& s) { s.scheme = Scheme::gather, s.grain = 4; };
  const std::pair<Fault, const char*> rows[] = {
      {{.kind = Fault::drop, .group = 3}, "no answer within 1 s from rank"},
      {{.kind = Fault::lose, .group = 3}, "arrived damaged, or belongs to another call"},
      {{.kind = Fault::corrupt, .group = 3}, "arrived damaged, or belongs to another call"},
      {{.kind = Fault::wrong_size, .group = 3}, "a message from rank 1 has "},
      {{.kind = Fault::fail, .group = 3}, "the network is down"},
  };
  for (const auto& [fault, sentence] : rows) expect_heard(run(gather, on_rank(1, fault)), sentence);
  expect_all(run(gather, on_rank(1, {.kind = Fault::delay, .group = 3, .seconds = 0.25})), "");
}

TEST(Faults, WhatOneRankGetsWrongInACallAllHear) {
  const World world(small(), {}, 3);
  std::vector<std::string> said(4);
  const auto begin = Clock::now();
  run_ranks(4, [&](int r, std::shared_ptr<Communicator> c) {
    const Sharing sharing = sharing_of(world.problem);
    std::optional<Plan> plan;  // while a slow rank makes its own, another may have failed already
    const Int64 n = sharing.partition.rows(r);
    Numbers q(Type::f32, n, 4, 16), k(Type::f32, n, 2, 16), v(Type::f32, n, 2, 16), o(Type::f32, n, 4, 16);
    Inputs in;
    in.q = q.tokens(), in.k = k.tokens(), in.v = v.tokens();
    Outputs out;
    out.o = o.tokens();
    if (r == 2) in.v.shape[0] = 7;
    for (int call = 0; call < 2; ++call) {
      try {
        if (!plan) plan.emplace(c, world.problem, sharing);
        plan->forward(in, out);
      } catch (const Error& error) {
        if (call == 0) said[static_cast<std::size_t>(r)] = error.what();
        if (call == 1) {
          EXPECT_EQ(std::string(error.what()), "communicator: has failed before (" + said[static_cast<std::size_t>(r)] +
                                                   "); make a new one, and a plan with it");
        }
      }
    }
  });
  EXPECT_EQ(said[2], "v: has the shape [7,2,16]; must have [24,2,16], the rows of this rank");
  for (const int r : {0, 1, 3}) EXPECT_EQ(said[static_cast<std::size_t>(r)], "rank 2: " + said[2]);
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - begin).count(), timeout);  // told, not timed out
}

TEST(Faults, TensorsThatARankMayNotGive) {
  const World world(small(), {}, 3);
  const auto said = [&](const std::function<void(Inputs&, Saved&, Gradients&)>& change) {
    std::string sentence;
    const auto alone = thread_communicators(1)[0];
    Sharing sharing = sharing_of(world.problem, 1);
    Plan plan(alone, world.problem, sharing);
    const Int64 n = 96;
    Numbers q(Type::f32, n, 4, 16), k(Type::f32, n, 2, 16), l(Type::f32, n, 4, 1), dq(Type::f32, n, 4, 16),
        dk(Type::f32, n, 2, 16), dv(Type::f32, n, 2, 16);
    Inputs in;
    in.q = q.tokens(), in.k = k.tokens(), in.v = k.tokens();
    Saved saved{q.tokens(), l.numbers(), q.tokens(), {}};
    Gradients g{dq.tokens(), dk.tokens(), dv.tokens(), {}, {}};
    change(in, saved, g);
    try {
      plan.backward(in, saved, g);
    } catch (const Error& error) {
      sentence = error.what();
    }
    return sentence;
  };
  EXPECT_EQ(said([](Inputs&, Saved&, Gradients&) {}), "");
  EXPECT_EQ(said([](Inputs& in, Saved&, Gradients&) { in.q.device.type = DeviceType::cuda; }),
            "q: must be in the CPU's memory");
  EXPECT_EQ(said([](Inputs& in, Saved&, Gradients&) { in.k.type = Type::bf16; }),
            "k: has another type than the problem");
  EXPECT_EQ(said([](Inputs& in, Saved&, Gradients&) { in.v.data = nullptr; }), "v: has no data");
  const std::pair<const char*, Tensor Inputs::*> others[] = {{"cu_seqlens_q", &Inputs::cu_seqlens_q},
                                                             {"cu_seqlens_k", &Inputs::cu_seqlens_k},
                                                             {"seqused_q", &Inputs::seqused_q},
                                                             {"seqused_k", &Inputs::seqused_k},
                                                             {"rng", &Inputs::rng},
                                                             {"block_table", &Inputs::block_table},
                                                             {"v_block_table", &Inputs::v_block_table},
                                                             {"page_indptr", &Inputs::page_indptr},
                                                             {"page_indices", &Inputs::page_indices},
                                                             {"leftpad_k", &Inputs::leftpad_k},
                                                             {"seq_row0", &Inputs::seq_row0},
                                                             {"seq_col0", &Inputs::seq_col0},
                                                             {"seq_batch0", &Inputs::seq_batch0},
                                                             {"k_scale", &Inputs::k_scale},
                                                             {"v_scale", &Inputs::v_scale},
                                                             {"qv", &Inputs::qv},
                                                             {"tree_mask", &Inputs::tree_mask},
                                                             {"positions", &Inputs::positions}};
  const std::string refused =
      ": is given; over several ranks there are q, k, v, bias, mask, slopes and sinks, and lengths, seed and offset "
      "are "
      "the plan's";
  for (const auto& [name, member] : others)
    EXPECT_EQ(said([&](Inputs& in, Saved&, Gradients&) { in.*member = Tensor(nullptr, Type::i64, {2}); }),
              name + refused);
  EXPECT_EQ(said([](Inputs& in, Saved&, Gradients&) { in.state.l = Tensor(nullptr, Type::f64, {2}); }),
            "state" + refused);
  EXPECT_EQ(said([](Inputs& in, Saved&, Gradients&) {
              in.bias = Tensor(nullptr, Type::f32, {1, 4, 96, 95});
            }),
            "bias: has the shape [1,4,96,95]; must have [1,4,96,96], the rows of this rank");
  EXPECT_EQ(said([](Inputs&, Saved&, Gradients& g) { g.dk = {}; }),
            "dq, dk and dv: must all be given over several ranks");
  EXPECT_EQ(said([](Inputs&, Saved&, Gradients& g) { g.dbias = g.dq; }), "dbias: is given without bias");
  float some = 0;
  const auto bias_gradient = [&](std::initializer_list<std::int64_t> bias, std::initializer_list<std::int64_t> dbias) {
    return said([&](Inputs& in, Saved&, Gradients& g) {
      in.bias = Tensor(&some, Type::f32, bias), g.dbias = Tensor(&some, Type::f32, dbias);
    });
  };
  EXPECT_EQ(
      bias_gradient({1, 4, 1, 96}, {1, 4, 1, 96}),
      "dbias: is given, and bias is the same for all rows; over several ranks it must have each of the 96 rows of "
      "this rank");
  EXPECT_EQ(bias_gradient({1, 1, 96, 96}, {1, 4, 96, 96}),
            "dbias: has the shape [1,4,96,96]; must have [1,1,96,96], the rows of this rank");
  EXPECT_EQ(said([](Inputs&, Saved&, Gradients& g) { g.dsinks = g.dq; }), "dsinks: is given without sinks");
}

TEST(Faults, AnInputThatOneRankAloneHasIsNoticed) {
  const Problem problem{{96}, 4, 2, 16, 16, Type::f32, {}};
  for (Tensor Inputs::*const member : {&Inputs::slopes, &Inputs::sinks}) {
    std::vector<std::string> said(2);
    run_ranks(2, [&](int r, std::shared_ptr<Communicator> c) {
      const Sharing sharing = sharing_of(problem, 2);
      const Int64 n = sharing.partition.rows(r);
      Numbers q(Type::f32, n, 4, 16), k(Type::f32, n, 2, 16), o(Type::f32, n, 4, 16), heads(Type::f32, 1, 4, 1);
      Inputs in;
      in.q = q.tokens(), in.k = in.v = k.tokens();
      if (r == 1) in.*member = Tensor(heads.rows.view.data, Type::f32, {4});
      Outputs out;
      out.o = o.tokens();
      try {
        Plan(c, problem, sharing).forward(in, out);
      } catch (const Error& error) {
        said[static_cast<std::size_t>(r)] = error.what();
      }
    });
    for (const std::string& sentence : said)
      EXPECT_NE(sentence.find("arrived damaged, or belongs to another call"), std::string::npos) << sentence;
  }
}

// Their messages have the same sizes, and both are called for the first time.
TEST(Faults, PlansInAnotherOrderAreNoticed) {
  const Problem problem{{96}, 4, 2, 16, 16, Type::f32, {}};
  Problem other = problem;
  other.options.scale = 0.5;
  std::vector<std::string> said(2);
  run_ranks(2, [&](int r, std::shared_ptr<Communicator> c) {
    const Sharing sharing = sharing_of(problem, 2);
    const Int64 n = sharing.partition.rows(r);
    Numbers q(Type::f32, n, 4, 16), k(Type::f32, n, 2, 16), o(Type::f32, n, 4, 16);
    Inputs in;
    in.q = q.tokens(), in.k = in.v = k.tokens();
    Outputs out;
    out.o = o.tokens();
    Plan one(c, problem, sharing), two(c, other, sharing);
    try {
      (r == 0 ? one : two).forward(in, out);
    } catch (const Error& error) {
      said[static_cast<std::size_t>(r)] = error.what();
    }
  });
  for (const std::string& sentence : said)
    EXPECT_NE(sentence.find("arrived damaged, or belongs to another call"), std::string::npos) << sentence;
}

// Another thread comes while a call asks for word of the others.
class Shared : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void start(std::span<const Message>) override {}
  std::vector<bool> test() override { return {}; }
  std::optional<std::string> notice() override {
    std::thread([&] {
      try {
        Line(alias, timeout).together([] {});
      } catch (const Error& error) {
        said = error.what();
      }
    }).join();
    return {};
  }
  void fail(const std::string&) noexcept override {}
  std::shared_ptr<Communicator> alias;
  std::string said;
};

TEST(Faults, ASecondThreadIsRefused) {
  Shared shared;
  shared.alias = {std::shared_ptr<void>(), &shared};
  Line line(shared.alias, timeout);
  line.together([&] { line.poll(); });
  EXPECT_EQ(shared.said, "communicator: is in use by another thread; it and its plans are used by one at a time");
  shared.said.clear();
  line.together([] {});  // the first one's calls go on
}

// A communicator of two ranks whose process is stopped, as a batch system suspends a whole job, while it asks for the
// first time. The other rank's answer comes after that.
class Suspended : public Communicator {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void start(std::span<const Message>) override {}
  std::vector<bool> test() override {
    if (asked++ == 0) std::this_thread::sleep_for(std::chrono::duration<double>(1.5));
    return {asked == 3};
  }
  std::optional<std::string> notice() override { return {}; }
  void fail(const std::string&) noexcept override {}
  int asked = 0;
};

TEST(Waiting, TimeInWhichTheProcessWasStoppedIsNotTheOthersFault) {
  const auto communicator = std::make_shared<Suspended>();
  Line line(communicator, 1.2);
  line.wait(line.start({{1, false, std::make_shared<Bytes>(8)}}));
  EXPECT_EQ(communicator->asked, 3);
}

}  // namespace
}  // namespace tessera::dist
