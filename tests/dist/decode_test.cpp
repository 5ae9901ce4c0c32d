// SPDX-License-Identifier: Apache-2.0
// Decoding over 1, 2, 3, 4, 8 and 11 ranks, as threads: caches dealt in blocks, also in pages, ranks without keys,
// against float64 and bit by bit. Implements docs/scale_out.md, "Decoding".
#include "dist/decode.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "tests/dist/world.hpp"

namespace tessera::dist {
namespace {

struct Case {
  const char* name;
  std::vector<Int64> lengths;
  Int64 Nq, Hq, Hk, D, Dv;
  Type type;
  Options options{};
  bool sinks = false, slopes = false;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"one token, f32", {700, 1, 129, 0, 1300}, 1, 4, 2, 32, 32, Type::f32},
      {"one token, bf16, GQA 8", {900, 65, 64}, 1, 8, 1, 64, 48, Type::bf16},
      {"drafts, causal, f16", {400, 5, 3, 257}, 5, 4, 4, 16, 16, Type::f16, {.causal = true}},
      {"sinks", {300, 0, 7}, 1, 4, 2, 32, 32, Type::f32, {}, true},
      {"window, sinks, drafts", {640, 90}, 3, 6, 2, 32, 32, Type::f32, {.causal = true, .window_left = 100}, true},
      {"ALiBi and softcap", {515}, 1, 4, 2, 32, 32, Type::bf16, {.softcap = 8, .causal = true}, false, true},
  };
  return all;
}

constexpr Dealing dealing{.block = 64, .groups = 8};

// The whole problem, and what ranks make of it.
struct Scene {
  const Case& c;
  Int64 B, longest = 0;
  Numbers q, k, v;  // caches [B * longest rows]
  std::vector<float> sinks, slopes;

  explicit Scene(const Case& c, unsigned seed = 3) : c(c), B(Int64(c.lengths.size())) {
    for (const Int64 n : c.lengths) longest = greater(longest, n);
    std::mt19937 engine(seed);
    std::normal_distribution<double> normal;
    const auto fill = [&](Numbers& x, Int64 rows, Int64 heads, Int64 width) {
      x = Numbers(c.type, rows, heads, width);
      for (Int64 i = 0; i < x.count(); ++i) x.set(i, normal(engine));
    };
    fill(q, B * c.Nq, c.Hq, c.D), fill(k, B * longest, c.Hk, c.D), fill(v, B * longest, c.Hk, c.Dv);
    for (Int64 h = 0; h < c.Hq; ++h) sinks.push_back(float(normal(engine))), slopes.push_back(std::exp2(-float(h) - 2));
  }

  struct Result {
    Numbers o, lse;
    Result(const Scene& s, Type type, Type wide) :
        o(type, s.B * s.c.Nq, s.c.Hq, s.c.Dv), lse(wide, s.B * s.c.Hq, s.c.Nq, 1) {
      for (Numbers* x : {&o, &lse})
        for (Int64 i = 0; i < x->count(); ++i) x->set(i, -77);
    }
    Outputs views(const Scene& s) const {
      Outputs out;
      out.o = four(o, s.c.Nq);
      out.lse = Tensor(lse.rows.view.data, lse.rows.view.type, {s.B, s.c.Hq, s.c.Nq});
      return out;
    }
  };

  static Tensor four(const Numbers& x, Int64 rows) {
    const RowView& view = x.rows.view;
    return Tensor(view.data, view.type, {rows == 0 ? 0 : view.rows / rows, rows, view.heads, view.width});
  }

  void extras(Inputs& in) const {
    if (c.sinks) in.sinks = Tensor(const_cast<float*>(sinks.data()), Type::f32, {c.Hq});
    if (c.slopes) in.slopes = Tensor(const_cast<float*>(slopes.data()), Type::f32, {c.Hq});
  }

