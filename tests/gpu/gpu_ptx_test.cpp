// SPDX-License-Identifier: Apache-2.0
// The thin headers of Hopper's instructions (src/sm90/ptx) on a Hopper GPU, one fact or two of each: what the host's
// emulations (tests/sm90/sm90_test.cpp, tests/emulated) take for granted. Small units, compiled like every kernel.
// Links tessera_cases.
#include <cmath>
#include <cstring>

#include "core/failure.hpp"
#include "cuda/jit/cache.hpp"
#include "math/types.hpp"
#include "sm90/layout.hpp"
#include "sm90/params.hpp"
#include "sm90/unit.hpp"
#include "tests/gpu/support.hpp"

namespace tessera::test {
namespace {

using gpu::Element;
using sm90::tile_byte;

// An array on the GPU that begins as `values`.
template <class Number>
class Array {
 public:
  explicit Array(std::size_t count) : Array(std::vector<Number>(count)) {}
  explicit Array(const std::vector<Number>& values) : memory(gpu, values.size() * sizeof(Number)) {
    memory.write(reinterpret_cast<const std::byte*>(values.data()), memory.size());
  }
  void* address() const { return memory.data(); }
  std::vector<Number> values() const {
    wait_for(nullptr);
    std::vector<Number> all(memory.size() / sizeof(Number));
    memory.read(reinterpret_cast<std::byte*>(all.data()), memory.size());
    return all;
  }

 private:
  DeviceMemory memory;
};

// One block of `threads` runs the function `test` of a unit.
template <class... Parameters>
void launch(const std::string& unit, unsigned threads, unsigned shared_bytes, Parameters... parameters) {
  const cuda::LoadedKernel* kernel = cuda::find_kernel(unit, "test", gpu.id);
  kernel->allow_shared(shared_bytes);
  void* arguments[] = {&parameters...};
  kernel->launch({.grid = {1}, .block = {threads}, .shared_bytes = shared_bytes}, arguments);
}

class GpuPtx : public Hopper {};

// --- barrier.cuh

// In every round all threads write, arrive, wait for the phase to end, and read what another thread wrote. A new
// barrier counts as having ended the phase of parity 1, so the first wait for that one returns.
constexpr const char* barrier_text = R"(
#include "sm90/tile/ring.cuh"
using namespace tessera;
extern "C" __global__ __launch_bounds__(128) void test(int rounds, int* wrong) {
  __shared__ sm90::Barrier written[3], read[3];
  __shared__ int slots[3][128];
  if (threadIdx.x == 0) {
    for (int s = 0; s < 3; ++s) written[s].init(128), read[s].init(128);
    sm90::publish_barriers();
  }
  __syncthreads();
  sm90::RingPlace<3> place;
  for (int round = 0; round < rounds; ++round, place.advance()) {
    read[place.stage].wait(place.parity ^ 1);
    slots[place.stage][threadIdx.x] = round * 1000 + threadIdx.x;
    written[place.stage].arrive();
    written[place.stage].wait(place.parity);
    const int other = (threadIdx.x + 37 + round) % 128;
    if (slots[place.stage][other] != round * 1000 + other) atomicAdd(wrong, 1);
    read[place.stage].arrive();
  }
  __syncthreads();
  // Named barriers: two halves of the block meet among themselves, one of them more often.
  const int half = threadIdx.x / 64;
  for (int round = 0; round < (half ? 5 : 9); ++round) {
    slots[0][threadIdx.x] = round;
    sm90::sync_threads(1 + half, 64);
    if (slots[0][half * 64 + (threadIdx.x + 33) % 64] != round) atomicAdd(wrong, 1);
    sm90::sync_threads(1 + half, 64);
  }
})";

TEST_F(GpuPtx, BarriersHavePhasesAndParities) {
  const Array<int> wrong(1);
  launch(barrier_text, 128, 0, 100, wrong.address());
  EXPECT_EQ(wrong.values()[0], 0);
}

// --- tma.cuh

constexpr int rows = 64, panels = 2, tile_bytes = rows * panels * sm90::panel_row_bytes;

constexpr const char* copy_text = R"(
#include "sm90/ptx/tma.cuh"
using namespace tessera;
extern "C" __global__ __launch_bounds__(128) void test(const __grid_constant__ sm90::TensorMap from,
    const __grid_constant__ sm90::TensorMap to, sm90::TilePlace from_place, sm90::TilePlace to_place, UInt32* image) {
  extern __shared__ __align__(1024) unsigned char tile[];
  __shared__ sm90::Barrier full;
  constexpr int bytes = 64 * 2 * sm90::panel_row_bytes;
  UInt32* const words = reinterpret_cast<UInt32*>(tile);
  for (int n = threadIdx.x; n < bytes / 4; n += 128) words[n] = 0xffffffffu;
  if (threadIdx.x == 0) full.init(1), sm90::publish_barriers();
  sm90::publish_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    full.expect(bytes);
    sm90::load_tile<64, 2>(sm90::shared_address(tile), from, full, from_place, sm90::keep_in_cache);
  }
  full.wait(0);
  for (int n = threadIdx.x; n < bytes / 4; n += 128) image[n] = words[n];
  if (threadIdx.x == 0) {
    sm90::store_tile<64, 2>(to, sm90::shared_address(tile), to_place);
    sm90::wait_stores();
  }
})";

