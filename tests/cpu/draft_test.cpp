// SPDX-License-Identifier: Apache-2.0
// Trees of draft tokens and positions: a chain has the bits of `causal`, positions in line those of a call without
// them, in pages too; bits that nobody asks for do not count. Accuracy is judged by the tables (cases/caches.cpp).
// Links tessera_cases. Implements docs/algorithm.md, "Mask".
#include "tests/support/pages.hpp"

namespace tessera::test {
namespace {

// Few queries and many, around 8 (decoding), 32 (a word), 64 (a block of queries); keys in one tile and in several.
template <class Body>
void in_each_shape(Body body) {
  for (const std::string& kernel : available_kernels())
    for (const Type type : {Type::f32, Type::bf16})
      for (const std::int64_t queries : {1, 7, 8, 9, 33, 64, 65, 130}) {
        Case spec{.name = "draft", .B = 2, .Nq = queries, .Nk = 450, .Hq = 4, .Hk = 2, .D = 32, .type = type};
        spec.used_k = {450, static_cast<std::int32_t>(queries)}, spec.backward = false;
        SCOPED_TRACE(kernel + " " + cases::name_of(type) + " queries " + std::to_string(queries));
        body(spec, kernel);
        ++case_count.judged;
        if (testing::Test::HasFatalFailure()) return;
      }
}

CaseData attended(const Case& spec, const std::string& kernel) {
  CaseData data = build(spec);
  run(data, {.threads = 2, .kernel = kernel.c_str()});
  return data;
}

void expect_same(const CaseData& a, const CaseData& b) {
  expect_same_bits(a.o, b.o, "o");
  expect_same_bits(a.lse, b.lse, "lse");
}

TEST(Chain, HasTheBitsOfCausal) {
  in_each_shape([](Case spec, const std::string& kernel) {
    spec.options.causal = true;
    const CaseData causal = attended(spec, kernel);
    spec.tree = Tree::chain;
    expect_same(causal, attended(spec, kernel));
    const CaseData data = build(spec);
    const PagedCase paged(data, {.page_size = 16, .leftpad = {3, 0}});
    forward(paged.in, data.outputs(), data.options(), {.kernel = kernel.c_str()});
    expect_same(causal, data);
    spec.options.causal = false;
    expect_same(causal, attended(spec, kernel));
  });
}

TEST(Chain, HasTheBitsOfCausalBesideOtherOptions) {
  in_each_shape([](Case spec, const std::string& kernel) {
    spec.options.causal = true, spec.options.window_left = 100, spec.options.softcap = 3;
    spec.slopes = Slopes::per_head, spec.sinks = Sinks::finite;
    const CaseData causal = attended(spec, kernel);
    spec.tree = Tree::chain, spec.positions = true;
    expect_same(causal, attended(spec, kernel));
  });
}

// Where each query stands is what the diagonal says: nothing changes, also where the call is a part of a larger one.
TEST(Positions, InLineChangeNothing) {
  in_each_shape([](Case spec, const std::string& kernel) {
    spec.options = {.causal = true, .window_left = 60, .row0 = 90, .col0 = 70};
    spec.slopes = Slopes::per_head;
    const CaseData plain = attended(spec, kernel);
    CaseData data = build(spec);
    Buffer positions(Type::i32, {2, spec.Nq});
    for (std::int64_t e = 0; e < positions.elements(); ++e)
      positions.set(e, static_cast<double>(spec.used_k[static_cast<std::size_t>(e / spec.Nq)] - spec.Nq + e % spec.Nq));
    Inputs in = data.inputs();
    in.positions = positions.tensor();
    forward(in, data.outputs(), data.options(), {.kernel = kernel.c_str()});
    expect_same(plain, data);
  });
}

// A sequence's rows depend on its own tree alone.
TEST(Trees, OfNeighboursDoNotCount) {
  in_each_shape([](Case spec, const std::string& kernel) {
    spec.tree = Tree::random, spec.positions = true, spec.options.window_left = 40;
    const CaseData both = attended(spec, kernel);
    const CaseData alone = build(spec);
    for (std::int64_t b = 0; b < 2; ++b) {
      Inputs in = alone.inputs();
      Outputs out = alone.outputs();
      for (Tensor* t : {&in.q, &in.k, &in.v, &in.seqused_k, &in.tree_mask, &in.positions, &out.o, &out.lse}) {
        const auto bytes = static_cast<std::int64_t>(cases::size_of(t->type));
        t->data = static_cast<std::byte*>(t->data) + b * t->strides[0] * bytes;
        t->shape[0] = 1;
      }
      forward(in, out, alone.options(), {.threads = 1, .kernel = kernel.c_str()});
    }
    expect_same(both, alone);
  });
}

}  // namespace
}  // namespace tessera::test
