// SPDX-License-Identifier: Apache-2.0
// The oracle's oracle: gradients of the reference kernel against central differences in float64, its outputs against
// an independent float64 text (cases/model.cpp), and visibility, order of operations and LSE against numbers by hand.
// Links tessera_cases. Implements docs/algorithm.md's claim that its formulas were checked.
#include <cmath>
#include <limits>

#include "cases/model.hpp"
#include "cases/random.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
const Execution oracle{.threads = 1, .kernel = "reference"};

// The same options on a problem so small that every element can be differentiated.
Case shrunk(Case c) {
  c.type = Type::f64, c.distribution = Distribution::normal, c.options.accumulate = false;
  c.style = c.style == Style::broadcast ? Style::gaps : c.style;  // elements that share memory have no derivative alone
  c.f32_o = c.f32_do = c.f32_grads = false, c.no_lse = false, c.grads = {};
  c.dlse = true;
  c.endless_k = 0;
  const std::int64_t ratio = c.Hk == 0 ? 0 : std::min<std::int64_t>(c.Hq / c.Hk, 3);
  c.Dv = c.dim_v() == c.D ? 0 : 2, c.D = std::min<std::int64_t>(c.D, 3);
  c.Hk = std::min<std::int64_t>(c.Hk, 2), c.Hq = c.Hk * ratio;
  c.B = std::min<std::int64_t>(c.B, 2), c.Nq = c.Nq % 6 + 1, c.Nk = c.Nk % 7 + 1;
  for (auto* list : {&c.used_q, &c.used_k}) list->resize(list->empty() ? 0 : static_cast<std::size_t>(c.batches()));
  for (std::size_t b = 0; b < c.packed_q.size(); ++b) c.packed_q[b] %= 5, c.packed_k[b] %= 6;
  c.front_q %= 3, c.front_k %= 3, c.tail_q %= 3, c.tail_k %= 3;
  for (std::size_t b = 0; b < c.used_q.size(); ++b) c.used_q[b] %= 1 + (c.packed() ? c.packed_q[b] : int(c.Nq));
  for (std::size_t b = 0; b < c.used_k.size(); ++b) c.used_k[b] %= 1 + (c.packed() ? c.packed_k[b] : int(c.Nk));
  Options& o = c.options;
  if (o.window_left >= 0) o.window_left %= 5;
  if (o.window_right >= 0) o.window_right %= 5;
  o.diagonal_offset %= 3;
  o.col0 = o.row0 + (o.col0 - o.row0) % 4;
  o.max_seqlen_q = o.max_seqlen_k = -1;
  return c;
}

// loss = sum(O * dO) + sum(LSE * dLSE); rows that see nothing have no LSE to speak of.
double loss(const CaseData& data) {
  forward(data.inputs(), data.outputs(), data.options(), oracle);
  double sum = 0;
  const auto add = [&](const Buffer& x, const Buffer& weight) {
    for (std::int64_t e = 0; e < x.elements(); ++e)
      if (!x.untouched(e) && std::isfinite(x.get(e))) sum += x.get(e) * weight.get(e);
  };
  add(data.o, data.d_o);
  add(data.lse, data.d_lse);
  return sum;
}

void expect_derivative(const CaseData& data, Buffer& input, const Buffer& gradient, const char* name) {
  constexpr double step = 1e-5, tolerance = 1e-7;
  for (std::int64_t e = 0; e < input.elements(); ++e) {
    const double x = input.get(e);
    if (std::isnan(x)) {  // beyond the used length
      EXPECT_EQ(gradient.get(e), 0) << name << input.index(e) << " " << describe(data.spec);
      continue;
    }
    input.set(e, x + step);
    const double above = loss(data);
    input.set(e, x - step);
    const double below = loss(data);
    input.set(e, x);
    const double difference = (above - below) / (2 * step);
    ASSERT_NEAR(gradient.get(e), difference, tolerance * (1 + std::abs(difference)))
        << name << input.index(e) << " " << data.spec.name << ": " << describe(data.spec);
  }
}

