// SPDX-License-Identifier: Apache-2.0
// Append, merge and reading on GPUs that are not there: one launch each and nothing else of the driver, every pointer
// of its parameters inside of its tensor, on the device and stream of the call. Links tessera_cases and the fake
// libcuda and NVRTC. Implements docs/architecture.md, "One call on a GPU".
#include <cstring>

#include "core/append.hpp"
#include "cuda/device.hpp"
#include "cuda/read.hpp"
#include "gpu/append.hpp"
#include "gpu/merge.hpp"
#include "tests/fake/support.hpp"
#include "tests/support/new_tokens.hpp"

namespace tessera::test {
namespace {

// Tensors in a fake GPU's memory with the views of those on the host.
struct Moved {
  int device;
  std::vector<std::unique_ptr<DeviceMemory>> held{};

  Tensor operator()(const Tensor& t) {
    if (!t) return t;
    const Extent extent = extent_of(t);
    const Device where{DeviceType::cuda, device};
    held.push_back(std::make_unique<DeviceMemory>(where, extent.end - extent.begin));
    Tensor out = t;
    out.data = static_cast<std::byte*>(held.back()->data()) + (reinterpret_cast<std::uintptr_t>(t.data) - extent.begin);
    out.device = where;
    return out;
  }
  AppendArgs operator()(const AppendArgs& a) {
    AppendArgs out = a;
    for (Tensor* t : {&out.k_new,          &out.v_new,        &out.k,           &out.v,
                      &out.cu_seqlens_new, &out.seqused_k,    &out.block_table, &out.v_block_table,
                      &out.page_indptr,    &out.page_indices, &out.slots,       &out.rotary_cos,
                      &out.rotary_sin,     &out.positions,    &out.q,           &out.q_out,
                      &out.q_positions,    &out.status,       &out.k_scale,     &out.v_scale})
      *t = (*this)(*t);
    return out;
  }
};

template <class Params>
Params params_of(const fake::Launch& launch) {
  Params params;
  EXPECT_EQ(launch.parameters.size(), sizeof(params));
  std::memcpy(static_cast<void*>(&params), launch.parameters.data(), sizeof(params));
  return params;
}

void expect_inside(const char* name, const void* data, const Tensor& of, std::initializer_list<Axis> axes) {
  if (!of) {
    EXPECT_EQ(data, nullptr) << name;
    return;
  }
  const auto bytes = static_cast<std::int64_t>(cases::size_of(of.type));
  const Extent addressed = extent_of(data, bytes, axes);
  EXPECT_TRUE(addressed.empty() || extent_of(of).holds(addressed)) << name;
}

std::int64_t last(const Tensor& t) { return t ? t.shape[static_cast<std::size_t>(t.ndim - 1)] : 0; }

void expect_in_bounds(const AppendArgs& a, const gpu::AppendParams& p) {
  const auto rows = [&](const char* name, const gpu::TypedRows& r, const Tensor& of, std::int64_t B, std::int64_t n,
                        std::int64_t H) {
    expect_inside(name, r.rows.data, of, {{B, r.rows.batch}, {n, r.rows.token}, {H, r.rows.head}, {last(of), 1}});
  };
  rows("k_new", p.k.from, a.k_new, p.B, p.tokens, p.Hk), rows("v_new", p.v.from, a.v_new, p.B, p.tokens, p.Hk);
  rows("k", p.k.to, a.k, a.k.shape[0], a.k.shape[1], p.Hk), rows("v", p.v.to, a.v, a.v.shape[0], a.v.shape[1], p.Hk);
  rows("q", p.q, a.q, p.B, p.q_tokens, p.Hq), rows("q_out", p.q_out, a.q_out, p.B, p.q_tokens, p.Hq);
  EXPECT_EQ(p.k.width, last(a.k));
  EXPECT_EQ(p.v.width, last(a.v));
  const auto numbers = [&](const char* name, const gpu::TokenNumbers& n, const Tensor& of, std::int64_t tokens) {
    expect_inside(name, n.data, of, {{p.B, n.batch}, {tokens, n.token}});
    EXPECT_EQ(n.wide != 0, of && of.type == Type::i64) << name;
  };
  numbers("slots", p.slots, a.slots, p.tokens), numbers("positions", p.positions, a.positions, p.tokens);
  numbers("q_positions", p.q_positions, a.q_positions, p.q_tokens);
  expect_inside("cu_seqlens_new", p.cu_seqlens_new.data, a.cu_seqlens_new, {{p.B + 1, p.cu_seqlens_new.stride}});
  expect_inside("seqused_k", p.seqused_k.data, a.seqused_k, {{p.B, p.seqused_k.stride}});
  const Tensor& table = a.page_indices ? a.page_indices : a.block_table;
  for (const auto& [t, of] : {std::pair{&p.pages.k, &table}, {&p.pages.v, a.v_block_table ? &a.v_block_table : &table}})
    expect_inside("table", t->entries, *of, {{of->ndim == 2 ? p.B : 1, t->sequence}, {last(*of), t->entry}});
  expect_inside("page_indptr", p.pages.indptr.data, a.page_indptr, {{p.B + 1, p.pages.indptr.stride}});
  expect_inside("status", p.pages.status, a.status, {{1, 1}});
  expect_inside("cos", p.rotary.cos, a.rotary_cos, {{p.rotary.positions, p.rotary.cos_row}, {p.rotary.half, 1}});
  expect_inside("sin", p.rotary.sin, a.rotary_sin, {{p.rotary.positions, p.rotary.sin_row}, {p.rotary.half, 1}});
  for (const auto& [side, of] : {std::pair{&p.k, &a.k_scale}, {&p.v, &a.v_scale}}) {
    const gpu::ScaleRef& s = side->scale;
    expect_inside("scale", s.data, *of,
                  {{p.B, s.sequence},
                   {a.k.shape[0], s.page},
                   {a.k.shape[1], s.place},
                   {p.Hk, s.head},
                   {ceil_div(side->width, side->group_dims), side->scale_group}});
    EXPECT_EQ(side->computes_scale != 0, of->ndim >= 3);
    EXPECT_EQ(side->group_dims, of->ndim == 4 ? 128 : side->width);
  }
}

class FakeAppend : public FakeGpu {};

TEST_F(FakeAppend, IsOneLaunchInBounds) {
  fake::Machine& m = fake::machine();
  int launched = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const Trial trial = random_trial(seed);
    SCOPED_TRACE(describe(trial));
    const Prepared host(trial);
    Moved moved{static_cast<int>(seed % m.gpus.size())};
    const AppendArgs a = moved(host.a);
    Execution execution{.device = a.k.device};
    if (seed % 2) {
      const cuda::CurrentDevice current(moved.device);
      cuda::StreamHandle stream = nullptr;
      ASSERT_EQ(cuda::driver().stream_create(&stream, 1), fake::success);
      execution.stream = stream;
    }
    if (seed < 10) append(a, execution);  // compiles and loads
    m.forget();
    append(a, execution);
    const std::int64_t rows = gpu::append_params(check_append(a, execution)).rows();
    ASSERT_EQ(m.launches.size(), rows > 0 ? 1U : 0U);
    if (seed >= 10) {
      EXPECT_TRUE(only_enqueues(m.calls));
    }
    EXPECT_EQ(joined(m.complaints), "");
    if (rows == 0) continue;
    const fake::Launch& launch = m.launches[0];
    EXPECT_EQ(launch.kernel->function, "append");
    EXPECT_EQ(launch.device, moved.device);
    EXPECT_EQ(launch.stream, execution.stream);
    EXPECT_GE(std::int64_t{launch.grid[0]} * launch.block[0], rows * 32);
    expect_in_bounds(a, params_of<gpu::AppendParams>(launch));
    ++launched;
    if (HasFailure()) return;
  }
  EXPECT_GT(launched, 150);
}

TEST_F(FakeAppend, RefusesWithASentenceAndLaunchesNothing) {
  const Prepared host({.from = Type::f64, .to = Type::f16});
  Moved moved{1};
  const AppendArgs a = moved(host.a);
  fake::machine().forget();
  try {
    append(a, {});
    FAIL() << "f64 on a GPU";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), TESSERA_UNSUPPORTED);
    EXPECT_STREQ(error.what(), "k_new: has type f64; append on GPUs takes f32, f16 and bf16, and caches of 8 bits");
  }
  AppendArgs elsewhere = moved(Prepared({}).a);
  for (Tensor* t : {&elsewhere.k, &elsewhere.v, &elsewhere.k_new, &elsewhere.v_new, &elsewhere.seqused_k,
                    &elsewhere.block_table, &elsewhere.status})
    t->device.id = 99;
  EXPECT_THROW(append(elsewhere, {}), Error);
  EXPECT_TRUE(fake::machine().launches.empty());
}

