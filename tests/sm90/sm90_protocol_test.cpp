// SPDX-License-Identifier: Apache-2.0
// The barrier protocol of the Hopper forward kernel (sm90/kernel/forward.cuh) without a GPU: scheduler, loader and
// consumers as state machines that go on in random order, over tiles of queries as the planner and the mask cut them.
// Links tessera_static.
#include <set>

#include "api/units.hpp"
#include "math/mask.hpp"
#include "sm90/config.hpp"
#include "sm90/tiles.hpp"
#include "tests/sm90/protocol_model.hpp"

namespace tessera::sm90 {
namespace {

using test::Program, test::Ring, test::Slot;

// What the protocol depends on.
struct Rings {
  int warpgroups, keys, stages, q_stages;
  bool overlaps = true;  // the next queries' first S with these queries' last PV; not with options
  bool paged = false;    // one loads Q and K, another one V
  auto operator<=>(const Rings&) const = default;
  int loaders() const { return loaders_of(Config{.paged = paged}); }
  // Tiles of keys that one warpgroup may pass over at either end of its own.
  int passed() const { return most_passed(Config{.warpgroups = warpgroups, .stages = stages}); }
};

// A tile of queries: so many tiles of keys, and those of them that each warpgroup sees.
struct ModelWork {
  struct Own {
    int begin, end;
    bool empty() const { return begin >= end; }
  };
  int tiles;
  std::vector<Own> own;
};

ModelWork seen_by_all(const Rings& rings, int tiles) {
  return {tiles, std::vector<ModelWork::Own>(std::size_t(rings.warpgroups), {0, tiles})};
}

// As the mask cuts it: `mask` counts queries from the tile's first one, of which mask.rows are left. A warpgroup passes
// over at most `most` of the others' tiles at either end, and takes the rest for its own.
ModelWork cut_by(const Rings& rings, const BandMask& mask, int most) {
  const auto tiles_of = [&](Int64 begin, Int64 end) {
    const Range seen = visible_keys(mask, {begin, lesser(end, mask.rows)});
    return seen.empty() ? Range{} : Range{seen.begin / rings.keys, ceil_div(seen.end, rings.keys)};
  };
  const Range all = tiles_of(0, 64 * rings.warpgroups);
  const int tiles = int(all.size());
  ModelWork work{tiles, {}};
  for (int w = 0; w < rings.warpgroups; ++w) {
    const Range own = tiles_of(64 * w, 64 * w + 64);
    work.own.push_back({0, 0});
    if (!own.empty())
      work.own.back() = {int(lesser(own.begin - all.begin, most)), int(greater(own.end - all.begin, tiles - most))};
  }
  return work;
}

struct Model : test::ProtocolModel {
  Rings rings;
  std::vector<ModelWork> works;
  std::vector<Slot> q, k, v, work;

  Model(const Rings& rings, std::vector<ModelWork> works) :
      rings(rings), works(std::move(works)), q(std::size_t(rings.warpgroups * rings.q_stages)),
      k(std::size_t(rings.stages)), v(std::size_t(rings.stages)), work(work_slots) {
    this->works.push_back(seen_by_all(rings, 0));  // after the last there is one that says so
    for (Slot& s : q) s.full.count = 1, s.empty.count = 1;
    for (auto* ring : {&k, &v})
      for (Slot& s : *ring) s.full.count = 1, s.empty.count = rings.warpgroups;
    for (Slot& s : work)
      s.full.count = 1, s.empty.count = rings.loaders() + rings.warpgroups;  // a warpgroup's threads as one
  }

  Program scheduler() {
    Program program;
    for (Ring slots{work}; slots.use < int(works.size()); ++slots.use)
      program.push_back(fill(slots.slot(), slots.round(), slots.use, false));
    return program;
  }

  // Tile j of the keys of work `number`.
  static int name_of(int number, int j) { return 1000 * number + j; }