struct TilePlace {
  int token, head, sequence;
};

// A contiguous [sequences, tokens, heads, columns] tensor of 16 bits, whose boxes are 64 columns of 64 tokens.
struct Shape4 {
  std::int64_t sequences, tokens, heads, columns;
  std::size_t elements() const { return static_cast<std::size_t>(sequences * tokens * heads * columns); }
  std::size_t at(std::int64_t b, std::int64_t n, std::int64_t h, std::int64_t d) const {
    return static_cast<std::size_t>(((b * tokens + n) * heads + h) * columns + d);
  }
};

sm90::TensorMap map_of(const Shape4& s, void* data) {
  constexpr int bfloat16 = 9, no_interleave = 0, swizzle_128_bytes = 3, promote_to_128_bytes = 2;
  const auto size = [](std::int64_t n) { return static_cast<std::uint64_t>(n); };
  const std::uint64_t shape[] = {size(s.columns), size(s.tokens), size(s.heads), size(s.sequences)};
  const std::uint64_t strides[] = {size(s.heads * s.columns * 2), size(s.columns * 2),
                                   size(s.tokens * s.heads * s.columns * 2)};
  const std::uint32_t box[] = {64, rows, 1, 1}, steps[] = {1, 1, 1, 1};
  sm90::TensorMap map;
  cuda::check(cuda::driver().tensor_map_encode_tiled(&map, bfloat16, 4, data, shape, strides, box, steps, no_interleave,
                                                     swizzle_128_bytes, promote_to_128_bytes, 0),
              "cuTensorMapEncodeTiled");
  return map;
}

// The tile reaches beyond the tensor's tokens and columns: zeros are loaded there, and nothing is stored.
TEST_F(GpuPtx, TensorCopiesSwizzleFillWithZerosAndLeaveOut) {
  const Shape4 source{2, 70, 3, 80}, target{3, 50, 2, 88};
  constexpr TilePlace from{40, 1, 1}, to{10, 1, 2};
  constexpr std::uint16_t untouched = 0xffff;
  std::vector<std::uint16_t> values(source.elements());
  for (std::size_t n = 0; n < values.size(); ++n) values[n] = static_cast<std::uint16_t>(1 + n % 65000);
  const Array<std::uint16_t> tensor(values), copy(std::vector<std::uint16_t>(target.elements(), untouched));
  const Array<std::uint16_t> image(tile_bytes / 2);
  launch(copy_text, 128, tile_bytes, map_of(source, tensor.address()), map_of(target, copy.address()), from, to,
         image.address());

  const std::vector<std::uint16_t> tile = image.values(), stored = copy.values();
  std::vector<std::uint16_t> wanted(target.elements(), untouched);
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < 64 * panels; ++column) {
      const bool inside = from.token + row < source.tokens && column < source.columns;
      const std::uint16_t value = inside ? values[source.at(from.sequence, from.token + row, from.head, column)] : 0;
      ASSERT_EQ(tile[static_cast<std::size_t>(tile_byte(rows, row, column) / 2)], value) << row << " " << column;
      if (to.token + row < target.tokens && column < target.columns)
        wanted[target.at(to.sequence, to.token + row, to.head, column)] = value;
    }
  EXPECT_EQ(stored, wanted);
}

// One half of the numbers is added to what is there, the other replaces it; what follows stays.
constexpr const char* add_text = R"(
#include "sm90/ptx/tma.cuh"
using namespace tessera;
extern "C" __global__ __launch_bounds__(128) void test(float* sums) {
  __shared__ __align__(128) float numbers[1024];
  const float four[] = {1.f + threadIdx.x, 2, 3, 4}, more[] = {5, 6, 7, 8.f + threadIdx.x};
  sm90::store_four(sm90::shared_address(numbers + 4 * threadIdx.x), four);
  sm90::store_four(sm90::shared_address(numbers + 512 + 4 * threadIdx.x), more);
  sm90::publish_shared();
  __syncthreads();
  if (threadIdx.x > 0) return;
  sm90::add_floats<2048>(sums, sm90::shared_address(numbers));
  sm90::store_bytes<2048>(sums + 512, sm90::shared_address(numbers + 512));
  sm90::wait_stores_read();
  sm90::wait_stores();
})";

