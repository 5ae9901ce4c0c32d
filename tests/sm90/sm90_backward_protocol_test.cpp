// SPDX-License-Identifier: Apache-2.0
// The barrier protocol of the Hopper backward kernels (sm90/kernel/backward.cuh) without a GPU: loader and warpgroups
// as state machines that go on in random order, over tiles of columns of which each 64 rows see some. Links
// tessera_static.
#include <algorithm>

#include "api/units.hpp"
#include "sm90/tiles.hpp"
#include "tests/sm90/protocol_model.hpp"

namespace tessera::sm90 {
namespace {

using test::Program, test::Ring, test::Slot;

// What a block works on: so many tiles of columns, those of them that each 64 rows see, and so many heads.
struct ModelWork {
  struct Own {
    int begin, end;
  };
  int tiles, heads;
  std::vector<Own> own;
};

struct Model : test::ProtocolModel {
  const BackwardConfig c;
  const ModelWork work;
  std::vector<Slot> qk, vo, P;

  Model(const BackwardConfig& c, ModelWork w) :
      c(c), work(std::move(w)), qk(std::size_t(c.stages)), vo(std::size_t(c.vo_stages)), P(std::size_t(slots_of_P(c))) {
    for (auto* ring : {&qk, &vo})
      for (Slot& s : *ring) s.full.count = 1, s.empty.count = c.warpgroups;
    for (Slot& s : P) s.full.count = s.empty.count = 1;
  }

  static int name_of(int head, int tile) { return 1000 * head + tile; }

  Program loader() {
    Program program;
    Ring qks{qk}, vos{vo};
    for (int head = 0; head < work.heads; ++head)
      for (int tile = 0; tile < work.tiles; ++tile, ++qks.use, ++vos.use) {
        program.push_back(fill(qks.slot(), qks.round(), name_of(head, tile)));
        program.push_back(fill(vos.slot(), vos.round(), name_of(head, tile)));
      }
    return program;
  }

  // A warpgroup's program, in the words of backward.cuh.
  struct Consumer {
    Model& m;
    const int w;
    const bool computes_S = !m.c.paired || w == 0;
    const bool wants_dQK = m.c.dQK != Element::none && (!m.c.paired || w == 1);
    const bool wants_dV = m.c.dV != Element::none && (!m.c.paired || w == 0);
    Program program{};
    Ring qks{m.qk}, vos{m.vo}, slots{m.P};
    Slot *before_qk = nullptr, *before_vo = nullptr;

    void take(Ring& ring, int name) { program.push_back(ProtocolModel::take(ring.slot(), ring.round(), name)); }
    void give(Slot& slot) { program.push_back(ProtocolModel::give(slot)); }

    void release_summed() {
      if (wants_dQK && before_qk) give(*before_qk);
      if (wants_dV && before_vo) give(*before_vo);
    }

    void sum_tile(int name) {
      take(qks, name);
      if (wants_dQK) take(vos, name);
      if (computes_S) {
        if (!m.c.drains) release_summed();
        if (m.c.paired) program.push_back(m.fill(slots.slot(), slots.round(), name, false)), ++slots.use;
        if (wants_dV && !wants_dQK) take(vos, name);
      } else {
        take(slots, name), give(slots.slot()), ++slots.use;
      }
      if (wants_dQK && !computes_S) release_summed();
      if (!wants_dV) give(vos.slot());
      if (!wants_dQK) give(qks.slot());
      before_qk = &qks.slot(), before_vo = &vos.slot();
      if (m.c.drains) release_summed();
      ++qks.use, ++vos.use;
    }

    void pass(int head, int first, int end) {
      for (int tile = first; tile < end; ++tile, ++qks.use, ++vos.use) {
        take(qks, name_of(head, tile)), take(vos, name_of(head, tile));
        give(qks.slot()), give(vos.slot());
      }
    }

    void sum() {
      const auto [begin, end] = m.work.own[std::size_t(m.c.paired ? 0 : w)];
      for (int head = 0; head < m.work.heads; ++head) {
        pass(head, 0, begin);
        for (int tile = begin; tile < end; ++tile) sum_tile(name_of(head, tile));
        pass(head, end, m.work.tiles);
      }
    }
  };

  bool run(std::mt19937& random) {
    std::vector<Program> roles{loader()};
    for (int w = 0; w < c.warpgroups; ++w) {
      Consumer consumer{*this, w};
      consumer.sum();
      roles.push_back(std::move(consumer.program));
    }
    return ProtocolModel::run(roles, random);
  }
};

// --- what there is to run

// Every tile that the planner gives: all head dims, without and with options, for all gradients or one of keys.
std::vector<BackwardConfig> planned_tiles() {
  std::vector<BackwardConfig> all;
  for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}})
    for (const bool options : {false, true})
      for (const int missing : {0, 1, 2})
        for (const Side side : {Side::queries, Side::keys}) {
          Problem p = api::plain_problem(Pass::backward, Type::bf16, dims);
          if (options) p.options.softcap = 5;
          if (missing == 1) p.dk.reset();
          if (missing == 2) p.dv.reset();
          all.push_back(backward_tile(p, side).value());
        }
  return all;
}