  // One call over whole caches.
  Result whole(bool reference) const {
    const Type type = reference ? Type::f64 : c.type;
    const auto as = [&](const Numbers& x) {
      Numbers y(type, x.rows.view.rows, x.rows.view.heads, x.rows.view.width);
      for (Int64 i = 0; i < x.count(); ++i) y.set(i, x.get(i));
      return y;
    };
    const Numbers Q = as(q), K = as(k), V = as(v);
    std::vector<std::int32_t> used(c.lengths.begin(), c.lengths.end());
    Inputs in;
    in.q = four(Q, c.Nq), in.k = four(K, longest), in.v = four(V, longest);
    in.seqused_k = Tensor(used.data(), Type::i32, {B});
    extras(in);
    std::vector<double> wide_sinks(sinks.begin(), sinks.end());
    if (c.sinks && reference) in.sinks = Tensor(wide_sinks.data(), Type::f64, {c.Hq});
    Result result(*this, reference ? Type::f64 : c.type, reference ? Type::f64 : Type::f32);
    tessera::forward(in, result.views(*this), c.options, {.threads = 1, .kernel = reference ? "reference" : nullptr});
    return result;
  }

  DecodeProblem problem() const { return {c.Hq, c.Hk, c.D, c.Dv, c.type, c.options, dealing}; }

  // One rank's part, with NaN wherever its cache holds no key. page: rows of a page; 0: one piece for each sequence.
  Result rank(std::shared_ptr<Communicator> communicator, Int64 page) const {
    const int r = communicator->rank(), ranks = communicator->size();
    Int64 rows = 0;
    for (const Int64 n : c.lengths) rows = greater(rows, dealing.rows(n, r, ranks));
    const Int64 entries = page == 0 ? 0 : rows / page, pages = B * entries;
    std::vector<std::int32_t> table;  // pages lie in reverse
    for (Int64 i = 0; i < pages; ++i) table.push_back(static_cast<std::int32_t>(pages - 1 - i));
    Numbers K(c.type, B * rows, c.Hk, c.D), V(c.type, B * rows, c.Hk, c.Dv);
    for (Numbers* x : {&K, &V})
      for (Int64 i = 0; i < x->count(); ++i) x->set(i, std::nan(""));
    for (Int64 b = 0; b < B; ++b)
      for (Int64 j = 0; j < c.lengths[static_cast<std::size_t>(b)]; ++j) {
        const Dealing::Place place = dealing.place(j, ranks);
        if (place.rank != r) continue;
        Int64 row = b * rows + place.row;
        if (page > 0) row = table[static_cast<std::size_t>(b * entries + place.row / page)] * page + place.row % page;
        for (const auto& [to, from] : {std::pair(&K, &k), {&V, &v}})
          std::memcpy(to->rows.view.at(row, 0), from->rows.view.at(b * longest + j, 0),
                      static_cast<std::size_t>(to->rows.view.row_stride * element_bytes(c.type)));
      }
    Inputs in;
    in.q = four(q, c.Nq);
    const auto cache = [&](const Numbers& x) {
      return page > 0 ? Tensor(x.rows.view.data, c.type, {pages, page, c.Hk, x.rows.view.width})
                      : Tensor(x.rows.view.data, c.type, {B, rows, c.Hk, x.rows.view.width});
    };
    in.k = cache(K), in.v = cache(V);
    if (page > 0) in.block_table = Tensor(table.data(), Type::i32, {B, entries});
    extras(in);
    Result result(*this, c.type, Type::f32);
    Decoder decoder(communicator, problem(), 60, 1);
    for (int call = 0; call < 2; ++call) decoder.forward(in, c.lengths, result.views(*this));
    return result;
  }

  std::vector<Result> ranks(int count, Int64 page = 0) const {
    std::vector<Result> results;
    for (int r = 0; r < count; ++r) results.emplace_back(*this, c.type, Type::f32);
    std::vector<std::string> faults(results.size());
    run_ranks(count, [&](int r, std::shared_ptr<Communicator> communicator) {
      try {
        results[static_cast<std::size_t>(r)] = rank(std::move(communicator), page);
      } catch (const std::exception& error) {
        faults[static_cast<std::size_t>(r)] = error.what();
      }
    });
    for (const std::string& fault : faults) EXPECT_EQ(fault, "") << c.name;
    return results;
  }
};