void expect_gradients(const Case& spec) {
  CaseData data = build(shrunk(spec));
  run(data, oracle);
  expect_derivative(data, data.q, data.dq, "q");
  expect_derivative(data, data.k, data.dk, "k");
  expect_derivative(data, data.v, data.dv, "v");
  expect_derivative(data, data.bias, data.dbias, "bias");
  expect_derivative(data, data.sinks, data.dsinks, "sinks");
}

TEST(FiniteDifferences, EveryFeatureAlone) {
  for (const Case& spec : suite("features"))
    if (spec.type == Type::f32) expect_gradients(spec);
}

TEST(FiniteDifferences, RandomMixes) {
  for (std::uint64_t seed = 5000; seed < 5200; ++seed) expect_gradients(random_case(seed));
}

TEST(FiniteDifferences, CornerOptions) {
  for (const Case& spec : suite("corner"))
    if (spec.type == Type::f32 && spec.packed_q.size() < 10) expect_gradients(spec);
}

// Two texts of the same formulas, written apart, at sizes beyond a tile.
TEST(Reference, AgreesWithTheIndependentModel) {
  for (std::uint64_t seed = 7000; seed < 7080; ++seed) {
    Case spec = random_case(seed);
    spec.type = Type::f64, spec.f32_o = spec.f32_do = spec.f32_grads = false, spec.options.accumulate = false;
    const CaseData data = build(spec);
    const Expectation e = expect(data);
    for (const Expected* x : {&e.o, &e.lse, &e.dq, &e.dk, &e.dv, &e.dbias, &e.dsinks})
      for (std::size_t n = 0; n < x->exact.size(); ++n) {
        if (std::isnan(x->bound[n]) || x->exact[n] == x->model[n]) continue;
        ASSERT_NEAR(x->exact[n], x->model[n], 1e-13 * x->bound[n])
            << "output " << (x - &e.o) << " element " << n << " " << describe(spec);
      }
  }
}

// --- by hand ------------------------------------------------------------------------------------------------------

// With Q = 0 and V = the identity, O shows the visible keys: 1/count where a row sees one.
struct Picture {
  const char* name;
  Options options;
  std::int64_t used_q, used_k;        // of 3 queries and 5 keys
  std::vector<std::string> expected;  // 'x': visible
};

const Picture pictures[] = {
    {"full", {}, 3, 5, {"xxxxx", "xxxxx", "xxxxx"}},
    {"causal", {.causal = true}, 3, 5, {"xxx..", "xxxx.", "xxxxx"}},
    {"top left", {.causal = true, .alignment = Alignment::top_left}, 3, 5, {"x....", "xx...", "xxx.."}},
    {"offset",
     {.causal = true, .alignment = Alignment::offset, .diagonal_offset = -1},
     3,
     5,
     {".....", "x....", "xx..."}},
    {"window", {.window_left = 1, .window_right = 0}, 3, 5, {".xx..", "..xx.", "...xx"}},
    {"window left", {.window_left = 0}, 3, 5, {"..xxx", "...xx", "....x"}},
    {"window right", {.window_right = 1}, 3, 5, {"xxxx.", "xxxxx", "xxxxx"}},
    {"window top left",
     {.alignment = Alignment::top_left, .window_left = 1, .window_right = 2},
     3,
     5,
     {"xxx..", "xxxx.", ".xxxx"}},
    {"causal window", {.causal = true, .window_left = 1, .window_right = 3}, 3, 5, {".xx..", "..xx.", "...xx"}},
    {"rows below", {.causal = true, .alignment = Alignment::top_left, .row0 = 1}, 3, 5, {"xx...", "xxx..", "xxxx."}},
    {"columns right", {.causal = true, .alignment = Alignment::top_left, .col0 = 1}, 3, 5, {".....", "x....", "xx..."}},
    {"seqused keys", {.causal = true}, 3, 3, {"x....", "xx...", "xxx.."}},
    {"seqused both", {.causal = true}, 2, 4, {"xxx..", "xxxx.", ""}},
    {"fewer keys than queries", {.causal = true}, 3, 1, {".....", ".....", "x...."}},
};

