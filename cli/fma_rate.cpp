// Implements cli/fma_rate.hpp: twelve independent chains of fused multiply-adds in registers, on every thread.
// Nobody includes this.
// Twelve chains cover the latency (4 or 5 cycles) of two units, and fit into AVX2's sixteen registers.
#include "cli/fma_rate.hpp"

#include <sched.h>

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
  // One processor each: new threads may share one for some milliseconds, and the sum would be that of one.
  const std::vector<int> processors = allowed_processors();
  const bool pinned = static_cast<int>(processors.size()) >= threads;
  const auto work = [&](int thread) {
    if (pinned) run_on({processors[static_cast<std::size_t>(thread)]});
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
  for (int t = 1; t < threads; ++t) helpers.emplace_back(work, t);
  work(0);
  for (std::thread& helper : helpers) helper.join();
  if (pinned) run_on(processors);
  return 2.0 * chains * method.width * static_cast<double>(slice) * static_cast<double>(slices.load()) /
         last_end.load();
}

}  // namespace tessera::cli
