// The Hopper forward kernel's own text, run on the host (tests/emulated): producer, consumers, barriers, layouts,
// masks, softmax and epilogue, against float64. What the hardware does in the background happens at once here. Links
// tessera_static; its include path puts tests/emulated before src.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/emulated/machine.hpp"
// The machine comes first: device text needs it.
#include "sm90/kernel/forward.cuh"

namespace tessera::sm90 {

alignas(1024) unsigned char memory[emulated::Machine::memory_bytes];

namespace {

struct Shape {
  Int32 B = 1, Hq = 2, Hk = 1;
  Int64 Nq = 100, Nk = 200;
  int D = 0, Dv = 0;  // 0: the kernel's own; else less, and padded
  bool causal = false;
  Int64 left = -1, right = -1;
  int grid = 0;      // 0: a block per tile
  float growth = 0;  // keys grow by this factor of their position: scores jump from tile to tile
  std::vector<Int32> cu_q{}, cu_k{}, used_q{}, used_k{};  // packed: Nq and Nk are the totals; used lengths
  std::vector<float> sinks{};
};

template <Config config>
class Problem {
 public:
  explicit Problem(const Shape& s) : s(s), D(s.D ? s.D : config.D), Dv(s.Dv ? s.Dv : config.Dv) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<UInt16>& x, Int64 n) {
      x.resize(std::size_t(n));
      for (UInt16& one : x) one = UInt16(packed<config.element>(normal(random), 0));
    };
    fill(q, s.B * s.Nq * s.Hq * D), fill(k, s.B * s.Nk * s.Hk * D), fill(v, s.B * s.Nk * s.Hk * Dv);
    if (s.growth > 0)
      for (std::size_t n = 0; n < k.size(); ++n) {
        const auto token = Int64(n) / (s.Hk * D) % s.Nk;
        k[n] = UInt16(packed<config.element>(number(k[n]) * (1 + s.growth * float(token)), 0));
      }
    spoil_unused();
    o.assign(std::size_t(s.B * s.Nq * s.Hq * Dv), UInt16(packed<config.element>(NAN, 0)));
    lse.assign(std::size_t(s.B * s.Hq * s.Nq), NAN);
  }

  void run() {
    ForwardParams p{};
    const Int32 batch = packed_input() ? 1 : s.B;
    p.q = emulated_map(q.data(), batch, s.Nq, s.Hq, D, 64);
    p.k = emulated_map(k.data(), batch, s.Nk, s.Hk, D, config.block_keys);
    p.v = emulated_map(v.data(), batch, s.Nk, s.Hk, Dv, config.block_keys);
    p.o = emulated_map(o.data(), batch, s.Nq, s.Hq, Dv, 64);
    simt::Question& x = p.call.x;
    x.B = s.B, x.Hq = s.Hq, x.Hk = s.Hk, x.Nq = s.Nq, x.Nk = s.Nk;
    x.scale = scale(), x.causal = s.causal, x.window_left = s.left, x.window_right = s.right;
    const auto lengths = [](const std::vector<Int32>& x) { return simt::LengthRef{x.empty() ? nullptr : x.data(), 1}; };
    x.cu_seqlens_q = lengths(s.cu_q), x.cu_seqlens_k = lengths(s.cu_k);
    x.seqused_q = lengths(s.used_q), x.seqused_k = lengths(s.used_k);
    if (!s.sinks.empty()) x.sinks = s.sinks.data(), x.sink_head = 1;
    p.call.o = {o.data(), packed_input() ? 0 : s.Nq * s.Hq * Dv, s.Hq * Dv, Dv};
    p.call.lse = {lse.data(), packed_input() ? 0 : s.Hq * s.Nq, s.Nq, 1};
    p.Dv = Dv;
    p.tiles_per_head = Int32(simt::block_count(packed_input(), s.Nq, rows_of(config), packed_input() ? s.B : 1));
    p.tiles = batch * s.Hq * p.tiles_per_head, p.section = batch * s.Hq % 2 == 0 ? 2 : 1;
    emulated_element = config.element;
    emulated::Machine& machine = emulated::Machine::here();
    machine.memory = memory;
    machine.run(s.grid ? s.grid : p.tiles, threads_of(config), [&] { forward<config>(p); });
  }

