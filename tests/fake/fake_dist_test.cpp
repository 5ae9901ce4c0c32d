// SPDX-License-Identifier: Apache-2.0
// Ranks as threads whose rows lie on a GPU that is not there: which calls of the driver a pass makes, on which stream,
// where the host waits, copies in bounds, what is written, and failures. Links tessera_cases and the fake libcuda and
// NVRTC. Implements docs/scale_out.md, "Rows on a GPU". tests/dist/memory_test.cpp has the numbers.
#include <algorithm>
#include <thread>

#include "cuda/device.hpp"
#include "tessera/dist.hpp"
#include "tests/fake/support.hpp"

namespace tessera::test {
namespace {

constexpr std::int64_t tokens = 1024, query_heads = 4, key_heads = 2, dim = 128;

// A rank's tensors on the GPU, every byte 0xFF.
class Shard {
 public:
  Shard(Device device, std::int64_t rows) : device(device), rows(rows) {
    q = rows_of(query_heads), k = rows_of(key_heads), v = rows_of(key_heads), d_o = rows_of(query_heads);
    o = rows_of(query_heads), dq = rows_of(query_heads), dk = rows_of(key_heads), dv = rows_of(key_heads);
    lse = tensor(Type::f32, {query_heads, rows}, 4);
  }
  Inputs inputs() const {
    Inputs in;
    in.q = q, in.k = k, in.v = v;
    return in;
  }
  Outputs outputs() const { return {.o = o, .lse = lse}; }
  Saved saved() const { return {o, lse, d_o, {}}; }
  Gradients gradients() const { return {dq, dk, dv, {}, {}}; }

  // How many bytes of these are still as they were.
  std::size_t untouched(const std::vector<Tensor>& tensors) const {
    std::size_t count = 0;
    for (const auto& memory : held)
      for (const Tensor& t : tensors)
        if (t.data == memory->data()) {
          std::vector<std::byte> bytes(memory->size());
          memory->read(bytes.data(), bytes.size());
          count += static_cast<std::size_t>(std::count(bytes.begin(), bytes.end(), std::byte{0xFF}));
        }
    return count;
  }

  Tensor q, k, v, d_o, o, lse, dq, dk, dv;

 private:
  Tensor tensor(Type type, std::initializer_list<std::int64_t> shape, std::int64_t element) {
    std::int64_t bytes = element;
    for (const std::int64_t n : shape) bytes *= n;
    held.push_back(std::make_unique<DeviceMemory>(device, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1))));
    held.back()->fill(std::byte{0xFF});
    return {held.back()->data(), type, shape, device};
  }
  Tensor rows_of(std::int64_t heads) { return tensor(Type::bf16, {rows, heads, dim}, 2); }

  Device device;
  std::int64_t rows;
  std::vector<std::unique_ptr<DeviceMemory>> held;
};

std::int64_t count_of(const char* call) {
  const auto& calls = fake::machine().calls;
  return std::count_if(calls.begin(), calls.end(), [&](const char* c) { return std::string(c) == call; });
}

class FakeDist : public FakeGpu {
 protected:
  void SetUp() override {
    FakeGpu::SetUp();
    device = {DeviceType::cuda, fake::machine().device_of(9, 0)};
    const cuda::CurrentDevice current(device.id);
    ASSERT_EQ(cuda::driver().stream_create(&stream, 1), fake::success);
  }
  void TearDown() override {
    cuda::driver().stream_destroy(stream);
    FakeGpu::TearDown();
  }

  DistPlan plan(const Communicator& communicator, const Partition& partition, Scheme scheme, std::int64_t segment = 0) {
    return {communicator,
            partition,
            {.query_heads = query_heads,
             .key_heads = key_heads,
             .head_dim = dim,
             .value_dim = dim,
             .type = Type::bf16,
             .scheme = scheme,
             .segment = segment,
             .timeout = 60},
            {.causal = true},
            {.device = device, .stream = stream}};
  }

  Device device;
  cuda::StreamHandle stream = nullptr;
};

