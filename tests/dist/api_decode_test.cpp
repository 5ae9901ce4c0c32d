// SPDX-License-Identifier: Apache-2.0
// The public interface of decoding over several ranks: results against one call and bit by bit, and refusals.
// Implements docs/scale_out.md, "Decoding".
#include <gtest/gtest.h>

#include <thread>

#include "tests/dist/api_data.hpp"

namespace tessera {
namespace {

// One query over caches of 3 ranks, in blocks of 16 keys, against one call and, bit by bit, against one rank.
TEST(Decoding, GivesOneDevicesAnswer) {
  Data all(tokens);
  all.fill();
  const std::vector<std::int64_t> lengths{tokens - 5};
  std::vector<float> q(all.q.begin(), all.q.begin() + heads * dim), whole(q.size());
  Inputs in;
  in.q = Tensor(q.data(), Type::f32, {1, 1, heads, dim});
  in.k = Tensor(all.k.data(), Type::f32, {1, lengths[0], kv_heads, dim});
  in.v = Tensor(all.v.data(), Type::f32, {1, lengths[0], kv_heads, dim});
  tessera::forward(in, {Tensor(whole.data(), Type::f32, {1, 1, heads, dim}), {}, {}, {}}, {.causal = true});
  std::vector<float> first;
  for (const int ranks : {1, 3}) {
    const std::vector<Communicator> communicators = Communicator::threads(ranks);
    std::vector<std::string> faults(std::size_t(ranks), "");
    std::vector<std::vector<float>> o(std::size_t(ranks), std::vector<float>(q.size()));
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r)
      threads.emplace_back([&, r] {
        faults[std::size_t(r)] = caught([&] {
          Decoder decoder(communicators[std::size_t(r)],
                          {.query_heads = heads,
                           .key_heads = kv_heads,
                           .head_dim = dim,
                           .value_dim = dim,
                           .groups = 8,
                           .block = 16,
                           .timeout = 20},
                          {.causal = true}, {.threads = 1});
          const std::int64_t rows = decoder.rows(lengths[0], r), row = kv_heads * dim;
          std::vector<float> k(std::size_t(rows * row)), v(k.size());
          for (std::int64_t j = 0; j < lengths[0]; ++j)
            if (const auto [rank, at] = decoder.place(j); rank == r) {
              std::copy_n(all.k.begin() + j * row, row, k.begin() + at * row);
              std::copy_n(all.v.begin() + j * row, row, v.begin() + at * row);
            }
          Inputs mine;
          mine.q = in.q, mine.k = Tensor(k.data(), Type::f32, {1, rows, kv_heads, dim});
          mine.v = Tensor(v.data(), Type::f32, {1, rows, kv_heads, dim});
          decoder.forward(mine, lengths, {Tensor(o[std::size_t(r)].data(), Type::f32, {1, 1, heads, dim}), {}, {}, {}});
        });
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& fault : faults) EXPECT_EQ(fault, "");
    if (first.empty()) first = o[0];
    for (const std::vector<float>& x : o) EXPECT_EQ(x, first) << ranks << " ranks";
    EXPECT_LT(largest_difference(o[0], whole), 1e-6);
  }
}

TEST(Decoding, Refusals) {
  tessera_decoder_args c;
  tessera_decoder_args_init(&c);
  tessera_decoder* made = nullptr;
  EXPECT_EQ(said(tessera_decoder_make(nullptr, nullptr, nullptr, &made)), "decoder_args: is NULL; it is required");
  EXPECT_EQ(said(tessera_decoder_make(&c, nullptr, nullptr, &made)), "communicator: is NULL; it is required");
  const auto refused = [&](auto change) {
    const std::vector<Communicator> alone = Communicator::threads(1);
    tessera_decoder_args_init(&c);
    c.communicator = alone[0].c();
    change();
    return said(tessera_decoder_make(&c, nullptr, nullptr, &made));
  };
  EXPECT_EQ(refused([&] { c.timeout = 0; }), "timeout: is 0; must be a positive number of seconds");
  EXPECT_NE(refused([&] { c.groups = 3; }).find("3; must be a power of two"), std::string::npos)
      << tessera_last_error();
  const auto on = [&](const Execution& execution) {
    const std::vector<Communicator> alone = Communicator::threads(1);
    return caught([&] { Decoder(alone[0], {}, {}, execution); });
  };
  EXPECT_EQ(on({.device = {DeviceType::cpu, 0}}), "");
  EXPECT_EQ(on({.kernel = "reference"}), "kernel: is 'reference'; over several ranks the library chooses it");
  for (const DeviceType gpu : {DeviceType::cuda, DeviceType::vulkan})
    EXPECT_EQ(on({.device = {gpu, 0}}), "device: is a GPU; decoding over several ranks is for the CPU's memory");
  ASSERT_EQ(refused([] {}), "");
  EXPECT_EQ(tessera_decoder_place(made, -1, nullptr), -1);
  EXPECT_EQ(tessera_decoder_rows(made, 1, 1), 0);
  tessera_inputs in;
  tessera_inputs_init(&in);
  tessera_outputs out;
  tessera_outputs_init(&out);
  EXPECT_EQ(said(tessera_decoder_forward(nullptr, &in, nullptr, 0, &out)), "decoder: is NULL; it is required");
  EXPECT_EQ(said(tessera_decoder_forward(made, &in, nullptr, -1, &out)),
            "sequences: is -1; must be from 0 to 2147483647");
  tessera_decoder_destroy(made);
  made = nullptr;
  ASSERT_EQ(refused([] {}), "");
  EXPECT_EQ(said(tessera_decoder_forward(made, &in, nullptr, 1, &out)), "lengths: is NULL; it is required");
  tessera_decoder_destroy(made);
  made = nullptr;
  ASSERT_EQ(refused([] {}), "");
  tessera_tensor status;
  tessera_tensor_init(&status);
  status.ndim = 1, out.status = &status;
  EXPECT_EQ(said(tessera_decoder_forward(made, &in, nullptr, 0, &out)),
            "status and state: are given; over several ranks there are none");
  tessera_decoder_destroy(made);
}

}  // namespace
}  // namespace tessera
