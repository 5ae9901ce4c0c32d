// SPDX-License-Identifier: Apache-2.0
// Views that share memory: the arithmetic against a count of bytes, legal layouts that must be accepted, and merging in
// place. The sentences of the refusals are rows of tests/api/check_rows.hpp.
// Links tessera_cases. Implements docs/algorithm.md, "Aliasing".
#include "core/overlap.hpp"

#include <map>
#include <random>

#include "core/tensor.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

Tensor view(std::int64_t address, Type type, const std::vector<std::array<std::int64_t, 2>>& dims) {
  Tensor t;
  t.data = reinterpret_cast<void*>(address), t.type = type, t.ndim = static_cast<std::int32_t>(dims.size());
  for (std::size_t i = 0; i < dims.size(); ++i) t.shape[i] = dims[i][0], t.strides[i] = dims[i][1];
  return t;
}

// How many elements use each byte: the definition.
std::map<std::int64_t, int> bytes_of(const Tensor& t) {
  std::map<std::int64_t, int> used;
  for (std::int64_t e = 0; e < t.elements(); ++e) {
    std::int64_t rest = e, at = 0;
    for (int i = t.ndim; i-- > 0;) {
      const auto d = static_cast<std::size_t>(i);
      at += rest % t.shape[d] * tessera::stride(t, i), rest /= t.shape[d];
    }
    const auto size = static_cast<std::int64_t>(cases::size_of(t.type));
    for (std::int64_t byte = 0; byte < size; ++byte) ++used[reinterpret_cast<std::intptr_t>(t.data) + at * size + byte];
  }
  return used;
}

Tensor random_view(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  const Type types[] = {Type::u8, Type::f16, Type::f32, Type::f64};
  std::vector<std::array<std::int64_t, 2>> dims(static_cast<std::size_t>(1 + below(4)));
  for (auto& [size, step] : dims) size = below(40) == 0 ? 0 : 1 + below(4), step = below(25) - 6;
  return view(10000 + 8 * below(12), types[below(4)], dims);
}

TEST(Overlap, IsWhatCountingBytesSays) {
  std::mt19937 random(1);
  int itself = 0, both = 0, between = 0, far = 0;
  constexpr int rounds = 20000;
  for (int n = 0; n < rounds; ++n) {
    const Tensor a = random_view(random), b = random_view(random);
    const auto x = bytes_of(a), y = bytes_of(b);
    const bool shared = std::any_of(x.begin(), x.end(), [](const auto& byte) { return byte.second > 1; });
    const bool common = std::any_of(x.begin(), x.end(), [&](const auto& byte) { return y.count(byte.first) > 0; });
    ASSERT_EQ(overlaps_itself(a), shared) << n;
    ASSERT_EQ(overlap(a, b), common) << n;
    ASSERT_EQ(overlap(b, a), common) << n;
    const bool apart =
        x.empty() || y.empty() || x.rbegin()->first < y.begin()->first || y.rbegin()->first < x.begin()->first;
    ASSERT_EQ(touch(reach_of(a), reach_of(b)), !apart) << n;
    itself += shared, both += common, between += !common && !apart, far += apart;
  }
  // The draw has enough of each kind: sharing, and lying in each other's gaps.
  for (const int count : {itself, rounds - itself, both, rounds - both, between, far}) EXPECT_GT(count, rounds / 20);
}

TEST(Overlap, LargeViewsOfOneBuffer) {
  // q, k, v of [B, N, 3, H, D] in bf16, then the same with the heads of k and v fewer: [B, N, (Hq + 2 Hk) D].
  const std::int64_t B = 1000, N = 1000000, H = 64, D = 128, address = 1 << 20;
  const auto slice = [&](std::int64_t first, std::int64_t heads, std::int64_t row) {
    return view(address + 2 * first, Type::bf16, {{B, N * row}, {N, row}, {heads, D}, {D, 1}});
  };
  EXPECT_FALSE(overlap(slice(0, H, 3 * H * D), slice(H * D, H, 3 * H * D)));
  EXPECT_FALSE(overlap(slice(0, H, 3 * H * D), slice(2 * H * D, H, 3 * H * D)));
  EXPECT_TRUE(overlap(slice(0, H, 3 * H * D), slice(H * D - 1, H, 3 * H * D)));
  EXPECT_TRUE(overlap(slice(0, H, 3 * H * D), slice(3 * H * D - 1, 1, 3 * H * D)));
  EXPECT_FALSE(overlap(slice(0, H, (H + 8) * D), slice(H * D, 4, (H + 8) * D)));
  EXPECT_FALSE(overlaps_itself(slice(0, H, 3 * H * D)));
  EXPECT_TRUE(overlaps_itself(slice(0, H, H * D - 1)));

  // Each row of O followed by its number of LSE, which counts queries fastest.
  const Tensor o = view(address, Type::f16, {{B, N * H * (D + 2)}, {N, H * (D + 2)}, {H, D + 2}, {D, 1}});
  const auto lse = [&](std::int64_t bytes) {
    return view(address + bytes, Type::f32, {{B, N * H * (D / 2 + 1)}, {H, D / 2 + 1}, {N, H * (D / 2 + 1)}});
  };
  EXPECT_FALSE(overlap(o, lse(2 * D)));
  EXPECT_TRUE(overlap(o, lse(2 * D - 4)));

  // Backwards in memory, and a view that no address space holds.
  const Tensor up = view(address, Type::f32, {{N, 8}, {4, 1}}),
               down = view(address + 32 * N - 16, Type::f32, {{N, -8}, {4, 1}});
  EXPECT_FALSE(overlap(up, down));
  EXPECT_FALSE(overlaps_itself(down));
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_TRUE(overlap(view(address, Type::f64, {{most, most}, {most, -most}}), up));
  EXPECT_FALSE(overlaps_itself(view(address, Type::f64, {{2, most}})));
}