TEST_F(FakeDist, PassesRunOnTheCallersStreamAndWriteEverything) {
  int ran = 0;
  for (const int ranks : {1, 2, 4})
    for (const int slices : {1, 2})
      for (const Scheme scheme : {Scheme::ring, Scheme::gather})
        for (const std::int64_t segment : {0, 128}) {
          if (ranks % slices != 0 || (segment > 0 && scheme == Scheme::ring)) continue;
          SCOPED_TRACE(std::to_string(ranks) + " ranks in slices of " + std::to_string(slices));
          const Partition partition({.lengths = {tokens}, .ranks = ranks, .slices = slices, .align = 128});
          const std::vector<Communicator> communicators = Communicator::threads(ranks);
          std::vector<std::unique_ptr<Shard>> shards;
          for (int r = 0; r < ranks; ++r) shards.push_back(std::make_unique<Shard>(device, partition.rows(r)));
          fake::machine().forget();
          std::vector<std::string> said(static_cast<std::size_t>(ranks));
          std::vector<std::thread> threads;
          for (int r = 0; r < ranks; ++r)
            threads.emplace_back([&, r] {
              const auto own = static_cast<std::size_t>(r);
              const Shard& shard = *shards[own];
              try {
                DistPlan p = plan(communicators[own], partition, scheme, segment);
                p.forward(shard.inputs(), shard.outputs());
                p.backward(shard.inputs(), shard.saved(), shard.gradients());
              } catch (const Error& error) {
                said[own] = error.what();
              }
            });
          for (std::thread& t : threads) t.join();
          for (const std::string& sentence : said) ASSERT_EQ(sentence, "");
          ASSERT_EQ(joined(fake::machine().complaints), "");
          ASSERT_FALSE(fake::machine().launches.empty());
          for (const fake::Launch& launch : fake::machine().launches) {
            EXPECT_EQ(launch.stream, stream);
            EXPECT_EQ(launch.device, device.id);
          }
          for (const auto& s : shards) EXPECT_EQ(s->untouched({s->o, s->lse, s->dq, s->dk, s->dv}), 0u);
          ++ran;
        }
  EXPECT_EQ(ran, 3 + 6 + 6);
}

// One rank sends nothing, and so its forward pass never waits; and a second one finds its memory again.
TEST_F(FakeDist, TheHostWaitsForMessagesAlone) {
  const Partition partition({.lengths = {tokens}, .align = 128});
  const std::vector<Communicator> alone = Communicator::threads(1);
  const Shard shard(device, tokens);
  DistPlan p = plan(alone[0], partition, Scheme::gather);
  p.forward(shard.inputs(), shard.outputs());
  fake::machine().forget();
  p.forward(shard.inputs(), shard.outputs());
  EXPECT_EQ(count_of("cuStreamSynchronize"), 0);
  EXPECT_EQ(count_of("cuMemAlloc"), 0);
  EXPECT_EQ(count_of("cuMemFree"), 0);
  EXPECT_GT(count_of("cuLaunchKernelEx"), 0);
}

// Whichever call of the driver fails, the rank says so, and the next plan works.
TEST_F(FakeDist, FailuresOfTheDriverHaveASentence) {
  const Partition partition({.lengths = {tokens}, .align = 128});
  const Shard shard(device, tokens);
  int faults = 0;
  for (int n = 1;; ++n) {
    const std::vector<Communicator> alone = Communicator::threads(1);
    DistPlan p = plan(alone[0], partition, Scheme::gather);
    fake::machine().forget();
    fake::machine().fault = {.in = n};
    std::string said;
    try {
      p.forward(shard.inputs(), shard.outputs());
    } catch (const Error& error) {
      EXPECT_EQ(error.status(), TESSERA_DEVICE_ERROR) << error.what();
      said = error.what();
    }
    const bool happened = fake::machine().fault.happened;
    fake::machine().forget();
    if (!happened) break;
    EXPECT_NE(said, "") << n;
    ++faults;
  }
  EXPECT_GT(faults, 20);
}

// What has no kernel with a state is refused when it is planned, before any row travels.
TEST_F(FakeDist, OtherGpusAreRefused) {
  device.id = fake::machine().device_of(8, 0);
  const Partition partition({.lengths = {tokens}, .align = 128});
  const std::vector<Communicator> alone = Communicator::threads(1);
  try {
    plan(alone[0], partition, Scheme::gather);
    FAIL() << "there is a plan";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("hopper: the GPU is sm_80; this kernel needs sm_90a"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace tessera::test