TEST_F(FakeAppend, MergeIsOneLaunchInBounds) {
  fake::Machine& m = fake::machine();
  for (const int device : {0, m.device_of(9, 0)})
    for (const int count : {1, 3, gpu::most_parts}) {
      Moved moved{device};
      const auto outputs = [&](Type type) {
        const Buffer o(type, {2, 5, 3, 40}, {.order = {0, 2, 1, 3}, .gap = 2}), lse(Type::f32, {2, 3, 5}, {.step = 2});
        return Outputs{.o = moved(o.tensor()), .lse = moved(lse.tensor())};
      };
      std::vector<Outputs> parts;
      for (int n = 0; n < count; ++n) parts.push_back(outputs(n % 2 ? Type::f32 : Type::bf16));
      const Outputs merged = outputs(Type::f16);
      merge(parts, merged);
      m.forget();
      merge(parts, merged);
      ASSERT_EQ(m.launches.size(), 1U);
      EXPECT_TRUE(only_enqueues(m.calls));
      const auto p = params_of<gpu::MergeParams>(m.launches[0]);
      EXPECT_EQ(p.count, count);
      const auto inside = [&](const gpu::MergePart& part, const Outputs& of) {
        expect_inside("o", part.o.data, of.o,
                      {{p.B, part.o.batch}, {p.tokens, part.o.token}, {p.H, part.o.head}, {p.width, 1}});
        expect_inside("lse", part.lse.data, of.lse,
                      {{p.B, part.lse.batch}, {p.H, part.lse.head}, {p.tokens, part.lse.row}});
      };
      for (std::size_t n = 0; n < parts.size(); ++n) inside(p.parts[n], parts[n]);
      inside(p.merged, merged);
    }
}

