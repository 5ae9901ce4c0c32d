// SPDX-License-Identifier: Apache-2.0
// Where a rank's tensors may not lie. Implements tessera/dist.h.
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

}  // namespace
}  // namespace tessera