TEST_F(GpuPtx, CopiesAddToMemory) {
  std::vector<float> values(1025, 0.5f), wanted(1025, 0.5f);
  for (std::size_t n = 0; n < 128; ++n) {
    const auto x = static_cast<float>(n);
    for (std::size_t e = 0; e < 4; ++e) {
      wanted[4 * n + e] += e == 0 ? 1 + x : static_cast<float>(1 + e);
      wanted[512 + 4 * n + e] = e == 3 ? 8 + x : static_cast<float>(5 + e);
    }
  }
  const Array<float> sums(values);
  launch(add_text, 128, 0, sums.address());
  EXPECT_EQ(sums.values(), wanted);
}

// --- wgmma.cuh

constexpr int keys = 96, depth = 128, columns = 64;  // of K, of Q and K, of V

// S = Q K^T from shared memory, O = P V with P, the packed S, in registers, O by stmatrix.
std::string product_text(Element element) {
  return text(R"(
#include "sm90/ptx/math.cuh"
#include "sm90/ptx/tma.cuh"
#include "sm90/ptx/wgmma.cuh"
using namespace tessera;
constexpr int keys = )",
              keys, ", depth = ", depth, ", columns = ", columns, R"(;
constexpr auto element = gpu::Element::)",
              element == Element::bf16 ? "bf16" : "f16", R"(;
constexpr int q_bytes = 64 * depth * 2, k_bytes = keys * depth * 2, v_bytes = keys * columns * 2;
extern "C" __global__ __launch_bounds__(128) void test(const UInt32* images, float* scores, UInt32* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  UInt32* const words = reinterpret_cast<UInt32*>(memory);
  constexpr int input_words = (q_bytes + k_bytes + v_bytes) / 4, out_words = 64 * columns / 2;
  for (int n = threadIdx.x; n < input_words; n += 128) words[n] = images[n];
  sm90::publish_shared();
  __syncthreads();
  const UInt32 Q = sm90::shared_address(memory), K = Q + q_bytes, V = K + k_bytes, tile = V + v_bytes;

  float S[keys / 2], O[columns / 2];
#pragma unroll
  for (int n = 0; n < columns / 2; ++n) O[n] = 1e30f;  // the first product does not add
  const auto q = sm90::along_rows(Q), k = sm90::along_rows(K), v = sm90::over_rows(V, keys);
  const auto q_at = [&](int n) { return q.plus(sm90::step_along_rows(64, n)); };
  const auto k_at = [&](int n) { return k.plus(sm90::step_along_rows(keys, n)); };
  sm90::begin_products();
  sm90::Wgmma<keys, element>::set(S, q_at(0), k_at(0));
#pragma unroll
  for (int n = 1; n < depth / 16; ++n) sm90::Wgmma<keys, element>::add(S, q_at(n), k_at(n));
  sm90::commit_products();
  sm90::wait_products<0>();
  sm90::arrived(S);
#pragma unroll
  for (int n = 0; n < keys / 2; ++n) scores[threadIdx.x * (keys / 2) + n] = S[n];

  UInt32 P[keys / 4];
#pragma unroll
  for (int n = 0; n < keys / 4; ++n) P[n] = sm90::packed<element>(S[2 * n], S[2 * n + 1]);
  sm90::begin_products();
#pragma unroll
  for (int n = 0; n < keys / 16; ++n)
    sm90::Wgmma<columns, element>::add(O, &P[4 * n], v.plus(sm90::step_over_rows(n)), n > 0);
  sm90::commit_products();
  sm90::wait_products<0>();
  sm90::arrived(O);

#pragma unroll
  for (int n = 0; n < columns / 16; ++n)
    sm90::store_matrix(
        tile + sm90::tile_byte(64, sm90::store_row(threadIdx.x), sm90::store_column(threadIdx.x, n)),
        sm90::packed<element>(O[8 * n], O[8 * n + 1]), sm90::packed<element>(O[8 * n + 2], O[8 * n + 3]),
        sm90::packed<element>(O[8 * n + 4], O[8 * n + 5]), sm90::packed<element>(O[8 * n + 6], O[8 * n + 7]));
  __syncthreads();
  for (int n = threadIdx.x; n < out_words; n += 128) out[n] = words[input_words + n];
})");
}

std::uint16_t narrowed(Element element, float x) {
  return element == Element::bf16 ? narrow<BF16>(x).bits : narrow<F16>(x).bits;
}