  // Keys in pages, in the words of paged_loader.cuh.
  Program key_loader() {
    Program program;
    Ring qs{q, 0, rings.warpgroups}, ks{k}, slots{work};
    for (; slots.use < int(works.size()); ++slots.use) {
      const int number = slots.use;
      const auto load_q = [&] {
        for (int w = 0; w < rings.warpgroups; ++w) program.push_back(fill(qs.slot(w), qs.round(), number));
        ++qs.use;
      };
      program.push_back(take(slots.slot(), slots.round(), number));
      for (int j = 0; j < works[std::size_t(number)].tiles; ++j) {
        if (j == 0 && rings.q_stages > 1) load_q();
        program.push_back(fill(ks.slot(), ks.round(), name_of(number, j))), ++ks.use;
        if (j == 0 && rings.q_stages == 1) load_q();
      }
      program.push_back(give(slots.slot()));
    }
    return program;
  }
  Program value_loader() {
    Program program;
    Ring vs{v}, slots{work};
    for (; slots.use < int(works.size()); ++slots.use) {
      const int number = slots.use;
      program.push_back(take(slots.slot(), slots.round(), number));
      for (int j = 0; j < works[std::size_t(number)].tiles; ++j)
        program.push_back(fill(vs.slot(), vs.round(), name_of(number, j))), ++vs.use;
      program.push_back(give(slots.slot()));
    }
    return program;
  }

  Program loader() {
    Program program;
    Ring qs{q, 0, rings.warpgroups}, ks{k}, vs{v}, slots{work};
    int owed = -1;
    const auto load_owed = [&] {
      if (owed >= 0) program.push_back(fill(vs.slot(), vs.round(), owed)), ++vs.use;
      owed = -1;
    };
    for (; slots.use < int(works.size()); ++slots.use) {
      const int number = slots.use, tiles = works[std::size_t(number)].tiles;
      const auto load_q = [&] {
        for (int w = 0; w < rings.warpgroups; ++w) program.push_back(fill(qs.slot(w), qs.round(), number));
        ++qs.use;
      };
      program.push_back(take(slots.slot(), slots.round(), number));
      for (int j = 0; j < tiles; ++j) {
        if (j == 0 && rings.q_stages > 1) load_q();
        program.push_back(fill(ks.slot(), ks.round(), name_of(number, j))), ++ks.use;
        load_owed();
        owed = name_of(number, j);
        if (j == 0 && rings.q_stages == 1) load_q();
      }
      if (tiles == 0) load_owed();
      program.push_back(give(slots.slot()));
    }
    return program;
  }

  // A warpgroup's program, in the words of forward.cuh.
  struct Consumer {
    Model& m;
    const int w;
    Program program{};
    Ring qs{m.q, 0, m.rings.warpgroups}, ks{m.k}, vs{m.v}, slots{m.work};
    int k_work = 0, k_tile = 0, v_work = 0, v_tile = 0;  // what the rings' next tiles are

    const ModelWork& at(int number) const { return m.works[std::size_t(number)]; }
    const ModelWork::Own& own(int number) const { return at(number).own[std::size_t(w)]; }

    // The next tile of a ring, waited for; and given back, after which the next one is the next.
    void take_next(Ring& ring, int number, int tile) {
      program.push_back(take(ring.slot(), ring.round(), name_of(number, tile)));
    }
    void give_next(Ring& ring, int& number, int& tile) {
      program.push_back(give(ring.slot())), ++ring.use;
      for (++tile; number < int(m.works.size()) && tile >= at(number).tiles; ++number) tile = 0;
    }
    void take_K() { take_next(ks, k_work, k_tile); }
    void take_V() { take_next(vs, v_work, v_tile); }
    void release_K() { give_next(ks, k_work, k_tile); }
    void release_V() { give_next(vs, v_work, v_tile); }
    void pass_K(int count) {
      for (; count > 0; --count) take_K(), release_K();
    }
    void pass_V(int count) {
      for (; count > 0; --count) take_V(), release_V();
    }
    void take_Q(int number) { program.push_back(take(qs.slot(w), qs.round(), number)); }
    void release_Q() { program.push_back(give(qs.slot(w))), ++qs.use; }
    int next_work() {
      program.push_back(take(slots.slot(), slots.round(), slots.use));
      return slots.use++;
    }
    void release_work(int number) { program.push_back(give(m.work[std::size_t(number % work_slots)])); }

