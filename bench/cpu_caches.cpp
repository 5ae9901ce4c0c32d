// SPDX-License-Identifier: Apache-2.0
// cpu_caches [THREADS]: one query against a cache, on the CPU: contiguous and in shuffled pages, in bf16, e4m3 and i8,
// interleaved in one process, with four query heads to a KV head and with one. Prints medians, bytes of K and V per
// second, and tokens per second over those of contiguous bf16. Method: docs/benchmarks.md.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cases/buffer.hpp"
#include "tessera/tessera.hpp"

namespace tessera::bench {
namespace {

constexpr std::int64_t kv_heads = 8, dim = 128;

struct Shape {
  std::int64_t batch, keys, heads;
};

// K, V and what says where they are. Contents are random bytes of ordinary size: they do not change the time.
struct Cache {
  std::string name;
  Type type;
  std::int64_t page_size;  // 0: contiguous
  bool scaled;
  std::vector<std::uint8_t> k, v;
  std::vector<float> scales;
  std::vector<std::int32_t> table, lengths;
  Inputs in;
  double bytes = 0;
  std::vector<double> times{};

  Cache(std::string name, Type type, std::int64_t page_size, bool scaled, const Shape& s, const Tensor& q) :
      name(std::move(name)), type(type), page_size(page_size), scaled(scaled) {
    const std::int64_t tokens = s.batch * s.keys, each = tokens * kv_heads * dim;
    const auto size = static_cast<std::int64_t>(cases::size_of(type));
    std::mt19937 random(7);
    for (auto* pool : {&k, &v}) {
      pool->resize(static_cast<std::size_t>(each * size));
      for (std::int64_t e = 0; e < each; ++e) {
        const auto byte = static_cast<std::uint8_t>(random());
        const std::uint16_t word = static_cast<std::uint16_t>((byte & 0x80) << 8 | 0x3f00 | (byte & 0x7f));  // around 1
        const std::uint8_t small = static_cast<std::uint8_t>((byte & 0x87) | 0x30);
        if (size == 2) std::memcpy(pool->data() + 2 * e, &word, 2);
        if (size == 1) (*pool)[static_cast<std::size_t>(e)] = type == Type::e4m3 ? small : byte;
      }
    }
    bytes = 2.0 * static_cast<double>(each * size);
    in.q = q;
    const std::int64_t P = page_size > 0 ? page_size : s.keys, pages = tokens / P;
    in.k = Tensor(k.data(), type, {pages, P, kv_heads, dim});
    in.v = Tensor(v.data(), type, {pages, P, kv_heads, dim});
    scales.assign(static_cast<std::size_t>(tokens * kv_heads), 0.01f);
    if (scaled) in.k_scale = in.v_scale = Tensor(scales.data(), Type::f32, {pages, P, kv_heads});
    if (page_size == 0) return;
    table.resize(static_cast<std::size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), random);
    lengths.assign(static_cast<std::size_t>(s.batch), static_cast<std::int32_t>(s.keys));
    in.block_table = Tensor(table.data(), Type::i32, {s.batch, pages / s.batch});
    in.seqused_k = Tensor(lengths.data(), Type::i32, {s.batch});
  }
};

void measure(const Shape& s, int threads) {
  cases::Buffer q(Type::bf16, {s.batch, 1, s.heads, dim}), o(Type::bf16, {s.batch, 1, s.heads, dim});
  for (std::int64_t e = 0; e < q.elements(); ++e) q.set(e, 0.01 * static_cast<double>(e % 13 - 6));
  std::vector<Cache> caches;
  for (const std::int64_t page : {0, 1, 16, 64, 256})
    caches.emplace_back(page ? "bf16, pages of " + std::to_string(page) : "bf16", Type::bf16, page, false, s,
                        q.tensor());
  for (const Type type : {Type::e4m3, Type::i8})
    for (const std::int64_t page : {0, 16})
      caches.emplace_back(cases::name_of(type) + std::string(page ? ", pages of 16" : "") + ", scale per key", type,
                          page, true, s, q.tensor());
  constexpr int rounds = 15;
  for (int round = -1; round < rounds; ++round)
    for (Cache& cache : caches) {
      const auto start = std::chrono::steady_clock::now();
      forward(cache.in, {.o = o.tensor()}, {}, {.threads = threads});
      if (round >= 0)
        cache.times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
  std::printf("\nB=%lld, %lld keys, heads %lld/%lld, D=%lld, %d threads\n", static_cast<long long>(s.batch),
              static_cast<long long>(s.keys), static_cast<long long>(s.heads), static_cast<long long>(kv_heads),
              static_cast<long long>(dim), threads);
  double first = 0, first_best = 0;
  for (Cache& cache : caches) {
    std::sort(cache.times.begin(), cache.times.end());
    const double median = cache.times[rounds / 2], best = cache.times.front();
    if (first == 0) first = median, first_best = best;
    std::printf("  %-34s %9.0f us (best %9.0f)  %6.1f GB/s  tokens/s %5.2f (best %5.2f)\n", cache.name.c_str(),
                median * 1e6, best * 1e6, cache.bytes / median * 1e-9, first / median, first_best / best);
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  for (const auto& shape : {tessera::bench::Shape{1, 8192, 32}, {1, 32768, 32}, {8, 4096, 32}, {1, 32768, 8}})
    tessera::bench::measure(shape, threads);
}