testing::Message named(const BackwardConfig& c) {
  return testing::Message() << (owns_queries(c) ? "queries" : "keys") << ", D=" << c.D << "/" << c.Dv << ", "
                            << c.warpgroups << (c.paired ? " paired" : "") << " warpgroups, " << c.stages << " and "
                            << c.vo_stages << " stages" << (c.drains ? ", drains" : "");
}

// Each 64 rows see any tiles, or none, of which they pass over `most` at either end and take the rest for their own, as
// BackwardWork::find has it. There are as many tiles as all of them see together.
ModelWork random_work(const BackwardConfig& c, int most, std::mt19937& random) {
  const auto up_to = [&](int n) { return int(random() % unsigned(n + 1)); };
  std::vector<ModelWork::Own> seen;
  int first = 1000, last = 0;
  for (int g = 0; g < row_tiles(c); ++g) {
    const int begin = up_to(8), end = begin + up_to(8);
    seen.push_back({begin, end});
    if (begin < end) first = std::min(first, begin), last = std::max(last, end);
  }
  ModelWork work{std::max(last - first, 0), owns_queries(c) ? 1 : 1 + up_to(3), {}};
  for (const auto& [begin, end] : seen)
    work.own.push_back(begin >= end
                           ? ModelWork::Own{0, 0}
                           : ModelWork::Own{std::min(begin - first, most), std::max(end - first, work.tiles - most)});
  return work;
}

TEST(BackwardProtocol, ComesToItsEndForAnyNumberOfTiles) {
  std::mt19937 random(7);
  for (const BackwardConfig& c : planned_tiles())
    for (const int tiles : {0, 1, 2, 3, 4, 5, 17})
      for (const int heads : {1, 3}) {
        const ModelWork work{tiles, heads, std::vector<ModelWork::Own>(std::size_t(row_tiles(c)), {0, tiles})};
        for (int round = 0; round < 10; ++round) ASSERT_TRUE(Model(c, work).run(random)) << named(c);
      }
}

TEST(BackwardProtocol, ComesToItsEndWhereWarpgroupsSeeDifferentTiles) {
  std::mt19937 random(8);
  int passed_first = 0, passed_last = 0, blind = 0;
  for (const BackwardConfig& c : planned_tiles())
    for (int round = 0; round < 100; ++round) {
      const ModelWork work = random_work(c, most_passed(c), random);
      for (const auto& [begin, end] : work.own) {
        blind += begin == end && work.tiles > 0;
        passed_first += begin < end && begin > 0, passed_last += begin < end && end < work.tiles;
      }
      ASSERT_TRUE(Model(c, work).run(random)) << named(c);
    }
  for (const int met : {passed_first, passed_last, blind}) EXPECT_GT(met, 100);
}

// --- that the model notices

TEST(BackwardProtocol, TheModelNoticesAMissingArrival) {
  std::mt19937 random(7);
  for (const BackwardConfig& c : planned_tiles()) {
    const ModelWork work{9, 1, std::vector<ModelWork::Own>(std::size_t(row_tiles(c)), {0, 9})};
    Model no_qk(c, work), no_vo(c, work), no_P(c, work);
    no_qk.qk[0].empty.count += 1, no_vo.vo[0].empty.count += 1;
    EXPECT_FALSE(no_qk.run(random)) << named(c);
    EXPECT_FALSE(no_vo.run(random)) << named(c);
    if (!c.paired) continue;
    no_P.P[0].empty.count += 1;
    EXPECT_FALSE(no_P.run(random)) << named(c);
  }
}

// Passing over one tile more than most_passed() allows: it finds no room behind what the last sums keep.
TEST(BackwardProtocol, TheModelNoticesMorePassedOverThanTheRingHolds) {
  std::mt19937 random(7);
  for (const Side side : {Side::queries, Side::keys}) {
    BackwardConfig c{.side = side, .dQK = Element::bf16, .dV = side == Side::keys ? Element::bf16 : Element::none};
    c.stages = c.vo_stages = 3;
    int stuck = 0;
    for (int round = 0; round < 300; ++round)
      stuck += !Model(c, random_work(c, most_passed(c) + 1, random)).run(random);
    EXPECT_GT(stuck, 0) << named(c);
  }
}

}  // namespace
}  // namespace tessera::sm90