    // Once S has been collected, what it was made of is released.
    void after_S(int number, int tile) {
      release_K();
      if (m.rings.q_stages == 1 && tile + 1 == own(number).end) release_Q();
    }

    int attend(int number) {
      take_Q(number);
      pass_K(own(number).begin);
      take_K();
      after_S(number, own(number).begin);
      pass_V(own(number).begin);
      while (!own(number).empty()) {
        const int next = next_work();
        for (int n = own(number).begin + 1; n < own(number).end; ++n) {
          take_K(), take_V();
          after_S(number, n);
          release_V();
        }
        if (m.rings.q_stages > 1) release_Q();
        int passed = at(number).tiles - own(number).end;
        pass_K(passed);
        if (m.rings.overlaps && !own(next).empty()) {
          take_Q(next);
          pass_K(own(next).begin);
          passed += own(next).begin;
          take_K(), take_V();
          after_S(next, own(next).begin);
          release_V();
        } else {
          take_V(), release_V();
        }
        pass_V(passed);
        release_work(number);
        number = next;
        if (!m.rings.overlaps) break;
      }
      return number;
    }

    void pass_over(int number) {
      if (at(number).tiles == 0) return;
      take_Q(number), release_Q();
      for (int n = 0; n < at(number).tiles; ++n) pass_K(1), pass_V(n > 0);
      pass_V(1);
    }

    void consume() {
      const int last = int(m.works.size()) - 1;
      while (k_work < last && at(k_work).tiles == 0) ++k_work;
      v_work = k_work;
      for (int number = next_work(); number < last;) {
        if (!own(number).empty()) {
          number = attend(number);
        } else {
          pass_over(number);
          release_work(number);
          number = next_work();
        }
      }
    }
  };