TEST(Dealing, EveryKeyHasOnePlace) {
  for (const int ranks : {1, 2, 3, 4, 8, 11})
    for (const Int64 length : {0, 1, 64, 65, 511, 512, 513, 1300}) {
      std::set<std::pair<int, Int64>> places;
      std::vector<Int64> most(static_cast<std::size_t>(ranks));
      for (Int64 j = 0; j < length; ++j) {
        const Dealing::Place at = dealing.place(j, ranks);
        EXPECT_TRUE(places.insert({at.rank, at.row}).second);
        Int64& rows = most[static_cast<std::size_t>(at.rank)];
        EXPECT_GE(at.row, rows - 1);  // ascending
        rows = greater(rows, at.row + 1);
      }
      for (int r = 0; r < ranks; ++r) {
        const Int64 rows = dealing.rows(length, r, ranks);
        EXPECT_EQ(rows, (most[static_cast<std::size_t>(r)] + 63) / 64 * 64) << length << " keys, rank " << r;
      }
    }
  EXPECT_EQ(dealing.place(5 * 64 + 7, 4).rank, 1);  // round-robin
  EXPECT_EQ(dealing.place(5 * 64 + 7, 4).row, 64 + 7);
}

// Every rank has the same answer, and any number of ranks; in pages too.
TEST(Decoding, HasTheSameBitsOnAnyNumberOfRanks) {
  int compared = 0;
  for (const Case& c : cases()) {
    const Scene scene(c);
    const Scene::Result one = std::move(scene.ranks(1)[0]);
    for (const int ranks : {1, 2, 3, 4, 8, 11})
      for (const Int64 page : {Int64(0), Int64(16)}) {
        if (ranks == 1 && page == 0) continue;
        for (const Scene::Result& result : scene.ranks(ranks, page)) {
          EXPECT_TRUE(World::same_bits(one.o, result.o)) << c.name << ", " << ranks << " ranks, pages of " << page;
          EXPECT_TRUE(World::same_bits(one.lse, result.lse)) << c.name << ", " << ranks << " ranks, pages of " << page;
          ++compared;
        }
      }
  }
  EXPECT_GT(compared, 300);
}

// Against float64 and one call of the library over the whole cache. With an LSE of f32 for each block, f32 would have
// up to 1.13.
TEST(Decoding, ErrorIsThatOfOneDevice) {
  for (const Case& c : cases()) {
    double many_sum = 0, one_sum = 0;
    for (unsigned seed = 1; seed <= 8; ++seed) {
      const Scene scene(c, seed);
      const Scene::Result truth = scene.whole(true), one = scene.whole(false), many = std::move(scene.ranks(4)[2]);
      const double error = World::error(many.o, truth.o), usual = World::error(one.o, truth.o);
      many_sum += error * error, one_sum += usual * usual;
      EXPECT_LE(World::error(many.lse, truth.lse), 0x1p-20) << c.name;
    }
    const double ratio = std::sqrt(many_sum / one_sum);
    EXPECT_LE(ratio, 1.02) << c.name;
    std::printf("dist: decoding, %s: error / one device's error %.3f\n", c.name, ratio);
  }
}

