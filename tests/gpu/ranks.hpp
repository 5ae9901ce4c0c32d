// SPDX-License-Identifier: Apache-2.0
// A case shared out to ranks on one Hopper GPU: each works on its rows of the case's tensors there. Included by
// gpu_dist_test.cpp, whose ranks are threads, and gpu_mpi_ranks.cpp, whose ranks are processes. Implements
// docs/scale_out.md, "Rows on a GPU".
#pragma once

#include <string>
#include <thread>
#include <vector>

#include "tessera/dist.hpp"
#include "tests/gpu/support.hpp"

namespace tessera::test {

// How a case is shared out.
struct Sharing {
  int ranks = 1;
  Scheme scheme = Scheme::gather;
  std::int64_t segment = 0;
};

inline Partition partition_of(const Case& c, const Sharing& sharing) {
  return Partition({.lengths = {c.Nq},
                    .ranks = sharing.ranks,
                    .kind = PartitionKind::contiguous,
                    .align = sharing.segment > 0 ? sharing.segment : 384});
}

// A rank's rows of them: one span at most, as parts are contiguous.
inline tessera_span span_of(const Partition& partition, int rank) {
  const auto spans = partition.spans(rank);
  return spans.empty() ? tessera_span{} : spans[0];
}

// Rows of a padded tensor [1,N,H,D], or [1,H,N]: a view.
inline Tensor rows_of(const Tensor& t, tessera_span span) {
  const bool numbers = t.ndim == 3;
  const std::int64_t n = span.end - span.begin, row = t.strides[numbers ? 2 : 1];
  std::byte* data = static_cast<std::byte*>(t.data) + span.begin * row * static_cast<std::int64_t>(size_of(t.type));
  if (!numbers) {
    Tensor out(data, t.type, {n, t.shape[2], t.shape[3]}, t.device);
    out.strides = {row, t.strides[2], t.strides[3]};
    return out;
  }
  Tensor out(data, t.type, {t.shape[1], n}, t.device);
  out.strides = {t.strides[1], row};
  return out;
}

// Both passes of one rank, over its rows of a case that lies on the GPU.
inline void run_rank(const CaseData& data, const Placed& placed, const Communicator& communicator,
                     const Sharing& sharing) {
  const Case& c = data.spec;
  const cuda::CurrentDevice current(gpu.id);
  const Stream stream;
  const Partition partition = partition_of(c, sharing);
  const tessera_span span = span_of(partition, communicator.rank());
  const auto mine = [&](const Tensor& t) { return rows_of(t, span); };
  DistPlan plan(communicator, partition,
                {.query_heads = c.Hq,
                 .key_heads = c.Hk,
                 .head_dim = c.D,
                 .value_dim = c.dim_v(),
                 .type = c.type,
                 .scheme = sharing.scheme,
                 .segment = sharing.segment,
                 .timeout = 120},
                data.options(), {.device = gpu, .stream = static_cast<cuda::StreamHandle>(stream)});
  Inputs in;
  in.q = mine(placed.inputs().q), in.k = mine(placed.inputs().k), in.v = mine(placed.inputs().v);
  const Outputs out{.o = mine(placed.outputs().o), .lse = mine(placed.outputs().lse)};
  const Saved all = placed.saved();
  const Gradients g = placed.gradients();
  plan.forward(in, out);
  plan.backward(in, {out.o, out.lse, mine(all.d_o), {}}, {mine(g.dq), mine(g.dk), mine(g.dv), {}, {}});
  wait_for(stream);
}

// Both passes on ranks that are threads.
inline void run_ranks(CaseData& data, const Sharing& sharing) {
  Placed placed(data, gpu);
  placed.upload();
  const std::vector<Communicator> communicators = Communicator::threads(sharing.ranks);
  std::vector<std::string> said(communicators.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < communicators.size(); ++r)
    threads.emplace_back([&, r] {
      try {
        run_rank(data, placed, communicators[r], sharing);
      } catch (const std::exception& error) {
        said[r] = error.what();
      }
    });
  for (std::thread& t : threads) t.join();
  for (const std::string& sentence : said) ASSERT_EQ(sentence, "");
  placed.download();
}

// One call over the whole case, which has the bits of its parts.
inline void run_one_call(CaseData& data) {
  data.spec.backward = false, data.spec.options.part_invariant = true;
  OnGpu on(data, hopper_kernel);
  on.forward();
  on.finish();
}

// 3072 queries and keys, of which every rank of up to eight has a segment of 384.
inline Case case_of_ranks(bool causal) {
  Case spec{.name = "ranks", .Nq = 3072, .Nk = 3072, .Hq = 4, .Hk = 2, .D = 128, .type = Type::bf16};
  spec.options.causal = causal;
  return spec;
}

}  // namespace tessera::test
