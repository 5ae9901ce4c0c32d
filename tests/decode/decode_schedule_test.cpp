// SPDX-License-Identifier: Apache-2.0
// The schedule kernel of `decode` on the emulated machine: the items that it writes against a model that counts leaf by
// leaf, over lengths, masks and numbers of multiprocessors; and that it writes all that the attention kernel reads. The
// same for the items that blocks find without a queue.
// Links tessera_cases; its include path puts tests/emulated before src.
#include <numeric>
#include <optional>

#include "tests/decode/decode_run.hpp"

#include "decode/kernel/schedule.cuh"

namespace tessera::decode {
alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];

namespace {

constexpr ScheduleConfig config{};

bool before(const Item& a, const Item& b) {
  return std::tie(a.b, a.tile, a.kv, a.node) < std::tie(b.b, b.tile, b.kv, b.node);
}

// A question of lengths and masks, with room for a schedule of it. Sequences of all lengths, some without tokens.
struct Question {
  std::vector<Int32> used_q, used_k, cu_seqlens_q;
  std::vector<Group> groups;
  std::vector<Item> items;
  std::vector<UInt32> counts;
  Queue queue{-1, -1, 77, 0};
  Params p{};

  // Packed: with so many queries that tiles are numbered by tokens, unless there is one for each sequence anyway.
  Question(std::mt19937& random, Int32 B, Int32 heads, Int32 group, Int32 rows, Int64 most_keys, bool packed = false) {
    const auto between = [&](Int64 least, Int64 most) { return least + Int64(random() % UInt64(most - least + 1)); };
    gpu::Question& x = p.call.x;
    x.B = B, x.Hk = heads, x.Hq = heads * group;
    const Int64 most_queries = between(1, packed ? 150 : greater(1, 64 / group));
    x.Nq = most_queries, x.Nk = most_keys;
    x.causal = random() % 2, x.alignment = Int32(random() % 2);
    x.window_left = random() % 3 == 0 ? between(0, most_keys / 2) : -1;
    x.window_right = random() % 4 == 0 ? between(0, 300) : -1;
    for (Int32 b = 0; b < B; ++b) {
      used_q.push_back(random() % 5 == 0 ? 0 : Int32(between(1, most_queries)));
      used_k.push_back(random() % 5 == 0 ? Int32(between(0, 1)) : Int32(between(1, most_keys)));
    }
    x.seqused_q = {used_q.data(), 1}, x.seqused_k = {used_k.data(), 1};
    if (packed) {
      cu_seqlens_q = {Int32(between(0, 5))};
      for (const Int32 queries : used_q) cu_seqlens_q.push_back(cu_seqlens_q.back() + queries);
      x.cu_seqlens_q = {cu_seqlens_q.data(), 1}, x.seqused_q = {}, x.Nq = cu_seqlens_q.back() + between(0, 9);
    }
    p.group = group, p.rows = rows, p.tiles = Int32(ceil_div(most_queries * group, rows));
    p.most = {most_queries, most_keys}, p.levels = levels_above(ceil_div(most_keys, leaf_keys)),
    p.taken_queries = Int32(most_queries);
    p.workers = Int32(between(1, 300));
    p.groups = {.count = B * p.tiles};
    const Int32 common = std::gcd(rows, group), queries = rows / common, tiles = group / common;
    if (const auto blocks = Int32(x.Nq / queries + B); packed && blocks * tiles < B * p.tiles)
      p.groups = {blocks * tiles, queries, tiles};
    const Int64 of_heads = Int64(p.groups.count) * heads, leaves = greater(1, ceil_div(most_keys, leaf_keys));
    p.memory.most_slots = Int32(lesser(of_heads * leaves, between(0, 400)));
    p.memory.most_items = Int32(of_heads + p.memory.most_slots), p.memory.climbs = 2;
    groups.resize(std::size_t(p.groups.count));
    items.resize(std::size_t(p.memory.most_items));
    std::memset(static_cast<void*>(items.data()), 0xff, items.size() * sizeof(Item));
    counts.assign(2 * std::size_t(p.memory.most_slots), 0xffffffffu);
    p.memory.queue = &queue, p.memory.groups = groups.data(), p.memory.items = items.data();
    p.memory.counts = counts.data();
  }