  bool run(std::mt19937& random) {
    std::vector<Program> roles{scheduler()};
    roles.push_back(rings.paged ? key_loader() : loader());
    if (rings.paged) roles.push_back(value_loader());
    for (int w = 0; w < rings.warpgroups; ++w) {
      Consumer consumer{*this, w};
      consumer.consume();
      roles.push_back(std::move(consumer.program));
    }
    return ProtocolModel::run(roles, random);
  }
};

// --- what there is to run

// The rings of every tile that the planner gives: all head dims and types, with none to several options.
std::set<Rings> planned_rings() {
  std::set<Rings> all;
  for (const api::HeadDims dims : {api::HeadDims{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}})
    for (const Type type : {Type::f16, Type::bf16})
      for (int options = 0; options < 4; ++options) {
        Problem p = api::plain_problem(Pass::forward, type, dims);
        if (options > 0) p.options.softcap = 5;
        if (options > 1) p.slopes = 1;
        if (options > 2) p.options.dropout = 0.5;
        const Config c = forward_tile(p).value();
        for (const bool paged : {false, true})
          all.insert({c.warpgroups, c.block_keys, c.stages, c.q_stages, !c.general, paged});
      }
  return all;
}

testing::Message named(const Rings& r) {
  return testing::Message() << r.warpgroups << " warpgroups, " << r.keys << " keys, " << r.stages << " stages, "
                            << r.q_stages << " of Q" << (r.overlaps ? ", overlapping" : "")
                            << (r.paged ? ", paged" : "");
}

// Full, causal and windowed tiles of long and short sequences, and tiles in which some warpgroups see nothing.
BandMask random_mask(std::mt19937& random, const Rings& rings) {
  const auto between = [&](Int64 low, Int64 high) { return low + Int64(random() % std::uint64_t(high - low + 1)); };
  const Int64 rows = 64 * rings.warpgroups;
  BandMask mask{.keys = between(1, 6 * rings.keys), .rows = random() % 3 ? rows : between(1, rows)};
  if (random() % 4) mask.high = between(-rows, 6 * rings.keys);
  if (random() % 2) mask.low = between(-rows, lesser(mask.high, 5 * rings.keys));
  return mask;
}

// Causal queries that follow one another, the last ones first. The first warpgroup's keys end with a tile, so that it
// passes over as many of the others' as there can be.
std::vector<ModelWork> causal(const Rings& rings, int count, int most) {
  std::vector<ModelWork> works;
  const int rows = 64 * rings.warpgroups;
  for (int n = count - 1; n >= 0; --n) {
    const Int64 high = round_up(n * rows + 64, rings.keys) - 64;
    works.push_back(cut_by(rings, {.high = high, .keys = (count + 2) * rows, .rows = rows}, most));
  }
  return works;
}

TEST(Protocol, ComesToItsEndForAnyNumberOfTiles) {
  std::mt19937 random(7);
  const std::vector<std::vector<int>> counts{{1},
                                             {2},
                                             {3},
                                             {0},
                                             {0, 1, 0},
                                             {5, 0, 2, 1},
                                             {1, 1, 1},
                                             {17, 16, 3},
                                             {0, 0, 0, 0, 0, 0},
                                             {1, 0, 0, 0, 0, 0, 2},
                                             {1, 1, 1, 1, 1, 1, 1}};
  for (const Rings& rings : planned_rings())
    for (const std::vector<int>& tiles : counts) {
      std::vector<ModelWork> works;
      for (const int n : tiles) works.push_back(seen_by_all(rings, n));
      for (int round = 0; round < 20; ++round) ASSERT_TRUE(Model(rings, works).run(random)) << named(rings);
    }
}

TEST(Protocol, ComesToItsEndWhereWarpgroupsSeeDifferentTiles) {
  std::mt19937 random(8);
  int passed_first = 0, passed_last = 0, blind = 0;
  for (const Rings& rings : planned_rings()) {
    const int most = rings.passed();
    for (int round = 0; round < 300; ++round) {
      std::vector<ModelWork> works;
      for (int n = 1 + int(random() % 6); n > 0; --n) works.push_back(cut_by(rings, random_mask(random, rings), most));
      for (const ModelWork& work : works)
        for (const ModelWork::Own& own : work.own) {
          blind += work.tiles > 0 && own.empty();
          passed_first += !own.empty() && own.begin > 0, passed_last += !own.empty() && own.end < work.tiles;
        }
      ASSERT_TRUE(Model(rings, works).run(random)) << named(rings);
    }
    ASSERT_TRUE(Model(rings, causal(rings, 6, most)).run(random)) << named(rings);
  }
  for (const int met : {passed_first, passed_last, blind}) EXPECT_GT(met, 100);
}

// --- that the model notices

TEST(Protocol, TheModelNoticesAMissingArrival) {
  std::mt19937 random(7);
  const Rings rings{.warpgroups = 2, .keys = 128, .stages = 2, .q_stages = 1};
  Model model(rings, {seen_by_all(rings, 9)});
  model.k[0].empty.count = 3;  // as if one warpgroup never gave K back
  EXPECT_FALSE(model.run(random));
}

// Passing over one tile more than most_passed() allows: its V finds no room behind that of the last P, which waits for
// the next Q. (With three warpgroups the rule leaves room for the middle one, which may pass over some at either end.)
TEST(Protocol, TheModelNoticesMorePassedOverThanTheRingHolds) {
  std::mt19937 random(7);
  for (const auto& [keys, stages] : {std::pair{32, 2}, {48, 2}, {64, 1}, {128, 1}}) {
    const Rings rings{.warpgroups = 2, .keys = keys, .stages = stages, .q_stages = 1};
    EXPECT_TRUE(Model(rings, causal(rings, 6, rings.passed())).run(random)) << named(rings);
    EXPECT_FALSE(Model(rings, causal(rings, 6, rings.passed() + 1)).run(random)) << named(rings);
  }
}

}  // namespace
}  // namespace tessera::sm90
