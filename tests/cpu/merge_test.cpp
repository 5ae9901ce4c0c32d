// Splitting keys into parts, forward on each, merge: the whole's result; then backward per part: the whole's gradients.
// Links tessera_cases.
// Implements docs/algorithm.md, "Merge".
#include <limits>

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

TEST(Merge, OfOnePartIsThatPart) {
  const Buffer o1 = of(Type::f32, {1, 2, 1, 2}, {1, -2, 3, 4}), lse1 = of(Type::f32, {1, 1, 2}, {-300, 5});
  const Buffer o(Type::f32, {1, 2, 1, 2}), lse(Type::f32, {1, 1, 2});
  merge({{.o = o1.tensor(), .lse = lse1.tensor()}}, {.o = o.tensor(), .lse = lse.tensor()});
  expect_same_bits(o, o1, "o");
  expect_same_bits(lse, lse1, "lse");
}

}  // namespace
}  // namespace tessera::test