// A sequence's bits do not depend on the others.
TEST(Decoding, IsBatchInvariant) {
  const Case& together = cases()[0];
  const Scene scene(together);
  const Scene::Result all = std::move(scene.ranks(3)[0]);
  for (std::size_t b = 0; b < together.lengths.size(); ++b) {
    Case alone = together;
    alone.lengths = {together.lengths[b]};
    Scene single(alone);
    const auto copy = [&](Numbers& to, const Numbers& from, Int64 rows, Int64 first) {
      for (Int64 i = 0; i < rows * to.rows.view.row_stride; ++i)
        to.set(i, from.get(first * from.rows.view.row_stride + i));
    };
    copy(single.q, scene.q, 1, Int64(b));
    copy(single.k, scene.k, single.longest, Int64(b) * scene.longest);
    copy(single.v, scene.v, single.longest, Int64(b) * scene.longest);
    const Scene::Result result = std::move(single.ranks(3)[0]);
    for (Int64 i = 0; i < result.o.count(); ++i)
      ASSERT_EQ(result.o.get(i), all.o.get(Int64(b) * result.o.count() + i)) << b;
    for (Int64 h = 0; h < alone.Hq; ++h) ASSERT_EQ(result.lse.get(h), all.lse.get(Int64(b) * alone.Hq + h)) << b;
  }
}

struct Said {
  std::vector<std::string> sentences;
  bool untouched = true;
};

// change: what rank 1 of three does otherwise.
Said said(const std::function<void(DecodeProblem&, Inputs&, std::vector<Int64>&)>& change) {
  Said out;
  out.sentences.resize(3);
  const Scene scene(cases()[0]);
  std::vector<Scene::Result> results;
  for (int r = 0; r < 3; ++r) results.emplace_back(scene, Type::f32, Type::f32);
  run_ranks(3, [&](int r, std::shared_ptr<Communicator> communicator) {
    DecodeProblem problem = scene.problem();
    std::vector<Int64> lengths = scene.c.lengths;
    Numbers cache(Type::f32, scene.B * 512, 2, 32);
    Inputs in;
    in.q = Scene::four(scene.q, 1), in.k = in.v = Scene::four(cache, 512);
    if (r == 1) change(problem, in, lengths);
    try {
      Decoder(communicator, problem, 2, 1).forward(in, lengths, results[static_cast<std::size_t>(r)].views(scene));
    } catch (const Error& error) {
      out.sentences[static_cast<std::size_t>(r)] = error.what();
    }
  });
  for (const Scene::Result& result : results)
    for (Int64 i = 0; i < result.o.count(); ++i) out.untouched &= result.o.get(i) == -77;
  return out;
}

