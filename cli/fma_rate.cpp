// Implements cli/fma_rate.hpp: twelve independent chains of fused multiply-adds in registers, on every thread.
// Nobody includes this.
// Twelve chains cover the latency (4 or 5 cycles) of two units, and fit into AVX2's sixteen registers.
#include "cli/fma_rate.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
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
  const V a = V{} + 0.999f, b = V{} + 0.001f;  // converges to 1: no overflow, no subnormals
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

}  // namespace

double measure_fma_rate(int threads, double seconds) {
  const Method method = best_method();
  constexpr std::int64_t slice = 1 << 15;  // about 100 us: how often the clock is read
  std::atomic<int> waiting{threads};
  std::atomic<std::int64_t> slices{0};
  std::atomic<double> last_end{0};
  // Unknown to the compiler on the way in and used on the way out: no chain can be computed in advance or dropped.
  std::atomic<float> source{2}, sink{0};
  Clock::time_point start;
  const auto work = [&] {
    if (waiting.fetch_sub(1) == 1) {
      start = Clock::now();
      waiting.store(-1);
    }
    while (waiting.load() >= 0) std::this_thread::yield();
    std::int64_t mine = 0;
    float sum = 0;
    double elapsed = 0;
    while (elapsed < seconds) {
      sum += method.run(slice, source);
      ++mine;
      elapsed = std::chrono::duration<double>(Clock::now() - start).count();
    }
    slices += mine;
    sink = sum;
    double seen = last_end.load();
    while (seen < elapsed && !last_end.compare_exchange_weak(seen, elapsed)) {
    }
  };
  std::vector<std::thread> helpers;
  for (int t = 1; t < threads; ++t) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  return 2.0 * chains * method.width * static_cast<double>(slice) * static_cast<double>(slices.load()) /
         last_end.load();
}

}  // namespace tessera::cli