  void compare() const {
    double off = 0, norm = 0, worst_lse = 0;
    for (Int32 b = 0; b < s.B; ++b)
      for (Int32 h = 0; h < s.Hq; ++h)
        for (Int64 i = 0; i < rows(b, s.cu_q, s.Nq); ++i) {
          const Int64 token = first_token(b, s.cu_q, s.Nq) + i;
          const Int64 lse_at = packed_input() ? h * s.Nq + token : (b * s.Hq + h) * s.Nq + i;
          const float got = lse[std::size_t(lse_at)];
          if (i >= used(b, s.cu_q, s.used_q, s.Nq)) {
            ASSERT_TRUE(std::isnan(got)) << "LSE of query " << i << " was written: " << got;
            for (int d = 0; d < Dv; ++d) ASSERT_TRUE(std::isnan(number(o[element(token, h, d)]))) << i;
            continue;
          }
          const std::vector<double> row = exact(b, h, i);
          const double wanted = row.back();
          ASSERT_EQ(std::isinf(got), std::isinf(wanted)) << "query " << i << ": " << got << " for " << wanted;
          if (!std::isinf(wanted))
            worst_lse = std::max(worst_lse, std::abs(got - wanted) / std::max(1.0, std::abs(wanted)));
          for (int d = 0; d < Dv; ++d) {
            const float x = number(o[element(token, h, d)]);
            ASSERT_FALSE(std::isnan(x)) << "query " << i << " of head " << h << ", dim " << d;
            ASSERT_TRUE(x == 0 || !std::isinf(wanted));
            const double y = row[std::size_t(d)];
            off += (x - y) * (x - y), norm += y * y;
          }
        }
    EXPECT_LT(std::sqrt(off), (config.element == Element::bf16 ? 4e-3 : 5e-4) * std::sqrt(norm) + 1e-30);
    EXPECT_LT(worst_lse, 1e-6);
  }

 private:
  static float number(UInt16 bits) { return unpacked<config.element>(bits); }
  float scale() const { return 1 / std::sqrt(float(D)); }
  bool packed_input() const { return !s.cu_q.empty(); }

  // Of sequence b: its first token in memory, the rows that memory holds, and those in use.
  static Int64 first_token(Int32 b, const std::vector<Int32>& cu, Int64 N) {
    return cu.empty() ? b * N : cu[std::size_t(b)];
  }
  static Int64 rows(Int32 b, const std::vector<Int32>& cu, Int64 N) {
    return cu.empty() ? N : cu[std::size_t(b) + 1] - cu[std::size_t(b)];
  }
  static Int64 used(Int32 b, const std::vector<Int32>& cu, const std::vector<Int32>& used, Int64 N) {
    return used.empty() ? rows(b, cu, N) : used[std::size_t(b)];
  }
  std::size_t element(Int64 token, Int32 h, int d) const { return std::size_t((token * s.Hq + h) * Dv + d); }

  // Tokens beyond used lengths hold NaN.
  void spoil_unused() {
    const auto spoil = [&](std::vector<UInt16>& x, Int64 width, const std::vector<Int32>& cu,
                           const std::vector<Int32>& lengths, Int64 N) {
      for (Int32 b = 0; b < s.B; ++b)
        for (Int64 i = used(b, cu, lengths, N); i < rows(b, cu, N); ++i)
          for (Int64 n = 0; n < width; ++n)
            x[std::size_t((first_token(b, cu, N) + i) * width + n)] = UInt16(packed<config.element>(NAN, 0));
    };
    spoil(q, s.Hq * D, s.cu_q, s.used_q, s.Nq), spoil(k, s.Hk * D, s.cu_k, s.used_k, s.Nk);
    spoil(v, s.Hk * Dv, s.cu_k, s.used_k, s.Nk);
  }

  // A row of O, and LSE.
  std::vector<double> exact(Int32 b, Int32 h, Int64 i) const {
    const Int64 nq = used(b, s.cu_q, s.used_q, s.Nq), nk = used(b, s.cu_k, s.used_k, s.Nk);
    const Int64 off = nk - nq, kv = h / (s.Hq / s.Hk);
    const Int64 query = first_token(b, s.cu_q, s.Nq) + i, first_key = first_token(b, s.cu_k, s.Nk);
    std::vector<double> scores(std::size_t(nk), -INFINITY), out(std::size_t(Dv) + 1, 0.0);
    double top = s.sinks.empty() ? -INFINITY : double(s.sinks[std::size_t(h)]);
    double sum = s.sinks.empty() ? 0 : 1;
    const double sink = top;
    for (Int64 j = 0; j < nk; ++j) {
      if (s.causal && j > i + off) continue;
      if ((s.left >= 0 && j < i + off - s.left) || (s.right >= 0 && j > i + off + s.right)) continue;
      double dot = 0;
      for (int d = 0; d < D; ++d)
        dot += double(number(q[std::size_t((query * s.Hq + h) * D + d)])) *
               number(k[std::size_t(((first_key + j) * s.Hk + kv) * D + d)]);
      top = std::max(top, scores[std::size_t(j)] = dot * double(scale()));
    }
    if (sum > 0) sum = std::exp(sink - top);
    for (Int64 j = 0; j < nk && top > -INFINITY; ++j) {
      const double p = std::exp(scores[std::size_t(j)] - top);
      if (p == 0) continue;
      sum += p;
      for (int d = 0; d < Dv; ++d)
        out[std::size_t(d)] += p * number(v[std::size_t(((first_key + j) * s.Hk + kv) * Dv + d)]);
    }
    for (int d = 0; d < Dv && sum > 0; ++d) out[std::size_t(d)] /= sum;
    out.back() = sum > 0 ? top + std::log(sum) : -INFINITY;
    return out;
  }