TEST_F(FakeAppend, ReadingIsOneLaunchInBounds) {
  fake::Machine& m = fake::machine();
  const int device = m.device_of(9, 0), most = cuda::properties(device).multiprocessors;
  const Device where{DeviceType::cuda, device};
  const DeviceMemory k(where, 40 << 20), v(where, 16 * 100), found(where, sizeof(UInt32));
  for (const std::int64_t bytes : {std::int64_t{16}, std::int64_t{40} << 20}) {
    const auto read = [&] {
      cuda::enqueue_read(device, nullptr, {k.data(), bytes}, {v.data(), 16 * 100}, static_cast<UInt32*>(found.data()));
    };
    read();
    m.forget();
    read();
    ASSERT_EQ(m.launches.size(), 1U);
    EXPECT_TRUE(only_enqueues(m.calls));
    EXPECT_EQ(joined(m.complaints), "");
    EXPECT_EQ(m.launches[0].kernel->function, "read");
    EXPECT_EQ(m.launches[0].grid[0], bytes == 16 ? 1U : static_cast<unsigned>(most));
    const auto p = params_of<cuda::ReadParams>(m.launches[0]);
    EXPECT_EQ(p.chunks[0], bytes / 16);
    EXPECT_EQ(p.chunks[1], 100);
    EXPECT_TRUE(p.from[0] == k.data() && p.from[1] == v.data() && p.found == found.data());
  }
  m.forget();
  cuda::enqueue_read(device, nullptr, {}, {}, static_cast<UInt32*>(found.data()));
  EXPECT_TRUE(m.launches.empty());
}

}  // namespace
}  // namespace tessera::test
