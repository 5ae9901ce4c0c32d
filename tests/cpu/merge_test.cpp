// SPDX-License-Identifier: Apache-2.0
// Splitting keys into parts, forward on each, merge: the whole's result; then backward per part: the whole's gradients.
// Links tessera_cases.
// Implements docs/algorithm.md, "Merge".
#include <cmath>
#include <limits>

#include "cases/generator.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Keys [first, first + count) of a [B,Nk,H,D] tensor.
Tensor keys(const Buffer& whole, std::int64_t first, std::int64_t count) {
  Tensor part = whole.tensor();
  part.shape[1] = count;
  part.data =
      static_cast<std::byte*>(part.data) + first * part.strides[1] * static_cast<std::int64_t>(size_of(part.type));
  return part;
}

const std::vector<std::int64_t> parts = {0, 100, 1, 192, 7, 0, 85};  // of 385 keys
constexpr std::int64_t Nk = 385;

// Positions put each part where it belongs in the whole; the diagonal is the whole's.
Options options_of_part(const CaseData& data, std::int64_t first) {
  Options options = data.options();
  if (options.alignment == Alignment::bottom_right)
    options.alignment = Alignment::offset, options.diagonal_offset = Nk - data.spec.Nq;
  options.col0 += first;
  return options;
}

Inputs inputs_of_part(const CaseData& data, std::int64_t first, std::int64_t count, bool with_sink) {
  Inputs in = data.inputs();
  in.k = keys(data.k, first, count), in.v = keys(data.v, first, count);
  if (!with_sink) in.sinks = {};
  return in;
}

struct Partial {
  Buffer o, lse;
};

void expect_parts_to_make_the_whole(const Case& spec, const Expectation& expected, const Execution& execution) {
  SCOPED_TRACE(std::string(execution.kernel) + " " + describe(spec));
  CaseData data = build(spec);
  std::vector<Partial> partials;
  std::vector<Outputs> views;
  std::int64_t first = 0;
  for (std::size_t n = 0; n < parts.size(); first += parts[n++]) {
    partials.push_back(
        {Buffer(Type::f32, {spec.B, spec.Nq, spec.Hq, spec.dim_v()}), Buffer(Type::f32, {spec.B, spec.Hq, spec.Nq})});
    views.push_back({.o = partials[n].o.tensor(), .lse = partials[n].lse.tensor()});
    forward(inputs_of_part(data, first, parts[n], n == 1), views[n], options_of_part(data, first), execution);
  }
  merge(views, data.outputs(), execution);
  const auto judged = [](const OutputReport& report) { EXPECT_TRUE(report.ok) << report.name << " " << report.detail; };
  judged(compare("o", data.o, expected.o));
  judged(compare_lse(data.lse, expected.lse));

  // dQ is the sum of the parts' shares; dK and dV of a part are its own rows; the sink belongs to part 1.
  first = 0;
  for (std::size_t n = 0; n < parts.size(); first += parts[n++]) {
    Options options = options_of_part(data, first);
    options.accumulate = true;
    const Gradients gradients{.dq = data.dq.tensor(),
                              .dk = keys(data.dk, first, parts[n]),
                              .dv = keys(data.dv, first, parts[n]),
                              .dbias = {},
                              .dsinks = n == 1 ? data.dsinks.tensor() : Tensor{}};
    backward(inputs_of_part(data, first, parts[n], n == 1), data.saved(), gradients, options, execution);
  }
  judged(compare("dq", data.dq, expected.dq));
  judged(compare("dk", data.dk, expected.dk));
  judged(compare("dv", data.dv, expected.dv));
  if (data.dsinks) judged(compare("dsinks", data.dsinks, expected.dsinks));
}

