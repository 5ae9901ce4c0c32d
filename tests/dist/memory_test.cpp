// SPDX-License-Identifier: Apache-2.0
// Ranks whose rows lie on a device that is not there: its memory is the host's, its calls are the CPU's, and its copies
// to the host are made when somebody waits for them, no earlier. Results have the bits of ranks on the host.
// Implements docs/scale_out.md, "Rows on a GPU". tests/fake/fake_dist_test.cpp has a GPU's memory, without numbers.
#include "dist/memory.hpp"

#include <gtest/gtest.h>

#include <functional>

#include "tests/dist/world.hpp"

namespace tessera::dist {
namespace {

class FarMemory : public Memory {
 public:
  Device device() const override { return {DeviceType::cuda, 3}; }

  Rows rows(Type type, Int64 count, Int64 heads, Int64 width) override {
    const auto bytes = static_cast<std::size_t>(count * heads * width * element_bytes(type));
    return {device(), std::shared_ptr<std::byte>(new std::byte[bytes + 1](), std::default_delete<std::byte[]>()),
            type,     count,
            heads,    width};
  }
  std::byte* pack(std::byte* to, const RowView& from, Int64 row, Int64 rows, Range heads) override {
    Bytes now(static_cast<std::size_t>(packed_bytes(from, rows, heads)));
    dist::pack(now.data(), from, row, rows, heads);  // what the rows hold at this place of the stream
    std::fill_n(to, now.size(), std::byte{0xFF});
    waiting.push_back([to, now = std::move(now)] { std::copy(now.begin(), now.end(), to); });
    return to + packed_bytes(from, rows, heads);
  }
  void wait() override {
    for (const auto& copy : waiting) copy();
    waiting.clear(), ++waits;
  }
  void add(const RowView& to, Int64 row, Int64 count, const float* numbers) override {
    EXPECT_TRUE(waiting.empty());
    Memory::add(to, row, count, numbers);
  }

  void plan(const Inputs& in, const Outputs& out, const Options& options, const Execution& execution) const override {
    Memory::plan(near(in), near(out), options, near(execution));
  }
  void forward(const Inputs& in, const Outputs& out, const Options& options, const Execution& execution) override {
    Memory::forward(near(in), near(out), options, near(execution));
  }
  void backward(const Inputs& in, const Saved& saved, const Gradients& gradients, const Options& options,
                const Execution& execution) override {
    Saved s = saved;
    Gradients g = gradients;
    for (Tensor* t : {&s.o, &s.lse, &s.d_o, &s.d_lse, &g.dq, &g.dk, &g.dv, &g.dbias, &g.dsinks}) bring(*t);
    Memory::backward(near(in), s, g, options, near(execution));
  }

  int waits = 0;

 private:
  // All that a call is given lies on this device.
  void bring(Tensor& t) const {
    EXPECT_TRUE(!t || t.device == device());
    t.device = {};
  }
  Inputs near(Inputs in) const {
    for (Tensor* t :
         {&in.q, &in.k, &in.v, &in.bias, &in.mask, &in.slopes, &in.sinks, &in.state.o, &in.state.m, &in.state.l})
      bring(*t);
    return in;
  }
  Outputs near(Outputs out) const {
    for (Tensor* t : {&out.o, &out.lse, &out.state.o, &out.state.m, &out.state.l}) bring(*t);
    return out;
  }
  Execution near(Execution e) const {
    EXPECT_EQ(e.device, device());
    e.device = {};
    return e;
  }

  std::vector<std::function<void()>> waiting;
};

TEST(Far, RanksHaveTheBitsOfRanksOnTheHost) {
  const Problem p{{500, 0, 130}, 4, 2, 16, 24, Type::bf16, {.causal = true}};
  int compared = 0;
  for (const Features features :
       {Features{.sinks = true, .d_lse = true}, Features{.bias = true, .mask = true}, Features{.slopes = true}}) {
    World world(p, features, 7);
    for (const Scheme scheme : {Scheme::ring, Scheme::gather})
      for (const auto& [nodes, slices] : {std::pair{1, 1}, {3, 1}, {1, 2}, {2, 2}})
        for (const Int64 segment : {0, 96}) {
          if (segment > 0 && scheme == Scheme::ring) continue;
          const Sharing sharing{.partition = two_level(zigzag(p.lengths, nodes, 96), slices, 16),
                                .scheme = scheme,
                                .segment = segment,
                                .grain = 96,
                                .timeout = 60,
                                .threads = 1};
          world.memory = nullptr;
          const Answer host = world.ranks(sharing);
          world.memory = [] { return std::shared_ptr<Memory>(std::make_shared<FarMemory>()); };
          const Answer far = world.ranks(sharing);
          ASSERT_EQ(host.fault + far.fault, "");
          for (const auto& [name, numbers] : host.of) {
            EXPECT_TRUE(World::same_bits(numbers, far.of.at(name)))
                << name << ", " << nodes << " nodes of " << slices << (scheme == Scheme::ring ? ", ring" : "");
            ++compared;
          }
        }
  }
  EXPECT_EQ(compared, 12 * (6 + 6 + 5));
}

// Tensors elsewhere, or whose rows a copy cannot take.
TEST(Far, TensorsAreOnThePlansDevice) {
  const Problem p{{64}, 2, 2, 16, 16, Type::f32, {}};
  const auto memory = std::make_shared<FarMemory>();
  const auto attempt = [&](auto change) {
    Plan plan(thread_communicators(1)[0], p, {.partition = contiguous(p.lengths, 1, 1), .memory = memory});
    Numbers x(Type::f32, 64, 2, 32);
    Inputs in;
    in.q = in.k = in.v = Tensor(x.rows.view.data, Type::f32, {64, 2, 16}, memory->device());
    Outputs out;
    out.o = in.q;
    change(in);
    try {
      plan.forward(in, out);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(attempt([](Inputs& in) { in.k.device = {}; }), "k: must be in the memory of cuda:3, the plan's device");
  EXPECT_EQ(attempt([](Inputs& in) { in.v.strides[2] = 2; }),
            "v: its last dimension has stride 2; must be 1 on a device");
}

// One rank has nobody to send to: the host never waits in a forward pass.
TEST(Far, OneRankWaitsForNothing) {
  const Problem p{{300}, 2, 1, 16, 16, Type::bf16, {.causal = true}};
  const auto made = std::make_shared<FarMemory>();
  Plan plan(thread_communicators(1)[0], p, {.partition = contiguous(p.lengths, 1, 1), .memory = made});
  Numbers q(Type::bf16, 300, 2, 16), k(Type::bf16, 300, 1, 16), o(Type::bf16, 300, 2, 16);
  Inputs in;
  in.q = q.tokens(), in.k = in.v = k.tokens();
  Outputs out;
  out.o = o.tokens();
  for (Tensor* t : {&in.q, &in.k, &in.v, &out.o}) t->device = made->device();
  plan.forward(in, out);
  EXPECT_EQ(made->waits, 0);
}

}  // namespace
}  // namespace tessera::dist