  void run() {
    emulated::Watch watch;
    watch.memory(&queue, sizeof(queue), "the queue");
    watch.memory(groups.data(), groups.size() * sizeof(Group), "the groups");
    watch.memory(items.data(), items.size() * sizeof(Item), "the items");
    watch.memory(counts.data(), counts.size() * sizeof(UInt32), "the counts");
    emulated::Machine& machine = emulated::Machine::here();
    machine.memory = memory;
    machine.run(1, config.threads, 0, [&] { schedule<config>(p); });
  }
};

// The level by the rule of the documents: the highest whose cost is within 3 % of the least, of those whose states have
// room; a merge of families costs as much as a leaf. `full`: how many of its items have all leaves.
int model_level(const Params& p, const std::vector<ModelGroup>& groups, std::size_t& full, bool queue = true) {
  int levels = 0;
  while (Int64(leaf_keys) << levels < p.most.keys) ++levels;
  Int64 total = 0, longest = 0;
  for (const ModelGroup& group : groups) {
    total += Int64(group.leaves.size()) * p.call.x.Hk;
    longest = std::max(longest, Int64(group.leaves.size()));
  }
  std::vector<double> costs;
  std::vector<std::size_t> fulls;
  for (int level = 0; level <= levels; ++level) {
    std::size_t complete = 0;
    for (const ModelGroup& group : groups) {
      std::map<Int32, int> below;
      for (const Int32 leaf : group.leaves) ++below[leaf >> level];
      for (const auto& [node, leaves] : below) complete += leaves == 1 << level ? std::size_t(p.call.x.Hk) : 0;
    }
    const std::vector<Item> items = model_items(p, groups, level);
    const Int64 slots = std::count_if(items.begin(), items.end(), [](const Item& item) { return item.slot >= 0; });
    const Int64 item = std::min<Int64>(1 << level, longest), count = Int64(items.size());
    const Int64 rounds = (count + p.workers - 1) / p.workers, share = (total + p.workers - 1) / p.workers;
    Int64 climbs = 0;  // of families of 16, until one node is left
    for (Int64 nodes = (longest + (1 << level) - 1) >> level; nodes > 1; nodes = (nodes + 15) / 16) ++climbs;
    const Int64 work = queue ? std::min(rounds * item, share + item) : rounds * item;
    costs.push_back(slots > p.memory.most_slots ? 1e18 : double(work + climbs));
    fulls.push_back(complete);
  }
  const double least = *std::min_element(costs.begin(), costs.end());
  int level = levels;
  while (level > 0 && costs[std::size_t(level)] > 1.03 * least + 1e-9) --level;
  full = fulls[std::size_t(level)];
  return level;
}

void expect_as_the_model(const Question& question) {
  const Params& p = question.p;
  const std::vector<ModelGroup> groups = model_groups(p);
  std::size_t full = 0;
  ASSERT_EQ(question.queue.level, model_level(p, groups, full));
  EXPECT_EQ(question.queue.taken, 0U);
  std::vector<Item> expected = model_items(p, groups, question.queue.level);
  ASSERT_EQ(question.queue.items, Int32(expected.size()));
  ASSERT_LE(question.queue.items, p.memory.most_items);
  std::vector<Item> items(question.items.begin(), question.items.begin() + question.queue.items);
  // Those with all leaves first.
  for (std::size_t n = 0; n < items.size(); ++n) {
    const PagedSequence of = sequence_of(p, items[n].b);
    const Nodes leaves = leaves_of(rows_of_tile(p, of.s, items[n].tile).keys);
    const bool whole = leaves_under(leaves, items[n].node, question.queue.level).count() == 1 << question.queue.level;
    EXPECT_EQ(whole, n < full) << n;
  }
  std::sort(items.begin(), items.end(), before), std::sort(expected.begin(), expected.end(), before);
  std::set<Int32> slots;
  for (std::size_t n = 0; n < items.size(); ++n) {
    const Item &item = items[n], &model = expected[n];
    ASSERT_TRUE(item.b == model.b && item.tile == model.tile && item.kv == model.kv && item.node == model.node);
    ASSERT_EQ(item.siblings, model.siblings);
    Group group;
    ASSERT_TRUE(look_at(p, item.b, item.tile, group));
    const Group& found = question.groups[std::size_t(item.group)];
    ASSERT_TRUE(found.b == item.b && found.tile == item.tile && found.q_begin == group.q_begin &&
                found.rows.keys.begin == group.rows.keys.begin && found.rows.keys.end == group.rows.keys.end &&
                found.mask.low == group.mask.low && found.mask.high == group.mask.high && found.shift == group.shift);
    ASSERT_EQ(item.slot < 0, model.slot < 0);
    if (item.slot < 0) continue;
    // Siblings share the first one's slot, and their own are nobody else's.
    EXPECT_TRUE(slots.insert(item.slot + item.node - item.siblings.first).second);
    EXPECT_LT(item.slot + item.siblings.count(), p.memory.most_slots + 1);
  }
  for (const UInt32 count : question.counts) ASSERT_EQ(count, 0U);
  for (std::size_t n = items.size(); n < question.items.size(); ++n) ASSERT_EQ(question.items[n].b, -1);
}

TEST(DecodeSchedule, WritesWhatTheModelCounts) {
  std::mt19937 random(21);
  std::map<int, int> levels;
  int rounds = 0, merged = 0, by_tokens = 0;
  for (const Int32 B : {1, 2, 5, 40})
    for (const Int32 heads : {1, 3})
      for (const Int32 group : {1, 4, 7})
        for (const Int64 most_keys : {1, 256, 700, 3000})
          for (int round = 0; round < (B < 40 ? 2 : 1); ++round) {
            Question question(random, B, heads, group, 8 << random() % 4, most_keys, rounds % 3 == 0);
            by_tokens += question.p.groups.block_queries > 0;
            SCOPED_TRACE(testing::Message() << "B " << B << " heads " << heads << " group " << group << " keys "
                                            << most_keys << " round " << round);
            question.run();
            expect_as_the_model(question);
            if (HasFailure()) return;
            ++rounds, ++levels[question.queue.level];
            for (Int32 n = 0; n < question.queue.items; ++n) merged += question.items[std::size_t(n)].slot >= 0;
          }
  EXPECT_EQ(rounds, (3 * 2 + 1) * 2 * 3 * 4);
  EXPECT_GE(levels.size(), 4U);  // else nothing was chosen
  EXPECT_GT(merged, 100);
  EXPECT_GT(by_tokens, 20);
}

// What a warp finds out about item `number`, if it exists.
std::optional<Work> found_work(const Params& p, UInt32 number, Int32 blocks) {
  static Work work;
  emulated::Machine& machine = emulated::Machine::here();
  machine.memory = memory;
  std::memset(static_cast<void*>(&work), 0xff, sizeof(work));
  work.number = number;
  emulated::Watch watch;
  machine.run(blocks, 32, 0, [&] {
    if (blockIdx.x == 0) find_work(p, work);
  });
  return work.exists ? std::optional(work) : std::nullopt;
}

TEST(DecodeSchedule, WithoutAQueueBlocksFindWhatTheModelCounts) {
  std::mt19937 random(23);
  std::map<int, int> levels;
  int several = 0, merged = 0;
  for (const Int32 B : {1, 3, 8})
    for (const Int32 heads : {1, 3})
      for (const Int32 group : {1, 4})
        for (const Int64 most_keys : {1, 700, 3000, 9000}) {
          Question question(random, B, heads, group, 64, most_keys);
          Params& p = question.p;
          ASSERT_LE(p.groups.count, most_direct_groups);
          p.workers = 1 + Int32(random() % 40);
          SCOPED_TRACE(testing::Message() << "B " << B << " heads " << heads << " group " << group << " keys "
                                          << most_keys << " blocks " << p.workers);
          const std::vector<ModelGroup> groups = model_groups(p);
          std::size_t full = 0;
          const int level = model_level(p, groups, full, false);
          std::vector<Item> expected = model_items(p, groups, level), items;
          for (UInt32 number = 0; const auto work = found_work(p, number, p.workers); ++number) {
            ASSERT_LT(number, expected.size());
            ASSERT_EQ(work->level, level);
            const Item& item = work->item;
            items.push_back(item);
            const PagedSequence of = sequence_of(p, item.b);
            const RowTile rows = rows_of_tile(p, of.s, item.tile);
            const Nodes leaves = leaves_under(leaves_of(rows.keys), item.node, level);
            EXPECT_EQ(work->leaves, leaves);
            EXPECT_EQ(work->begin, std::max<Int64>(rows.keys.begin, Int64(leaves.first) * leaf_keys));
            EXPECT_EQ(work->end, std::min<Int64>(rows.keys.end, Int64(leaves.end) * leaf_keys));
            EXPECT_TRUE(work->group.b == item.b && work->group.tile == item.tile);
            EXPECT_LE(item.slot + item.siblings.count(), std::max(p.memory.most_slots, item.siblings.count() - 1));
          }
          ASSERT_EQ(items.size(), expected.size());
          std::sort(items.begin(), items.end(), before), std::sort(expected.begin(), expected.end(), before);
          for (std::size_t n = 0; n < items.size(); ++n) {
            const Item &item = items[n], &model = expected[n];
            ASSERT_TRUE(item.b == model.b && item.tile == model.tile && item.kv == model.kv && item.node == model.node);
            ASSERT_EQ(item.siblings, model.siblings);
            ASSERT_EQ(item.slot, model.slot);
            merged += item.slot >= 0;
          }
          several += groups.size() > 1, ++levels[level];
        }
  EXPECT_GE(levels.size(), 4U);
  EXPECT_GT(several, 20);
  EXPECT_GT(merged, 100);
}

TEST(DecodeSchedule, WithoutAQueueItClearsCounts) {
  std::mt19937 random(24);
  Question question(random, 3, 2, 4, 8, 3000);
  question.p.memory.most_slots = 40, question.p.memory.queue = nullptr;
  question.p.memory.groups = nullptr, question.p.memory.items = nullptr;
  question.counts.assign(2 * 40 + 3, 7);
  question.p.memory.counts = question.counts.data();
  question.run();
  for (std::size_t n = 0; n < question.counts.size(); ++n) EXPECT_EQ(question.counts[n], n < 80 ? 0U : 7U);
}

// A few sequences of a call: cut as finely as leaves; many: each one item.
TEST(DecodeSchedule, CutsFewSequencesAndLeavesManyWhole) {
  std::mt19937 random(22);
  const auto level = [&](Int32 B, Int64 keys) {
    Question question(random, B, 8, 4, 8, keys);
    for (Int32 b = 0; b < B; ++b) question.used_q[std::size_t(b)] = 1, question.used_k[std::size_t(b)] = Int32(keys);
    gpu::Question& x = question.p.call.x;
    x.causal = 0, x.window_left = x.window_right = -1;
    question.p.workers = 132, question.p.memory.most_slots = 2000;
    question.items.resize(std::size_t(question.p.memory.most_items = B * 8 * question.p.tiles + 2000));
    question.counts.resize(4000);
    question.p.memory.items = question.items.data(), question.p.memory.counts = question.counts.data();
    question.run();
    return question.queue.level;
  };
  EXPECT_EQ(level(1, 8192), 1);  // 32 leaves of 8 heads, two for each of 128 workers
  EXPECT_EQ(level(1, 1024), 0);
  EXPECT_EQ(level(132, 8192), 5);  // a head of a sequence for each, eight times
}

}  // namespace
}  // namespace tessera::decode
