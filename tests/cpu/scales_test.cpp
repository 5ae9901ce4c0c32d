// SPDX-License-Identifier: Apache-2.0
// K and V with types of their own and scales, and qv: forms of scales that say the same, threads, neighbours, NaN among
// 8 bits, and the same numbers written out in f32. Accuracy is judged by the tables (cases/caches.cpp) and random
// cases. Links tessera_cases. Implements docs/algorithm.md, "Types and scales of keys and values".
#include <cmath>

#include "cases/random.hpp"
#include "tests/support/support.hpp"

namespace tessera::test {
namespace {

constexpr Type bytes[] = {Type::e4m3, Type::i8};

// One query goes the way of decoding, nine that of tiles; 20 and 59 are no whole vectors.
template <class Body>
void in_each_way(Body body) {
  for (const std::string& kernel : available_kernels())
    for (const Type type : bytes)
      for (const std::int64_t queries : {1, 9})
        for (const std::int64_t dim : {64, 59}) {
          Case spec{
              .name = "cache", .B = 3, .Nq = queries, .Nk = 301, .Hq = 4, .Hk = 2, .D = dim, .Dv = dim == 64 ? 32 : 20};
          spec.used_k = {301, 290, 37}, spec.backward = false, spec.options.causal = true;
          spec.cached_k.type = spec.cached_v.type = type;
          SCOPED_TRACE(kernel + " " + cases::name_of(type) + " queries " + std::to_string(queries) + " D " +
                       std::to_string(dim));
          body(spec, kernel);
          ++case_count.judged;
          if (testing::Test::HasFatalFailure()) return;
        }
}

void attend(const CaseData& data, const Inputs& in, const std::string& kernel, int threads = 2) {
  forward(in, data.outputs(), data.options(), {.threads = threads, .kernel = kernel.c_str()});
}

void expect_same(const CaseData& a, const CaseData& b) {
  expect_same_bits(a.o, b.o, "o");
  expect_same_bits(a.lse, b.lse, "lse");
}

// Scales of each head: as [Hk], as [B,Hk], and for every key, written out and by strides of 0.
TEST(Forms, ThatSayTheSameGiveTheSameBits) {
  in_each_way([](const Case& spec, const std::string& kernel) {
    const CaseData first = build(spec), data = build(spec);
    Buffer heads = of(Type::f32, {2}, {0.03, -0.007}), all(Type::f32, {3, 301, 2}), one = of(Type::f32, {1}, {0.02});
    for (std::int64_t e = 0; e < all.elements(); ++e) all.set(e, heads.get(e % 2));
    Tensor sequences = heads.tensor(), keys = heads.tensor();
    sequences.ndim = 2, sequences.shape = {3, 2, 0, 0}, sequences.strides = {0, 1, 0, 0};
    keys.ndim = 3, keys.shape = {3, 301, 2, 0}, keys.strides = {0, 0, 1, 0};
    Inputs in = data.inputs();
    in.k_scale = in.v_scale = heads.tensor();
    attend(first, in, kernel);
    // One group of dims is all of them.
    Tensor groups = all.tensor();
    groups.ndim = 4, groups.shape[3] = 1, groups.strides[3] = 1;
    for (const Tensor& form : {sequences, keys, all.tensor(), groups}) {
      in.k_scale = in.v_scale = form;
      attend(data, in, kernel);
      expect_same(first, data);
    }
    Tensor heads_of_one = one.tensor();
    heads_of_one.shape[0] = 2, heads_of_one.strides[0] = 0;
    in.k_scale = in.v_scale = one.tensor();
    attend(first, in, kernel);
    in.k_scale = in.v_scale = heads_of_one;
    attend(data, in, kernel);
    expect_same(first, data);
  });
}

// Of the dims of a row, group g is scaled as if it were a row of its own: numbers that were multiplied by powers of two
// before, and the inverse as scales, give the bits of no scales.
TEST(Groups, HaveScalesOfTheirOwn) {
  for (const std::string& kernel : available_kernels())
    for (const std::int64_t queries : {1, 9}) {
      Case spec{.name = "groups", .Nq = queries, .Nk = 70, .Hq = 3, .Hk = 1, .D = 300, .Dv = 256, .backward = false};
      spec.cached_k.type = Type::f32, spec.cached_v.type = Type::f16;  // f32: as many numbers as f16 has are exact
      const CaseData plain = build(spec);
      CaseData data = build(spec);
      Buffer ones(Type::f32, {1, 70, 1, 3}), k_scale(Type::f32, {1, 70, 1, 3}), v_scale(Type::f32, {1, 70, 1, 2});
      for (std::int64_t e = 0; e < ones.elements(); ++e) ones.set(e, 1), k_scale.set(e, std::exp2(e % 7 - 3));
      for (std::int64_t e = 0; e < v_scale.elements(); ++e) v_scale.set(e, std::exp2(e % 5 - 2));
      for (std::int64_t j = 0; j < 70; ++j) {
        for (std::int64_t d = 0; d < 300; ++d)
          data.k.set(j * 300 + d, plain.k.get(j * 300 + d) / k_scale.get(j * 3 + d / 128));
        for (std::int64_t d = 0; d < 256; ++d)
          data.v.set(j * 256 + d, plain.v.get(j * 256 + d) / v_scale.get(j * 2 + d / 128));
      }
      Inputs with = data.inputs(), without = plain.inputs();
      with.q = without.q, with.k_scale = k_scale.tensor(), with.v_scale = v_scale.tensor();
      without.k_scale = ones.tensor(), without.v_scale = ones.tensor();
      without.v_scale.shape[3] = 2;
      attend(data, with, kernel), attend(plain, without, kernel);
      expect_same(plain, data);
      ++case_count.judged;
    }
}

// With scales that are powers of two, the products are numbers of f32: the same call on those has the same bits.
TEST(Numbers, AreThoseOfTheProductsInF32) {
  in_each_way([](const Case& spec, const std::string& kernel) {
    CaseData data = build(spec);
    Case plain = spec;
    plain.cached_k = plain.cached_v = {};
    CaseData wide = build(plain);
    Buffer scale(Type::f32, {3, 301, 2});
    for (std::int64_t e = 0; e < scale.elements(); ++e) scale.set(e, std::exp2(-static_cast<double>(e % 9)));
    for (const bool value : {false, true}) {
      const Buffer& from = value ? data.v : data.k;
      Buffer& to = value ? wide.v : wide.k;
      const std::int64_t width = from.size(3);
      for (std::int64_t e = 0; e < from.elements(); ++e) to.set(e, from.get(e) * scale.get(e / width));
    }
    Inputs in = data.inputs();
    in.q = wide.q.tensor(), in.k_scale = in.v_scale = scale.tensor();
    attend(data, in, kernel);
    // Matrix units compute plain f32 otherwise.
    attend(wide, wide.inputs(), kernel == "amx" || kernel == "avx512bf16" ? "avx512" : kernel);
    expect_same(wide, data);
  });
}

TEST(Threads, AnyNumberGivesTheSameBits) {
  const auto kernels = available_kernels();
  for (std::uint64_t seed = 300; seed < 340; ++seed) {
    const Case spec = random_cache_case(seed);
    SCOPED_TRACE(describe(spec));
    const std::string& kernel = kernels[seed % kernels.size()];
    const CaseData one = build(spec);
    attend(one, one.inputs(), kernel, 1);
    for (const int threads : {2, 7}) {
      const CaseData other = build(spec);
      attend(other, other.inputs(), kernel, threads);
      expect_same(one, other);
    }
    ++case_count.judged;
    if (HasFatalFailure()) return;
  }
}

TEST(Batch, ASequenceAloneHasTheSameBits) {
  in_each_way([](Case spec, const std::string& kernel) {
    spec.cached_k.scales = Scales::per_key, spec.cached_v.scales = Scales::per_sequence;
    const CaseData all = build(spec), alone = build(spec);
    attend(all, all.inputs(), kernel);
    for (std::int64_t b = 0; b < 3; ++b) {
      Inputs in = alone.inputs();
      Outputs out = alone.outputs();
      for (Tensor* t : {&in.q, &in.k, &in.v, &in.seqused_k, &in.k_scale, &in.v_scale, &out.o, &out.lse}) {
        t->data =
            static_cast<std::byte*>(t->data) + b * t->strides[0] * static_cast<std::int64_t>(cases::size_of(t->type));
        t->shape[0] = 1;
      }
      forward(in, out, alone.options(), {.threads = 1, .kernel = kernel.c_str()});
    }
    expect_same(all, alone);
  });
}

// FlashMLA's tensors, whose first 512 columns are the values: the same call as one product over 576 dims, by views.
TEST(SecondProducts, AreAPartOfOneLongProduct) {
  constexpr std::int64_t Nq = 3, Nk = 100, D = 64, Dv = 512;
  Case spec{.name = "mla", .Nq = Nq, .Nk = Nk, .Hq = 4, .Hk = 1, .D = D + Dv, .Dv = Dv, .backward = false};
  for (const std::string& kernel : available_kernels()) {
    CaseData data = build(spec);
    Inputs whole = data.inputs(), parts;
    const auto columns = [](Tensor t, std::int64_t begin, std::int64_t end) {
      t.data = static_cast<float*>(t.data) + begin;
      t.shape[3] = end - begin;
      return t;
    };
    whole.v = columns(whole.k, 0, Dv);
    parts.q = columns(whole.q, Dv, D + Dv), parts.qv = columns(whole.q, 0, Dv);
    parts.k = columns(whole.k, Dv, D + Dv), parts.v = whole.v;
    for (std::int64_t row = 0; row < Nk; ++row)
      for (std::int64_t d = 0; d < Dv; ++d) data.v.set(row * Dv + d, data.k.get(row * (D + Dv) + d));
    const Expectation expected = expect(data);
    forward(parts, data.outputs(), data.options(), {.kernel = kernel.c_str()});
    const OutputReport o = compare("o", data.o, expected.o), lse = compare_lse(data.lse, expected.lse);
    EXPECT_TRUE(o.ok) << kernel << ": " << o.detail;
    EXPECT_TRUE(lse.ok) << kernel << ": " << lse.detail;
    ++case_count.judged;
  }
}

// A NaN of K reaches the rows that see its key, one of V its own column of every row.
TEST(Nan, InE4m3ReachesWhoSeesIt) {
  for (const std::string& kernel : available_kernels())
    for (const std::int64_t queries : {3, 70})
      for (const std::int64_t dim : {32, 20})
        for (const bool value : {false, true}) {
          Case spec{.name = "nan", .B = 2, .Nq = queries, .Nk = 90, .Hq = 4, .Hk = 2, .D = dim, .backward = false};
          spec.options.causal = !value, spec.cached_k.type = spec.cached_v.type = Type::e4m3;
          spec.cached_k.scales = spec.cached_v.scales = Scales::per_key;
          CaseData data = build(spec);
          // In sequence 0, of the second KV head. Causal: the last two queries see the key.
          static_cast<std::uint8_t*>((value ? data.v : data.k).tensor().data)[(88 * 2 + 1) * dim + 7] = 0xff;
          run(data, {.kernel = kernel.c_str()});
          for (std::int64_t e = 0; e < data.o.elements(); ++e) {
            const std::int64_t d = e % dim, h = e / dim % 4, i = e / dim / 4 % queries, b = e / dim / 4 / queries;
            const bool reached = b == 0 && h >= 2 && (value ? d == 7 : i >= queries - 2);
            ASSERT_EQ(std::isnan(data.o.get(e)), reached) << kernel << " " << data.o.index(e);
          }
          ++case_count.judged;
        }
}

TEST(Plans, SayWhatKeysAreAndWhyAKernelGaveWay) {
  Case spec{.name = "plan", .B = 2, .Nq = 1, .Nk = 64, .Hq = 2, .Hk = 1, .type = Type::bf16, .backward = false};
  spec.cached_k = {Type::e4m3, Scales::per_key}, spec.cached_v = {Type::i8, Scales::one};
  const CaseData data = build(spec);
  const std::string text = Plan::forward(data.inputs(), data.outputs()).describe();
  const auto holds = [&](const std::string& part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(holds("bf16, K e4m3, scales of K per key and head, V i8, scales of V per head")) << text;
  spec.cached_k = {.type = Type::f16};
  const CaseData other = build(spec);
  const std::string refused = Plan::forward(other.inputs(), other.outputs()).describe();
  for (const auto& [kernel, unit] : {std::pair{"amx", "the matrix unit"}, {"avx512bf16", "dot products of bf16"}}) {
    const auto kernels = available_kernels();
    if (std::find(kernels.begin(), kernels.end(), kernel) == kernels.end()) continue;
    const std::string reason =
        std::string("k or v has a type, or scales, for which ") + unit + " would stay idle; only by name";
    EXPECT_NE(refused.find(reason), std::string::npos) << refused;
    EXPECT_EQ(text.find(reason), std::string::npos) << text;  // 8 bits are packed as bf16
  }
}

}  // namespace
}  // namespace tessera::test
