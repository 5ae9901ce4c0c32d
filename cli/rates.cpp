// SPDX-License-Identifier: Apache-2.0
// Peak-rate microbenchmarks; see cli/rates.hpp. Every thread runs short slices until the time is up: FMA (twelve
// independent dependency chains, which hide the latency of 4 or 5 cycles on two ports and fit AVX2's sixteen
// registers), AMX tile products without loads, or loads from memory.
#include "cli/rates.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "cli/isa.hpp"

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int chains = 12;

template <int W>
TESSERA_INLINE float spin(std::int64_t rounds, float first) {
  using V = typename Vector<W>::type;
  V x[chains];
  const V a = V{} + 0.999f, b = V{} + 0.001f;  // x = 0.999 x + 0.001 converges to 1: no overflow, no subnormals
  for (int c = 0; c < chains; ++c) x[c] = V{} + (first + static_cast<float>(c));
  for (std::int64_t r = 0; r < rounds; ++r)
    for (int c = 0; c < chains; ++c) x[c] = x[c] * a + b;
  float sum = 0;
  for (int c = 0; c < chains; ++c)
    for (int w = 0; w < W; ++w) sum += x[c][w];
  return sum;
}

TESSERA_TARGET_AVX512 float spin_avx512(std::int64_t rounds, float first) { return spin<16>(rounds, first); }
TESSERA_TARGET_AVX2 float spin_avx2(std::int64_t rounds, float first) { return spin<8>(rounds, first); }
float spin_baseline(std::int64_t rounds, float first) { return spin<4>(rounds, first); }

struct Method {
  float (*run)(std::int64_t rounds, float first);
  int width;
};

Method best_method() {
  switch (best_isa()) {
    case Isa::avx512:
      return {spin_avx512, 16};
    case Isa::avx2:
      return {spin_avx2, 8};
    default:
      return {spin_baseline, 4};
  }
}

// The processors that this thread may run on; empty if the system does not say.
std::vector<int> allowed_processors() {
  cpu_set_t set;
  std::vector<int> list;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return list;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &set)) list.push_back(cpu);
  return list;
}

void run_on(const std::vector<int>& processors) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : processors) CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof set, &set);  // if refused, the scheduler decides, as before
}

// Aggregate units per second of all threads. slice(thread) works for about 100 us and returns how many units it did.
double measure_rate(int threads, double seconds, const std::function<double(int)>& slice) {
  std::atomic<int> waiting{threads};
  std::atomic<double> units{0}, last_end{0};
  Clock::time_point start;
  // Threads are pinned to one processor each: the scheduler may start two on one processor for some milliseconds, which
  // would halve the rate.
  const std::vector<int> processors = allowed_processors();
  const bool pinned = static_cast<int>(processors.size()) >= threads;
  const auto work = [&](int thread) {
    if (pinned) run_on({processors[static_cast<std::size_t>(thread)]});
    if (waiting.fetch_sub(1) == 1) {
      start = Clock::now();
      waiting.store(-1);
    }
    while (waiting.load() >= 0) std::this_thread::yield();
    double mine = 0, elapsed = 0;
    while (elapsed < seconds) {
      mine += slice(thread);
      elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    }
    double seen = units.load();
    while (!units.compare_exchange_weak(seen, seen + mine)) {
    }
    seen = last_end.load();
    while (seen < elapsed && !last_end.compare_exchange_weak(seen, elapsed)) {
    }
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads; ++t) helpers.emplace_back(work, t);
  work(0);
  for (std::thread& helper : helpers) helper.join();
  if (pinned) run_on(processors);
  return units.load() / last_end.load();
}