  Shape s;
  int D, Dv;
  std::vector<UInt16> q, k, v, o;
  std::vector<float> lse;
};

template <Config config>
void check(const Shape& shape) {
  Problem<config> problem(shape);
  problem.run();
  problem.compare();
}

constexpr Config narrow_heads{.D = 64, .Dv = 64, .warpgroups = 3, .block_keys = 96};
constexpr Config usual{};
constexpr Config halves{.D = 64, .Dv = 64, .element = Element::f16, .warpgroups = 3, .block_keys = 96};
constexpr Config unequal{.D = 192, .Dv = 128, .block_keys = 96};
constexpr Config wide{.D = 256, .Dv = 256, .block_keys = 48, .O_in_Q = true};

TEST(HopperForward, Full) {
  check<narrow_heads>({.Nq = 250, .Nk = 500});
  check<usual>({.Nq = 129, .Nk = 400});
  check<unequal>({.Nq = 64, .Nk = 193});
  check<wide>({.Nq = 70, .Nk = 130});
}

TEST(HopperForward, HeadDimsBetweenTiles) {
  check<narrow_heads>({.Nq = 70, .Nk = 200, .D = 40, .Dv = 40});
  check<usual>({.Nq = 129, .Nk = 200, .D = 80, .Dv = 72, .causal = true});
  check<usual>({.B = 2, .Nq = 100, .Nk = 300, .D = 96, .Dv = 99, .used_q = {70, 100}, .used_k = {300, 131}});
}

TEST(HopperForward, Halves) {
  check<halves>({.Nq = 65, .Nk = 300});
  check<halves>({.Nq = 65, .Nk = 300, .causal = true, .growth = 0.1f});
}

TEST(HopperForward, OneToManyTilesOfKeys) {
  for (const Int64 Nk : {1, 95, 96, 97, 192, 193, 289, 385}) check<narrow_heads>({.Hq = 1, .Nq = 3, .Nk = Nk});
}

TEST(HopperForward, Causal) {
  check<narrow_heads>({.Nq = 300, .Nk = 300, .causal = true});
  check<usual>({.Nq = 200, .Nk = 330, .causal = true});
  check<wide>({.Nq = 130, .Nk = 130, .causal = true});
}

TEST(HopperForward, QueriesThatSeeNothing) {
  check<usual>({.Nq = 400, .Nk = 130, .causal = true});  // the first tiles see no key at all, one sees some
  check<wide>({.Nq = 300, .Nk = 40, .causal = true, .grid = 1});
}

TEST(HopperForward, Windows) {
  check<narrow_heads>({.Nq = 300, .Nk = 300, .left = 100, .right = 20});
  check<narrow_heads>({.Nq = 200, .Nk = 500, .causal = true, .left = 10});
  check<usual>({.Nq = 130, .Nk = 600, .left = 0, .right = 0});
}

TEST(HopperForward, BlocksThatTakeSeveralTiles) {
  check<narrow_heads>({.B = 2, .Hq = 4, .Hk = 2, .Nq = 200, .Nk = 200, .grid = 3});
  check<wide>({.B = 2, .Hq = 2, .Hk = 2, .Nq = 140, .Nk = 100, .causal = true, .grid = 2});
}

TEST(HopperForward, PackedSequences) {
  const Shape packed{.B = 4, .Nq = 300, .Nk = 420, .cu_q = {0, 70, 70, 230, 300}, .cu_k = {0, 130, 140, 300, 420}};
  check<narrow_heads>(packed);
  check<usual>(packed);
  Shape causal = packed;
  causal.causal = true;
  check<usual>(causal);
  check<wide>(causal);
  causal.cu_k = {0, 130, 130, 130, 420}, causal.grid = 3;  // two sequences without keys
  check<wide>(causal);
}

// With NaN behind the used lengths, in memory that belongs to the tensors.
TEST(HopperForward, UsedLengths) {
  const Shape padded{.B = 3, .Nq = 150, .Nk = 260, .used_q = {150, 20, 64}, .used_k = {100, 260, 129}};
  check<narrow_heads>(padded);
  check<wide>(padded);
  Shape packed{.B = 3, .Nq = 300, .Nk = 420, .causal = true, .cu_q = {0, 70, 230, 300}, .cu_k = {0, 130, 300, 420}};
  packed.used_q = {0, 130, 65}, packed.used_k = {100, 3, 119};
  check<usual>(packed);
  check<wide>(packed);
}

TEST(HopperForward, Sinks) {
  check<usual>({.Nq = 64, .Nk = 300, .sinks = {1.5f, -3}});
  check<narrow_heads>({.Nq = 300, .Nk = 100, .causal = true, .sinks = {20, 0.1f}});  // some queries see the sink only
}

// Scores that grow from tile to tile, so that the maximum of the first tile does not do for the others.
TEST(HopperForward, GrowingScores) {
  check<narrow_heads>({.Nq = 64, .Nk = 700, .growth = 0.3f});
  check<usual>({.Nq = 64, .Nk = 700, .growth = 3});
}

}  // namespace
}  // namespace tessera::sm90