// A matrix of numbers that 16 bits hold, and its image in shared memory.
struct Matrix {
  int rows, columns;
  std::vector<float> numbers;
  template <class Value>
  Matrix(int rows, int columns, Value value) : rows(rows), columns(columns) {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; ++c) numbers.push_back(static_cast<float>(value(r, c)));
  }
  float at(int row, int column) const { return numbers[static_cast<std::size_t>(row * columns + column)]; }
  void append_image(Element element, std::vector<std::uint16_t>& out) const {
    const std::size_t begin = out.size();
    out.resize(begin + numbers.size());
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; ++c)
        out[begin + static_cast<std::size_t>(tile_byte(rows, r, c) / 2)] = narrowed(element, at(r, c));
  }
};

class GpuProducts : public HopperWith<Element> {};

// Numbers are small integers, so that sums are exact in any order; they differ along every index.
TEST_P(GpuProducts, FromSharedMemoryAndFromRegistersAndStoredMatrices) {
  const Element element = GetParam();
  const Matrix Q(64, depth, [](int i, int d) { return (i * 7 + d * 3) % 3 - 1; });
  const Matrix K(keys, depth, [](int j, int d) { return (j * 5 + d * 11 + j * d) % 3 - 1; });
  const Matrix V(keys, columns, [](int j, int d) { return (j * 3 + d * 5) % 5 - 2; });
  std::vector<std::uint16_t> images;
  Q.append_image(element, images), K.append_image(element, images), V.append_image(element, images);
  const auto shared_bytes = static_cast<unsigned>(images.size() * 2 + 64 * columns * 2);
  const Array<std::uint16_t> input(images), output(64 * columns);
  const Array<float> scores(64 * keys);
  launch(product_text(element), 128, shared_bytes, input.address(), scores.address(), output.address());

  const Matrix S(64, keys, [&](int i, int j) {
    float sum = 0;
    for (int d = 0; d < depth; ++d) sum += Q.at(i, d) * K.at(j, d);
    return sum;
  });
  const std::vector<float> got = scores.values();
  for (int thread = 0; thread < 128; ++thread)
    for (int n = 0; n < keys / 2; ++n) {
      const int row = sm90::accumulator_row(thread, n), column = sm90::accumulator_column(thread, n);
      ASSERT_EQ(got[static_cast<std::size_t>(thread * (keys / 2) + n)], S.at(row, column)) << row << " " << column;
    }
  const std::vector<std::uint16_t> tile = output.values();
  for (int i = 0; i < 64; ++i)
    for (int d = 0; d < columns; ++d) {
      float sum = 0;
      for (int j = 0; j < keys; ++j) sum += S.at(i, j) * V.at(j, d);
      ASSERT_EQ(tile[static_cast<std::size_t>(tile_byte(64, i, d) / 2)], narrowed(element, sum)) << i << " " << d;
    }
}

INSTANTIATE_TEST_SUITE_P(All, GpuProducts, testing::Values(Element::f16, Element::bf16));

// --- math.cuh

constexpr const char* math_text = R"(
#include "sm90/ptx/math.cuh"
using namespace tessera;
extern "C" __global__ void test(const float* x, int count, float* power, UInt32* f16, UInt32* bf16) {
  for (int n = threadIdx.x; n < count; n += blockDim.x) {
    power[n] = sm90::exp2_of(x[n]);
    f16[n] = sm90::packed<gpu::Element::f16>(x[n], -x[n]);
    bf16[n] = sm90::packed<gpu::Element::bf16>(x[n], -x[n]);
  }
})";

TEST_F(GpuPtx, ExponentialsAndPairsRoundAsTheHostDoes) {
  std::vector<float> x{0, 1, -1, 1 + 0x1p-8f, 1 + 0x1p-11f, 1 + 3 * 0x1p-11f, -127, -1000, -INFINITY};
  for (float step = -150; step < 120; step += 0.0371f) x.push_back(step);
  const std::size_t count = x.size();
  const Array<float> input(x), power(count);
  const Array<std::uint32_t> f16(count), bf16(count);
  launch(math_text, 128, 0, input.address(), static_cast<int>(count), power.address(), f16.address(), bf16.address());
  const std::vector<float> powers = power.values();
  const std::vector<std::uint32_t> halves = f16.values(), brains = bf16.values();
  for (std::size_t n = 0; n < count; ++n) {
    const double exact = std::exp2(static_cast<double>(x[n]));
    const double wanted = exact < 0x1p-126 ? 0 : exact;  // subnormal numbers become 0
    EXPECT_NEAR(powers[n], wanted, 0x1p-22 * wanted) << x[n];
    const auto pair = [&](Element element) {
      return narrowed(element, x[n]) | static_cast<std::uint32_t>(narrowed(element, -x[n])) << 16;
    };
    EXPECT_EQ(halves[n], pair(Element::f16)) << x[n];
    EXPECT_EQ(brains[n], pair(Element::bf16)) << x[n];
  }
  EXPECT_EQ(powers[0], 1);
}

}  // namespace
}  // namespace tessera::test