#if defined(__x86_64__)
struct alignas(64) TileShapes {
  unsigned char palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  unsigned char rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

void multiply_tiles(std::int64_t rounds) {
  static const TileShapes shapes;
  asm volatile(
      "ldtilecfg %0\n tilezero %%tmm4\n tilezero %%tmm5\n tilezero %%tmm6\n tilezero %%tmm7\n"
      "tilezero %%tmm0\n tilezero %%tmm1\n tilezero %%tmm2\n tilezero %%tmm3" ::"m"(shapes));
  for (std::int64_t r = 0; r < rounds; ++r)
    asm volatile(
        "tdpbf16ps %tmm6, %tmm4, %tmm0\n tdpbf16ps %tmm7, %tmm4, %tmm1\n"
        "tdpbf16ps %tmm6, %tmm5, %tmm2\n tdpbf16ps %tmm7, %tmm5, %tmm3");
  asm volatile("tilerelease");
}

// Like `spin`: twelve dependency chains of numbers that neither overflow nor underflow.
void multiply_pairs(std::int64_t rounds) {
  constexpr unsigned small_pair = 0x3a803a80;
  asm volatile(
      "vpbroadcastd %1, %%zmm12\n vpxord %%zmm0, %%zmm0, %%zmm0\n vmovaps %%zmm0, %%zmm1\n vmovaps %%zmm0, %%zmm2\n "
      "vmovaps %%zmm0, %%zmm3\n"
      "vmovaps %%zmm0, %%zmm4\n vmovaps %%zmm0, %%zmm5\n vmovaps %%zmm0, %%zmm6\n vmovaps %%zmm0, %%zmm7\n"
      "vmovaps %%zmm0, %%zmm8\n vmovaps %%zmm0, %%zmm9\n vmovaps %%zmm0, %%zmm10\n vmovaps %%zmm0, %%zmm11\n"
      "1:\n vdpbf16ps %%zmm12, %%zmm12, %%zmm0\n vdpbf16ps %%zmm12, %%zmm12, %%zmm1\n"
      "vdpbf16ps %%zmm12, %%zmm12, %%zmm2\n vdpbf16ps %%zmm12, %%zmm12, %%zmm3\n"
      "vdpbf16ps %%zmm12, %%zmm12, %%zmm4\n vdpbf16ps %%zmm12, %%zmm12, %%zmm5\n"
      "vdpbf16ps %%zmm12, %%zmm12, %%zmm6\n vdpbf16ps %%zmm12, %%zmm12, %%zmm7\n"
      "vdpbf16ps %%zmm12, %%zmm12, %%zmm8\n vdpbf16ps %%zmm12, %%zmm12, %%zmm9\n"
      "vdpbf16ps %%zmm12, %%zmm12, %%zmm10\n vdpbf16ps %%zmm12, %%zmm12, %%zmm11\n"
      "dec %0\n jnz 1b"
      : "+r"(rounds)
      : "r"(small_pair)
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
        "xmm12");
}
#else
void multiply_tiles(std::int64_t) {}
void multiply_pairs(std::int64_t) {}
#endif

template <int W>
TESSERA_INLINE std::uint32_t read_words(const int* words, std::size_t count) {
  using V = typename Vector<W>::ints;
  V sum[4] = {};
  for (std::size_t n = 0; n + 4 * W <= count; n += 4 * W)
    for (int part = 0; part < 4; ++part) sum[part] ^= *reinterpret_cast<const V*>(words + n + part * W);
  const V all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  return static_cast<std::uint32_t>(all[0] ^ all[W - 1]);
}

TESSERA_TARGET_AVX512 std::uint32_t read_avx512(const int* words, std::size_t count) {
  return read_words<16>(words, count);
}
TESSERA_TARGET_AVX2 std::uint32_t read_avx2(const int* words, std::size_t count) { return read_words<8>(words, count); }
std::uint32_t read_baseline(const int* words, std::size_t count) { return read_words<4>(words, count); }

}  // namespace

OneProcessor::OneProcessor(int part, int parts) : before(allowed_processors()) {
  if (!before.empty())
    run_on({before[before.size() * static_cast<std::size_t>(part) / static_cast<std::size_t>(parts)]});
}

OneProcessor::~OneProcessor() {
  if (!before.empty()) run_on(before);
}

double measure_fma_rate(int threads, double seconds) {
  const Method method = best_method();
  constexpr std::int64_t rounds = 1 << 15;
  // Optimisation barrier: inputs are opaque to the compiler and outputs are used, so that no chain is constant-folded
  // or eliminated.
  std::atomic<float> source{2}, sink{0};
  return measure_rate(threads, seconds, [&](int) {
    sink = method.run(rounds, source);
    return 2.0 * chains * method.width * static_cast<double>(rounds);
  });
}

double measure_matrix_rate(int threads, double seconds) {
  constexpr std::int64_t rounds = 1 << 12;
  return measure_rate(threads, seconds, [](int) {
    multiply_tiles(rounds);
    return 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(rounds);
  });
}

double measure_pairs_rate(int threads, double seconds) {
  constexpr std::int64_t rounds = 1 << 15;
  return measure_rate(threads, seconds, [](int) {
    multiply_pairs(rounds);
    return 4.0 * chains * 16 * static_cast<double>(rounds);
  });
}

double measure_read_rate(const void* memory, std::size_t bytes, int threads, double seconds) {
  const auto read = best_isa() == Isa::avx512 ? read_avx512 : best_isa() == Isa::avx2 ? read_avx2 : read_baseline;
  const std::size_t words = bytes / sizeof(int) / static_cast<std::size_t>(threads);
  constexpr std::size_t most = 1 << 19;                                       // 2 MiB at once
  std::vector<std::size_t> place(static_cast<std::size_t>(threads) * 16, 0);  // a cache line each: no false sharing
  std::atomic<std::uint32_t> sink{0};
  return measure_rate(threads, seconds, [&](int thread) {
    std::size_t& begin = place[static_cast<std::size_t>(thread) * 16];
    const std::size_t count = std::min(most, words - begin);
    sink = read(static_cast<const int*>(memory) + static_cast<std::size_t>(thread) * words + begin, count);
    begin = begin + count < words ? begin + count : 0;
    return static_cast<double>(count * sizeof(int));
  });
}

}  // namespace tessera::cli