TEST(Merge, PartsMakeTheWholeForwardAndBackward) {
  const Case base{.name = "merge",
                  .B = 2,
                  .Nq = 130,
                  .Nk = Nk,
                  .Hq = 4,
                  .Hk = 2,
                  .D = 32,
                  .Dv = 24,
                  .options = {.accumulate = true},
                  .f32_o = true,
                  .f32_grads = true};
  std::vector<Case> cases(5, base);
  cases[1].options.causal = true;
  cases[2].options.causal = true, cases[2].options.alignment = Alignment::offset;
  cases[2].options.diagonal_offset = -40;  // rows that see nothing in any part
  cases[3].options.dropout = 0.3, cases[3].options.seed = 6, cases[3].sinks = Sinks::some_infinite,
  cases[3].dlse = true;
  cases[4].options.causal = true, cases[4].slopes = Slopes::per_head, cases[4].sinks = Sinks::finite;
  for (Type type : {Type::f32, Type::f16, Type::bf16})
    for (Case c : cases) {
      c.type = type;
      const Expectation expected = expect(build(c));
      for (const std::string& kernel : available_kernels())
        expect_parts_to_make_the_whole(c, expected, {.kernel = kernel.c_str()});
    }
}

TEST(Merge, IsSafeForInfinitiesAndExtremes) {
  const Buffer o1 = of(Type::f32, {1, 4, 1, 1}, {1, 1, 0, 1}),
               lse1 = of(Type::f32, {1, 1, 4}, {-infinity, 0, -infinity, 1000});
  const Buffer o2 = of(Type::f32, {1, 4, 1, 1}, {3, 3, 0, 3}),
               lse2 = of(Type::f32, {1, 1, 4}, {2, 0, -infinity, -1000});
  const Buffer o(Type::f32, {1, 4, 1, 1}), lse(Type::f32, {1, 1, 4});
  merge({{.o = o1.tensor(), .lse = lse1.tensor()}, {.o = o2.tensor(), .lse = lse2.tensor()}},
        {.o = o.tensor(), .lse = lse.tensor()});
  EXPECT_EQ(o.values(), (std::vector<double>{3, 2, 0, 1}));
  EXPECT_EQ(lse.get(0), 2);
  EXPECT_NEAR(lse.get(1), 0.6931472, 1e-7);
  EXPECT_EQ(lse.get(2), -infinity);
  EXPECT_EQ(lse.get(3), 1000);
}