// Strides that are nearly the same, so that a search finds no end: it is bounded, and undecided means yes. Numbers that
// fail the test of divisibility count, too; millions of them would be tried here, and hours would pass with three.
TEST(Overlap, ASearchEnds) {
  const std::int64_t N = 1 << 26, step = 1 << 27;
  EXPECT_TRUE(overlaps_itself(view(4096, Type::f32, {{N, step + 1}, {N, step}})));
  EXPECT_TRUE(
      overlaps_itself(view(4096, Type::f32, {{1 << 20, 8 * step + 18}, {1 << 20, 8 * step + 6}, {1 << 20, 8 * step}})));
}

// Addresses at both ends of the address space: a reach ends there.
TEST(Overlap, AtTheEndsOfTheAddressSpace) {
  const Tensor top = view(-8, Type::f64, {{1, 1}}), last = view(-8, Type::f64, {{4, 1}}),
               bottom = view(0, Type::f64, {{1, 1}}), first = view(8, Type::f64, {{4, -1}});
  EXPECT_TRUE(overlap(top, last));
  EXPECT_TRUE(overlap(bottom, first));
  EXPECT_FALSE(overlap(last, first));
  EXPECT_FALSE(overlap(top, bottom));
}

TEST(Overlap, WithoutElementsThereIsNone) {
  const Tensor empty(reinterpret_cast<void*>(4096), Type::f32, {2, 0, 1, 4});  // strides 0, 4, 4, 1
  EXPECT_FALSE(overlaps_itself(empty));
  EXPECT_FALSE(overlap(empty, empty));
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  EXPECT_FALSE(overlap(empty, view(1 << 20, Type::f64, {{most, most}, {most, -most}})));
}

// A call on slices of two buffers, [B, N, 3, H, D] for q, k, v and for their gradients, gives the bits of one on
// tensors of their own.
TEST(Overlap, PackedSlicesAreAccepted) {
  const Case spec{.name = "slices", .B = 2, .Nq = 70, .Nk = 70, .Hq = 3, .Hk = 3, .D = 16};
  CaseData data = build(spec);
  run(data);
  Buffer packed(Type::f32, {2, 70, 9, 16}), gradients(Type::f32, {2, 70, 9, 16});
  const auto slice = [](const Buffer& all, std::int64_t number) {
    Tensor t = all.tensor();
    t.shape[2] = 3;
    t.data = static_cast<std::byte*>(t.data) + number * 3 * 16 * 4;
    return t;
  };
  const Buffer* inputs[] = {&data.q, &data.k, &data.v};
  for (std::int64_t e = 0; e < packed.elements(); ++e) {
    const std::int64_t row = e / (9 * 16), inside = e % (9 * 16);
    packed.set(e, inputs[inside / 48]->get(row * 48 + inside % 48));
  }
  const Buffer o(Type::f32, {2, 70, 3, 16}), lse(Type::f32, {2, 3, 70});
  const Inputs in{.q = slice(packed, 0), .k = slice(packed, 1), .v = slice(packed, 2)};
  forward(in, {.o = o.tensor(), .lse = lse.tensor()});
  expect_same_bits(o, data.o, "o");
  backward(in, {.o = o.tensor(), .lse = lse.tensor(), .d_o = data.d_o.tensor()},
           {.dq = slice(gradients, 0), .dk = slice(gradients, 1), .dv = slice(gradients, 2)});
  const Buffer* expected[] = {&data.dq, &data.dk, &data.dv};
  for (std::int64_t e = 0; e < gradients.elements(); ++e) {
    const std::int64_t row = e / (9 * 16), inside = e % (9 * 16);
    ASSERT_EQ(gradients.get(e), expected[inside / 48]->get(row * 48 + inside % 48)) << gradients.index(e);
  }
}

// Inputs may share: one tensor as q, k, v and d_o.
TEST(Overlap, InputsMayShareMemory) {
  CaseData data = build({.name = "shared", .D = 16});
  const Inputs in{.q = data.q.tensor(), .k = data.q.tensor(), .v = data.q.tensor()};
  forward(in, data.outputs());
  backward(in, {.o = data.o.tensor(), .lse = data.lse.tensor(), .d_o = data.q.tensor()}, data.gradients());
  EXPECT_TRUE(data.o.margins_intact() && data.dq.margins_intact());
}

// A running result is merged into itself.
TEST(Overlap, MergeMayReplaceAPartial) {
  const auto numbers = [](const Shape& shape, double step) {
    Buffer b(Type::f32, shape);
    for (std::int64_t e = 0; e < b.elements(); ++e) b.set(e, std::sin(step * static_cast<double>(e)));
    return b;
  };
  const Shape o_shape{2, 5, 3, 4}, lse_shape{2, 3, 5};
  const Buffer o1 = numbers(o_shape, 1), lse1 = numbers(lse_shape, 2), o2 = numbers(o_shape, 3);
  const Buffer lse2 = numbers(lse_shape, 4), o(Type::f32, o_shape), lse(Type::f32, lse_shape);
  const std::vector<Outputs> parts{{.o = o1.tensor(), .lse = lse1.tensor()}, {.o = o2.tensor(), .lse = lse2.tensor()}};
  merge(parts, {.o = o.tensor(), .lse = lse.tensor()});
  merge(parts, parts[1]);
  expect_same_bits(o2, o, "o");
  expect_same_bits(lse2, lse, "lse");
}

}  // namespace
}  // namespace tessera::test
