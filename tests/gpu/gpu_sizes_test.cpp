// SPDX-License-Identifier: Apache-2.0
// Sizes at which 32 bits and a grid's limits end: over 2^31 elements in one tensor, over 65535 batch*heads.
// Links tessera_cases. Implements the contract's list "Edge cases that broke others".
#include <cmath>
#include <cstring>

#include "tests/gpu/support.hpp"

namespace tessera::test {
namespace {

class GpuSizes : public GpuWith<std::string> {};

INSTANTIATE_TEST_SUITE_P(All, GpuSizes, testing::ValuesIn(all_rungs()));

// --- many heads ------------------------------------------------------------------------------------------------------

class GpuHeads : public Gpu {};

void expect_all_rungs_agree(Case spec) {
  spec.options.deterministic = false;  // for `tiled`; it changes nothing of the others
  std::vector<Execution> executions;
  const std::vector<std::string> rungs = all_rungs();
  for (const std::string& rung : rungs) executions.push_back({.device = gpu, .kernel = rung.c_str()});
  for (const CaseReport& report : run_case(spec, executions)) {
    EXPECT_TRUE(report.ok && !report.skipped) << to_text(report);
  }
}

TEST_F(GpuHeads, SeventyThousandInManySequences) {
  expect_all_rungs_agree({.name = "many_sequences", .B = 35000, .Nq = 3, .Nk = 5, .Hq = 2, .Hk = 2, .D = 8});
}

TEST_F(GpuHeads, SeventyThousandInOneSequence) {
  expect_all_rungs_agree({.name = "many_heads", .B = 1, .Nq = 3, .Nk = 5, .Hq = 70000, .Hk = 35000, .D = 8});
}

// --- large tensors ---------------------------------------------------------------------------------------------------

constexpr std::int64_t heads = 64, dim = 64, width = heads * dim;
constexpr std::int64_t tokens = (std::int64_t{1} << 31) / width + 1000;
static_assert(tokens * width > std::int64_t{1} << 31);
constexpr Type element = Type::bf16;

// A tensor that lies on the GPU alone. Its memory is not initialised.
struct Huge {
  DeviceMemory memory;
  Tensor view;
  Huge(Type type, std::initializer_list<std::int64_t> shape) :
      memory(gpu, static_cast<std::size_t>(Tensor(nullptr, type, shape).elements()) * size_of(type)),
      view(memory.data(), type, shape, gpu) {}
  explicit Huge(const Buffer& list) : Huge(list.type(), {list.elements()}) {  // small, after all: a list of lengths
    memory.write(static_cast<const std::byte*>(list.tensor().data), memory.size());
  }
};

std::size_t bytes_of(const Buffer& contiguous) {
  return static_cast<std::size_t>(contiguous.elements()) * size_of(contiguous.type());
}

// A contiguous tensor's numbers become the last ones of a huge one.
void write_at_end(const Huge& huge, const Buffer& patch) {
  huge.memory.write(static_cast<const std::byte*>(patch.tensor().data), bytes_of(patch),
                    huge.memory.size() - bytes_of(patch));
}
// The last numbers of a huge tensor, in the shape of `like`.
Buffer read_at_end(const Huge& huge, const Buffer& like) {
  Buffer patch(like.type(), Shape(like.tensor().shape.begin(), like.tensor().shape.begin() + like.tensor().ndim));
  huge.memory.read(static_cast<std::byte*>(patch.tensor().data), bytes_of(patch), huge.memory.size() - bytes_of(patch));
  return patch;
}
// The last rows of each head of an LSE [heads, rows] (or [1, heads, rows]).
Buffer read_last_rows(const Huge& lse, const Buffer& like, std::int64_t rows) {
  Buffer patch(Type::f32, {1, heads, like.size(2)});
  const std::size_t bytes = static_cast<std::size_t>(like.size(2)) * sizeof(float);
  for (std::int64_t h = 0; h < heads; ++h)
    lse.memory.read(static_cast<std::byte*>(patch.tensor().data) + static_cast<std::size_t>(h) * bytes, bytes,
                    static_cast<std::size_t>((h + 1) * rows) * sizeof(float) - bytes);
  return patch;
}

Buffer lengths(const std::vector<double>& values) {
  return of(Type::i32, {static_cast<std::int64_t>(values.size())}, values);
}
DeviceMemory workspace_of(const Plan& plan) { return DeviceMemory(gpu, plan.workspace_size()); }
Execution lent(const std::string& kernel, const DeviceMemory& workspace) {
  return {.device = gpu, .workspace = workspace.data(), .workspace_bytes = workspace.size(), .kernel = kernel.c_str()};
}

// Packed: the first and the last sequence are used, what lies between them is not. Only its own length may count for
// the last one, so it has the bits that it has alone.
TEST_P(GpuSizes, TheLastOfPackedSequencesHasTheBitsItHasAlone) {
  const std::string& rung = GetParam();
  // The gradients of `tiled` are summed in any order; the workspace of `warp` holds up to 16 copies of dQ.
  const bool exact = rung != "tiled" && rung != "warp";
  Case spec{.name = "last", .Nq = 200, .Nk = 200, .Hq = heads, .Hk = heads, .D = dim};
  spec.type = element, spec.options.causal = true, spec.backward = exact;
  const CaseData alone = *ran_on(rung, spec);

  const Huge q(element, {tokens, heads, dim}), k(element, {tokens, heads, dim}), v(element, {tokens, heads, dim});
  const Huge o(element, {tokens, heads, dim}), lse(Type::f32, {heads, tokens});
  const Huge cu(lengths({0, 100, double(tokens - 200), double(tokens)}));
  const Huge used(lengths({100, 0, 200}));
  write_at_end(q, alone.q), write_at_end(k, alone.k), write_at_end(v, alone.v);
  Inputs inputs;
  inputs.q = q.view, inputs.k = k.view, inputs.v = v.view;
  inputs.cu_seqlens_q = inputs.cu_seqlens_k = cu.view, inputs.seqused_q = inputs.seqused_k = used.view;
  const Outputs outputs{.o = o.view, .lse = lse.view};
  const Plan plan = Plan::forward(inputs, outputs, spec.options, {.device = gpu, .kernel = rung.c_str()});
  const DeviceMemory workspace = workspace_of(plan);
  plan.run(inputs, outputs, spec.options, lent(rung, workspace));
  expect_same_bits(alone.o, read_at_end(o, alone.o), "o");
  expect_same_bits(alone.lse, read_last_rows(lse, alone.lse, tokens), "lse");
  if (!exact || HasFailure()) return;

  const Huge d_o(element, {tokens, heads, dim}), dq(element, {tokens, heads, dim});
  const Huge dk(element, {tokens, heads, dim}), dv(element, {tokens, heads, dim});
  write_at_end(d_o, alone.d_o);
  const Saved saved{.o = o.view, .lse = lse.view, .d_o = d_o.view, .d_lse = {}};
  const Gradients gradients{.dq = dq.view, .dk = dk.view, .dv = dv.view, .dbias = {}, .dsinks = {}};
  const Plan backward = Plan::backward(inputs, saved, gradients, spec.options, {.device = gpu, .kernel = rung.c_str()});
  const DeviceMemory larger = workspace_of(backward);
  backward.run(inputs, saved, gradients, spec.options, lent(rung, larger));
  expect_same_bits(alone.dq, read_at_end(dq, alone.dq), "dq");
  expect_same_bits(alone.dk, read_at_end(dk, alone.dk), "dk");
  expect_same_bits(alone.dv, read_at_end(dv, alone.dv), "dv");
}

double relative_difference(const Buffer& got, const std::vector<double>& expected) {
  double difference = 0, norm = 0;
  for (std::int64_t e = 0; e < got.elements(); ++e) {
    const double x = expected[static_cast<std::size_t>(e)];
    difference += (got.get(e) - x) * (got.get(e) - x), norm += x * x;
  }
  return std::sqrt(difference / norm);
}

constexpr double near = 0.01;  // several roundings to bf16; a wrong row is off by 1

// One sequence of many queries: zero but for the last ones. Zero rows of dO add nothing to the gradients of K and V, so
// those, too, are what the last queries alone would give.
TEST_F(GpuHeads, TheLastQueriesOfALongSequence) {
  const std::int64_t rows = 64;
  const Case spec{.name = "last", .Nq = rows, .Nk = 64, .Hq = heads, .Hk = heads, .D = dim, .type = element};
  const CaseData alone = *ran_on(vector_rung, spec);

  const Huge q(element, {1, tokens, heads, dim}), o(element, {1, tokens, heads, dim});
  const Huge d_o(element, {1, tokens, heads, dim}), dq(element, {1, tokens, heads, dim});
  const Huge k(element, {1, 64, heads, dim}), v(element, {1, 64, heads, dim}), lse(Type::f32, {1, heads, tokens});
  const Huge dk(element, {1, 64, heads, dim}), dv(element, {1, 64, heads, dim});
  q.memory.fill(std::byte{0}), d_o.memory.fill(std::byte{0});
  write_at_end(q, alone.q), write_at_end(k, alone.k), write_at_end(v, alone.v), write_at_end(d_o, alone.d_o);
  Inputs inputs;
  inputs.q = q.view, inputs.k = k.view, inputs.v = v.view;
  const Outputs outputs{.o = o.view, .lse = lse.view};
  const Saved saved{.o = o.view, .lse = lse.view, .d_o = d_o.view, .d_lse = {}};
  const Gradients gradients{.dq = dq.view, .dk = dk.view, .dv = dv.view, .dbias = {}, .dsinks = {}};
  const Execution planned{.device = gpu, .kernel = vector_rung};
  const Plan forward = Plan::forward(inputs, outputs, {}, planned);
  const Plan backward = Plan::backward(inputs, saved, gradients, {}, planned);
  const DeviceMemory forward_space = workspace_of(forward), backward_space = workspace_of(backward);
  forward.run(inputs, outputs, {}, lent(vector_rung, forward_space));
  backward.run(inputs, saved, gradients, {}, lent(vector_rung, backward_space));
  EXPECT_LT(relative_difference(read_at_end(o, alone.o), alone.o.values()), near) << "o";
  EXPECT_LT(relative_difference(read_last_rows(lse, alone.lse, tokens), alone.lse.values()), near) << "lse";
  EXPECT_LT(relative_difference(read_at_end(dq, alone.dq), alone.dq.values()), near) << "dq";
  EXPECT_LT(relative_difference(read_at_end(dk, alone.dk), alone.dk.values()), near) << "dk";
  EXPECT_LT(relative_difference(read_at_end(dv, alone.dv), alone.dv.values()), near) << "dv";
}

// One sequence of many keys: zero but for the last ones, alone of which O and LSE are known. Each zero key adds
// exp(0) to the sum and nothing to O.
TEST_P(GpuSizes, TheLastKeysOfALongSequence) {
  const std::string& rung = GetParam();
  const std::int64_t last = 200;
  Case spec{.name = "last", .Nq = 64, .Nk = last, .Hq = heads, .Hk = heads, .D = dim, .type = element};
  spec.backward = false, spec.f32_o = true;
  const CaseData alone = *ran_on(rung, spec);

  const Huge k(element, {1, tokens, heads, dim}), v(element, {1, tokens, heads, dim});
  const Huge q(element, {1, 64, heads, dim}), o(Type::f32, {1, 64, heads, dim}), lse(Type::f32, {1, heads, 64});
  k.memory.fill(std::byte{0}), v.memory.fill(std::byte{0});
  write_at_end(q, alone.q), write_at_end(k, alone.k), write_at_end(v, alone.v);
  Inputs inputs;
  inputs.q = q.view, inputs.k = k.view, inputs.v = v.view;
  const Outputs outputs{.o = o.view, .lse = lse.view};
  const Plan plan = Plan::forward(inputs, outputs, {}, {.device = gpu, .kernel = rung.c_str()});
  const DeviceMemory workspace = workspace_of(plan);
  plan.run(inputs, outputs, {}, lent(rung, workspace));

  std::vector<double> expected_lse = alone.lse.values(), expected_o = alone.o.values();
  for (double& x : expected_lse) x = std::log(std::exp(x) + static_cast<double>(tokens - last));
  for (std::int64_t e = 0; e < alone.o.elements(); ++e) {
    const std::int64_t h = e / dim % heads, i = e / width;
    const auto row = static_cast<std::size_t>(h * 64 + i);
    expected_o[static_cast<std::size_t>(e)] *= std::exp(alone.lse.get(h * 64 + i) - expected_lse[row]);
  }
  EXPECT_LT(relative_difference(read_at_end(o, alone.o), expected_o), 1e-3) << "o";
  EXPECT_LT(relative_difference(read_at_end(lse, alone.lse), expected_lse), 1e-5) << "lse";
}

}  // namespace
}  // namespace tessera::test