// Any strides and types, padded and packed, rows that no part saw and parts that saw none of a row; those may hold NaN.
TEST(Merge, AnyStridesAndPartsThatSawNothing) {
  constexpr Type types[] = {Type::f32, Type::f16, Type::bf16, Type::f64};
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Generator g(seed);
    const bool packed = g.chance(0.5);
    const std::int64_t B = packed ? 1 : g.between(1, 3), N = g.between(1, 9), H = g.between(1, 4), D = g.between(1, 20);
    const auto layout = [&](std::size_t dims, bool rows) {
      Layout out{.gap = g.between(0, 3), .step = rows ? 1 : g.between(1, 3), .shift = g.between(0, 2)};
      const std::size_t free = rows ? dims - 1 : dims;
      for (std::size_t d = 0; d + 1 < free; ++d)
        std::swap(out.order[d], out.order[static_cast<std::size_t>(
                                    g.between(static_cast<std::int64_t>(d), static_cast<std::int64_t>(free) - 1))]);
      return out;
    };
    const auto make = [&] {
      const Shape o = packed ? Shape{N, H, D} : Shape{B, N, H, D}, lse = packed ? Shape{H, N} : Shape{B, H, N};
      return Partial{Buffer(types[g.between(0, 3)], o, layout(o.size(), true)),
                     Buffer(Type::f32, lse, layout(lse.size(), false))};
    };
    const auto row_of = [&](std::int64_t e) {  // of LSE, for an element of O
      return (e / (D * H * N) * H + e / D % H) * N + e / (D * H) % N;
    };
    const double far = g.chance(0.3) ? 60 : 2;
    std::vector<Partial> partials;
    std::vector<Outputs> views;
    std::vector<bool> dark(static_cast<std::size_t>(B * H * N));
    for (std::size_t row = 0; row < dark.size(); ++row) dark[row] = g.chance(0.2);
    for (std::int64_t n = g.between(1, 5); n > 0; --n) {
      Partial part = make();
      const bool nothing = g.chance(0.15);
      for (std::int64_t row = 0; row < B * H * N; ++row)
        part.lse.set(row,
                     nothing || dark[static_cast<std::size_t>(row)] || g.chance(0.2) ? -infinity : far * g.normal());
      for (std::int64_t e = 0; e < part.o.elements(); ++e)  // else NaN
        if (part.lse.get(row_of(e)) > -infinity) part.o.set(e, g.normal());
      views.push_back({.o = part.o.tensor(), .lse = part.lse.tensor()});
      partials.push_back(std::move(part));
    }
    const Partial merged = make();
    SCOPED_TRACE(seed);
    merge(views, {.o = merged.o.tensor(), .lse = merged.lse.tensor()}, {.threads = static_cast<int>(g.between(1, 3))});
    for (std::int64_t e = 0; e < merged.o.elements(); ++e) {
      const std::int64_t row = row_of(e);
      double largest = -infinity, weights = 0, sum = 0, size = 0;
      for (const Partial& part : partials) largest = std::max(largest, part.lse.get(row));
      for (const Partial& part : partials) {
        if (part.lse.get(row) == -infinity) continue;
        const double w = std::exp(part.lse.get(row) - largest);
        weights += w, sum += w * part.o.get(e), size += w * std::abs(part.o.get(e));
      }
      const double exact = weights > 0 ? sum / weights : 0, lse = weights > 0 ? largest + std::log(weights) : -infinity;
      const double allowed = 0.501 * spacing(merged.o.type(), exact) + 1e-12 * (weights > 0 ? size / weights : 0);
      ASSERT_LE(std::abs(merged.o.get(e) - exact), allowed) << merged.o.index(e);
      const double off = lse == merged.lse.get(row) ? 0 : std::abs(merged.lse.get(row) - lse);
      ASSERT_TRUE(off == 0 || off <= 0.501 * spacing(Type::f32, lse) + 1e-12) << row << ": " << off;
    }
    ASSERT_TRUE(merged.o.margins_intact() && merged.lse.margins_intact());
    ++case_count.judged;
  }
}

TEST(Merge, InPlaceGivesTheSameBits) {
  const Shape o{2, 6, 3, 8}, lse{2, 3, 6};
  Generator g(5);
  std::vector<Partial> partials;
  std::vector<Outputs> views;
  for (int n = 0; n < 3; ++n) {
    Partial part{Buffer(Type::bf16, o, {.order = {2, 1, 0, 3}}), Buffer(Type::f32, lse)};
    for (std::int64_t e = 0; e < part.o.elements(); ++e) part.o.set(e, g.normal());
    for (std::int64_t e = 0; e < part.lse.elements(); ++e) part.lse.set(e, g.chance(0.2) ? -infinity : g.normal());
    views.push_back({.o = part.o.tensor(), .lse = part.lse.tensor()});
    partials.push_back(std::move(part));
  }
  const Partial apart{Buffer(Type::bf16, o), Buffer(Type::f32, lse)};
  merge(views, {.o = apart.o.tensor(), .lse = apart.lse.tensor()});
  merge(views, views[1]);
  expect_same_bits(apart.o, partials[1].o, "o");
  expect_same_bits(apart.lse, partials[1].lse, "lse");
}

TEST(Merge, OfOnePartIsThatPart) {
  const Buffer o1 = of(Type::f32, {1, 2, 1, 2}, {1, -2, 3, 4}), lse1 = of(Type::f32, {1, 1, 2}, {-300, 5});
  const Buffer o(Type::f32, {1, 2, 1, 2}), lse(Type::f32, {1, 1, 2});
  merge({{.o = o1.tensor(), .lse = lse1.tensor()}}, {.o = o.tensor(), .lse = lse.tensor()});
  expect_same_bits(o, o1, "o");
  expect_same_bits(lse, lse1, "lse");
}

}  // namespace
}  // namespace tessera::test