TEST(ByHand, Visibility) {
  for (const std::string& kernel : available_kernels())
    for (const Picture& picture : pictures) {
      Case spec{.name = picture.name, .Nq = 3, .Nk = 5, .Hq = 1, .Hk = 1, .D = 5, .options = picture.options};
      spec.used_q = {static_cast<int>(picture.used_q)}, spec.used_k = {static_cast<int>(picture.used_k)};
      spec.backward = false, spec.distribution = Distribution::identity;
      CaseData data = build(spec);
      for (std::int64_t e = 0; e < picture.used_q * 5; ++e) data.q.set(e, 0);
      forward(data.inputs(), data.outputs(), data.options(), {.kernel = kernel.c_str()});
      for (std::int64_t i = 0; i < 3; ++i) {
        const std::string& row = picture.expected[static_cast<std::size_t>(i)];
        const auto count = std::count(row.begin(), row.end(), 'x');
        for (std::int64_t j = 0; j < static_cast<std::int64_t>(row.size()); ++j)
          EXPECT_FLOAT_EQ(static_cast<float>(data.o.get(i * 5 + j)),
                          row[static_cast<std::size_t>(j)] == 'x' ? 1.0f / static_cast<float>(count) : 0.0f)
              << kernel << ": " << picture.name << " row " << i << " key " << j;
        if (row.empty())
          EXPECT_TRUE(data.o.untouched(i * 5)) << picture.name;
        else if (count == 0)
          EXPECT_EQ(data.lse.get(i), -infinity) << picture.name;
        else
          EXPECT_NEAR(data.lse.get(i), std::log(static_cast<double>(count)), 1e-6) << picture.name;
      }
    }
}

// One query, one key: q = 2, k = 3, scale 0.5, softcap 2, slope 0.25 at distance 4, bias 0.125, sink -1.
TEST(ByHand, OrderOfOperations) {
  for (const std::string& kernel : available_kernels()) {
    const Buffer q = of(Type::f32, {1, 1, 1, 1}, {2}), k = of(Type::f32, {1, 1, 1, 1}, {3});
    const Buffer v = of(Type::f32, {1, 1, 1, 1}, {10}), bias = of(Type::f32, {1, 1, 1, 1}, {0.125});
    const Buffer slopes = of(Type::f32, {1}, {0.25}), sinks = of(Type::f32, {1}, {-1});
    const Buffer o(Type::f32, {1, 1, 1, 1}), lse(Type::f32, {1, 1, 1});
    const Inputs in{.q = q.tensor(),
                    .k = k.tensor(),
                    .v = v.tensor(),
                    .bias = bias.tensor(),
                    .mask = {},
                    .slopes = slopes.tensor(),
                    .sinks = sinks.tensor(),
                    .cu_seqlens_q = {},
                    .cu_seqlens_k = {},
                    .seqused_q = {},
                    .seqused_k = {},
                    .rng = {}};
    forward(in, {.o = o.tensor(), .lse = lse.tensor()}, {.scale = 0.5, .softcap = 2, .row0 = 4},
            {.kernel = kernel.c_str()});
    // s = 3, capped 2 tanh(1.5) = 1.81029650, with ALiBi 0.81029650, with bias 0.93529650;
    // LSE = log(e^0.93529650 + e^-1) = 1.0701608, p = 0.8738345.
    EXPECT_NEAR(lse.get(0), 1.0701608, 2e-7) << kernel;
    EXPECT_NEAR(o.get(0), 8.738345, 1e-5) << kernel;
  }
}

// Query head h reads KV head h / (Hq / Hk).
TEST(ByHand, GroupedHeads) {
  for (const std::string& kernel : available_kernels()) {
    const Buffer q = filled(Type::f32, {1, 1, 6, 2}, 1), k = filled(Type::f32, {1, 3, 2, 2}, 1);
    const Buffer v = of(Type::f32, {1, 3, 2, 1}, {1, 2, 1, 2, 1, 2}), o(Type::f32, {1, 1, 6, 1});
    Inputs in;
    in.q = q.tensor(), in.k = k.tensor(), in.v = v.tensor();
    forward(in, {.o = o.tensor(), .lse = {}}, {}, {.kernel = kernel.c_str()});
    for (std::int64_t h = 0; h < 6; ++h) EXPECT_FLOAT_EQ(static_cast<float>(o.get(h)), h < 3 ? 1 : 2) << kernel << h;
  }
}

}  // namespace
}  // namespace tessera::test
