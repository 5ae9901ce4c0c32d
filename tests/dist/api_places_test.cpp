// SPDX-License-Identifier: Apache-2.0
// Where a rank's tensors may not lie, and on which stream it cannot work. Implements tessera/dist.h.
#include <gtest/gtest.h>

#include "tests/dist/api_data.hpp"

namespace tessera {
namespace {

TEST(Places, AnOutputIsNotWrittenOverAnother) {
  const Partition partition({.lengths = {tokens}});
  Data data(tokens);
  std::vector<float> numbers(std::size_t(tokens * tokens));
  const auto backward = [&](auto change) {
    const std::vector<Communicator> alone = Communicator::threads(1);
    DistPlan plan(alone[0], partition, {.query_heads = heads, .key_heads = kv_heads, .head_dim = dim, .value_dim = dim},
                  {}, {.threads = 1});
    std::vector<float> dbias(numbers.size());
    Inputs in = data.inputs();
    in.bias = Tensor(numbers.data(), Type::f32, {1, 1, tokens, tokens});
    Gradients g = data.gradients();
    g.dbias = in.bias, g.dbias.data = dbias.data();
    change(in, g);
    return caught([&] { plan.backward(in, data.saved(), g); });
  };
  EXPECT_EQ(backward([](const Inputs&, Gradients&) {}), "");
  EXPECT_EQ(backward([](const Inputs& in, Gradients& g) { g.dbias.data = in.bias.data; }),
            "dbias: shares memory with bias; outputs must not overlap inputs or each other");
  EXPECT_EQ(
      backward([](const Inputs&, Gradients& g) { g.dbias.strides[2] = 0; }),
      "dbias: elements of shape [1,1,192,192] with strides [36864,36864,0,1] share memory; outputs must not overlap "
      "themselves");
}

// A communicator of one rank, which needs no messages.
class Alone : public Transport {
 public:
  explicit Alone(bool aside) : aside(aside) {}
  int rank() const override { return 0; }
  int ranks() const override { return 1; }
  bool own_thread() const override { return aside; }
  void start(std::span<const tessera_message>) override {}
  void test(std::span<std::uint8_t>) override {}

 private:
  bool aside;
};

TEST(Places, AThreadsDefaultStreamIsNotAnothers) {
  const Partition partition({.lengths = {tokens}});
  const auto planned = [&](bool aside, std::uintptr_t stream) {
    const Communicator communicator(std::make_unique<Alone>(aside));
    return caught([&] {
      DistPlan(communicator, partition, {}, {},
               {.device = {DeviceType::cuda, 0}, .stream = reinterpret_cast<void*>(stream)});
    });
  };
  const std::string sentence =
      "stream: is the per-thread default stream, which is another one on the thread of this communicator";
  EXPECT_EQ(planned(true, 2), sentence);
  for (const auto& [aside, stream] : {std::pair(false, 2), {true, 1}, {true, 0}})
    EXPECT_NE(planned(aside, std::uintptr_t(stream)), sentence);  // here f32 has no kernel
}

}  // namespace
}  // namespace tessera