TEST(Decoding, WhatIsWrongEverybodyHears) {
  float sinks[4] = {};
  using Change = std::function<void(DecodeProblem&, Inputs&, std::vector<Int64>&)>;
  const std::vector<std::pair<const char*, Change>> rows = {
      {"D differs between rank 0 and rank 1", [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.D = 16; }},
      {"Dv differs between rank 0 and rank 1", [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.Dv = 16; }},
      {"Hq differs between rank 0 and rank 1", [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.Hq = 8; }},
      {"Hk differs between rank 0 and rank 1", [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.Hk = 1; }},
      {"type differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.type = Type::f16; }},
      {"scale differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.scale = 2; }},
      {"softcap differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.softcap = 2; }},
      {"causal differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.causal = !p.options.causal; }},
      {"window_left differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.window_left = 9; }},
      {"window_right differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.window_right = 9; }},
      {"block differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.dealing.block = 32; }},
      {"groups differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.dealing.groups = 6; }},
      {"deterministic differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.deterministic = false; }},
      {"part_invariant differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.part_invariant = true; }},
      {"segment_rows differs between rank 0 and rank 1",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.segment_rows = 64; }},
      {"row0, col0, head0 and batch0: must be 0; the decoder knows where each part lies",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.col0 = 7; }},
      {"dropout: must be 0 in decoding",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.dropout = 0.1; }},
      {"alignment: must be bottom_right: queries are the last positions",
       [](DecodeProblem& p, Inputs&, std::vector<Int64>&) { p.options.alignment = Alignment::top_left; }},
      {"lengths differ between rank ", [](DecodeProblem&, Inputs&, std::vector<Int64>& n) { n[0] = 701; }},
      {"lengths: of sequence 0 is -1; must not be negative",
       [](DecodeProblem&, Inputs&, std::vector<Int64>& n) { n[0] = -1; }},
      {"k: has room for 500 keys of a sequence; must be a multiple of a block, 64",
       [](DecodeProblem&, Inputs& in, std::vector<Int64>&) { in.k.shape[1] = in.v.shape[1] = 500; }},
      {"k: has room for 64 keys of a sequence; sequence 0 needs 256 on this rank",
       [](DecodeProblem&, Inputs& in, std::vector<Int64>&) { in.k.shape[1] = in.v.shape[1] = 64; }},
      {"q: has the shape [5,1,4,32]; must have [4,1,4,32]",
       [](DecodeProblem&, Inputs&, std::vector<Int64>& n) { n.pop_back(); }},
      {"bias: is given; decoding over several ranks does not take it",
       [](DecodeProblem&, Inputs& in, std::vector<Int64>&) { in.bias = in.q; }},
      {"page_indices: is given; decoding over several ranks does not take it",
       [](DecodeProblem&, Inputs& in, std::vector<Int64>&) { in.page_indices = Tensor(nullptr, Type::i32, {0}); }},
      {"arrived damaged, or belongs to another call",
       [&](DecodeProblem&, Inputs& in, std::vector<Int64>&) { in.sinks = Tensor(sinks, Type::f32, {4}); }},
  };
  for (const auto& [sentence, change] : rows) {
    const Said all = said(change);
    for (const std::string& it : all.sentences)
      EXPECT_NE(it.find(sentence), std::string::npos) << it << " for " << sentence;
    EXPECT_TRUE(all.untouched) << sentence;
  }
  // Alone it is the rank's own sentence, before anybody is asked.
  const auto complains = [](DecodeProblem p) -> std::string {
    try {
      Decoder(thread_communicators(1)[0], p, 1, 1);
    } catch (const Error& error) {
      return error.what();
    }
    return {};
  };
  DecodeProblem p;
  p.dealing.block = 0;
  EXPECT_EQ(complains(p), "block: is 0; must be positive");
  p.dealing = {.groups = 6};
  EXPECT_EQ(complains(p), "groups: is 6; must be a power of two");
  p.dealing = {}, p.Hq = 3, p.Hk = 2;
  EXPECT_EQ(complains(p), "Hq: is 3; must be a positive multiple of Hk, 2");
}

// Their messages have the same sizes, and both are called for the first time.
TEST(Decoding, DecodersInAnotherOrderAreNoticed) {
  const Scene scene(cases()[0]);
  std::vector<std::string> said(2);
  run_ranks(2, [&](int r, std::shared_ptr<Communicator> c) {
    Numbers cache(Type::f32, scene.B * 768, 2, 32);
    Inputs in;
    in.q = Scene::four(scene.q, 1), in.k = in.v = Scene::four(cache, 768);
    Scene::Result result(scene, Type::f32, Type::f32);
    DecodeProblem other = scene.problem();
    other.options.scale = 0.5;
    Decoder one(c, scene.problem(), 2, 1), two(c, other, 2, 1);
    try {
      (r == 0 ? one : two).forward(in, scene.c.lengths, result.views(scene));
    } catch (const Error& error) {
      said[static_cast<std::size_t>(r)] = error.what();
    }
  });
  for (const std::string& sentence : said)
    EXPECT_NE(sentence.find("arrived damaged, or belongs to another call"), std::string::npos) << sentence;
}

TEST(Decoding, PagesMustDivideABlock) {
  const Scene scene(cases()[0]);
  Numbers cache(Type::f32, 48 * 100, 2, 32);
  std::vector<std::int32_t> table(5 * 28);
  Inputs in;
  in.q = Scene::four(scene.q, 1), in.k = in.v = Scene::four(cache, 48);
  in.block_table = Tensor(table.data(), Type::i32, {5, 28});
  const Scene::Result result(scene, Type::f32, Type::f32);
  Decoder decoder(thread_communicators(1)[0], scene.problem(), 1, 1);
  try {
    decoder.forward(in, scene.c.lengths, result.views(scene));
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "page_size: is 48; must divide a block of 64 keys");
  }
}

}  // namespace
}  // namespace tessera::dist
