// SPDX-License-Identifier: Apache-2.0
// Tessera's C++20 API for several ranks: partitions, communicators, plans. Inline over the C ABI of dist.h, as
// tessera.hpp is over tessera.h, and with the same exception. What it means: docs/scale_out.md.
#pragma once

#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/dist.h"
#include "tessera/tessera.hpp"

namespace tessera {

// Which rows go to which rank.
enum class PartitionKind : std::int32_t {
  zigzag = 0,      // of every sequence the r-th of 2P chunks from either end: even under a causal mask
  contiguous = 1,  // all rows in order, in equal parts
  balanced = 2     // equal work under the mask, documents whole where they fit
};

// What a partition is made of. The same on every rank.
struct PartitionArgs {
  std::vector<std::int64_t> lengths;  // of the sequences, each with as many queries as keys
  int ranks = 1;
  PartitionKind kind = PartitionKind::zigzag;
  int slices = 1;            // ranks of a node, which share its heads out
  std::int64_t align = 128;  // cuts lie on its multiples, or at the end of a sequence
  Options options{};         // balanced: causal, window and diagonal
};

// Which rows each rank holds.
class Partition {
 public:
  explicit Partition(const PartitionArgs& args) {
    const C c(args);
    detail::check(tessera_partition_make(&c.view, &handle));
  }
  // One's own: the spans of each rank, which together hold every row once; some may be without rows. Of the args:
  // lengths, slices.
  Partition(const std::vector<std::vector<tessera_span>>& of, PartitionArgs args) {
    args.ranks = static_cast<int>(of.size());
    std::vector<tessera_span> all;
    std::vector<std::int64_t> counts;
    for (const auto& spans : of) {
      all.insert(all.end(), spans.begin(), spans.end());
      counts.push_back(static_cast<std::int64_t>(spans.size()));
    }
    const C c(args);
    detail::check(tessera_partition_from_spans(&c.view, all.data(), counts.data(), &handle));
  }
  Partition(Partition&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  Partition& operator=(Partition&& other) noexcept {
    std::swap(handle, other.handle);
    return *this;
  }
  ~Partition() { tessera_partition_destroy(handle); }

  int ranks() const { return tessera_partition_ranks(handle); }
  std::int64_t rows(int rank) const { return tessera_partition_rows(handle, rank); }
  // In the order in which the rank's tensors hold them. They live as long as the partition.
  std::span<const tessera_span> spans(int rank) const {
    std::int64_t count = 0;
    const tessera_span* first = tessera_partition_spans(handle, rank, &count);
    return {first, static_cast<std::size_t>(count)};
  }
  const tessera_partition* c() const { return handle; }

 private:
  struct C {
    tessera_options options;
    tessera_partition_args view;
    explicit C(const PartitionArgs& args) : options(detail::to_c(args.options)) {
      tessera_partition_args_init(&view);
      view.lengths = args.lengths.data(), view.sequences = static_cast<std::int64_t>(args.lengths.size());
      view.kind = static_cast<std::int32_t>(args.kind), view.ranks = args.ranks, view.slices = args.slices;
      view.align = args.align, view.options = &options;
    }
  };
  tessera_partition* handle = nullptr;
};

// How messages travel: what tessera_transport's functions do, as a class. None of them waits. start and test report
// a failure by throwing.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  virtual void start(std::span<const tessera_message> group) = 0;
  virtual void test(std::span<std::uint8_t> done) = 0;        // sets to 1 what is complete
  virtual std::optional<std::string> notice() { return {}; }  // the sentence of another rank that has failed
  virtual void fail(const char* sentence) noexcept { static_cast<void>(sentence); }
  virtual bool own_thread() const { return false; }  // see tessera_transport: for calls that may never return
};

// Conversion of transports to those of the C ABI. Not part of the API.
namespace detail {

inline void put_sentence(char* to, const char* sentence) { std::snprintf(to, TESSERA_SENTENCE_BYTES, "%s", sentence); }

template <class Body>
tessera_status told(char* sentence, Body body) noexcept {
  try {
    body();
    return TESSERA_OK;
  } catch (const std::bad_alloc&) {
    return TESSERA_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    put_sentence(sentence, error.what());
  } catch (...) {
    put_sentence(sentence, "the transport threw something that is no std::exception");
  }
  return TESSERA_COMMUNICATION_ERROR;
}

// Its context owns the transport.
inline tessera_transport to_c(std::unique_ptr<Transport> transport) {
  tessera_transport t;
  tessera_transport_init(&t);
  t.rank = transport->rank(), t.ranks = transport->ranks(), t.own_thread = transport->own_thread();
  t.start = [](void* context, const tessera_message* group, std::int64_t count, char* sentence) {
    return told(sentence, [&] { static_cast<Transport*>(context)->start({group, static_cast<std::size_t>(count)}); });
  };
  t.test = [](void* context, std::uint8_t* done, std::int64_t count, char* sentence) {
    return told(sentence, [&] { static_cast<Transport*>(context)->test({done, static_cast<std::size_t>(count)}); });
  };
  t.notice = [](void* context, char* sentence) -> std::int32_t {
    try {
      const std::optional<std::string> heard = static_cast<Transport*>(context)->notice();
      if (heard) put_sentence(sentence, heard->c_str());
      return heard.has_value();
    } catch (...) {
      return 0;
    }
  };
  t.fail = [](void* context, const char* sentence) { static_cast<Transport*>(context)->fail(sentence); };
  t.destroy = [](void* context) { delete static_cast<Transport*>(context); };
  t.context = transport.release();
  return t;
}

}  // namespace detail

// Moves messages between ranks, over a transport. Used by one thread at a time.
class Communicator {
 public:
  explicit Communicator(std::unique_ptr<Transport> transport) {
    const tessera_transport t = detail::to_c(std::move(transport));
    const tessera_status status = tessera_communicator_make(&t, &handle);
    if (status != TESSERA_OK) t.destroy(t.context);
    detail::check(status);
  }
  // Takes over what tessera_mpi_communicator() or another C function has made.
  explicit Communicator(tessera_communicator* made) : handle(made) {}
  Communicator(Communicator&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  Communicator& operator=(Communicator&& other) noexcept {
    std::swap(handle, other.handle);
    return *this;
  }
  ~Communicator() { tessera_communicator_destroy(handle); }

  // Ranks that are threads of this process: one communicator for each.
  static std::vector<Communicator> threads(int ranks) {
    std::vector<tessera_communicator*> made(ranks > 0 ? static_cast<std::size_t>(ranks) : 1);
    detail::check(tessera_communicator_threads(ranks, made.data()));
    std::vector<Communicator> all;
    all.reserve(made.size());
    for (tessera_communicator* one : made) all.emplace_back(one);
    return all;
  }

  int rank() const { return tessera_communicator_rank(handle); }
  int size() const { return tessera_communicator_size(handle); }
  tessera_communicator* c() const { return handle; }

 private:
  tessera_communicator* handle = nullptr;
};

// How keys come to the queries of other ranks.
enum class Scheme : std::int32_t {
  ring = 0,   // keys pass by: least memory
  gather = 1  // keys arrive in ascending order and stay
};

// The question, the same on every rank, and how it is shared out.
struct DistArgs {
  std::int64_t query_heads = 1, key_heads = 1, head_dim = 64, value_dim = 64;
  Type type = Type::f32;
  Scheme scheme = Scheme::gather;
  std::int64_t segment = 0;  // S: the same bits on any number of ranks whose cuts lie on multiples of S
  double timeout = 300;      // seconds that a rank waits for another
};

// Made by all ranks together, and run by all: local rows in, local rows out. Shapes: dist.h.
class DistPlan {
 public:
  DistPlan(const Communicator& communicator, const Partition& partition, const DistArgs& args,
           const Options& options = {}, const Execution& execution = {}) {
    tessera_dist_args c;
    tessera_dist_args_init(&c);
    c.communicator = communicator.c(), c.partition = partition.c();
    c.query_heads = args.query_heads, c.key_heads = args.key_heads;
    c.head_dim = args.head_dim, c.value_dim = args.value_dim;
    c.type = static_cast<std::int32_t>(args.type), c.scheme = static_cast<std::int32_t>(args.scheme);
    c.segment = args.segment, c.timeout = args.timeout;
    const auto o = detail::to_c(options);
    const auto e = detail::to_c(execution);
    detail::check(tessera_dist_plan_make(&c, &o, &e, &handle));
  }
  DistPlan(DistPlan&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  DistPlan& operator=(DistPlan&& other) noexcept {
    std::swap(handle, other.handle);
    return *this;
  }
  ~DistPlan() { tessera_dist_plan_destroy(handle); }

  std::string describe() const { return tessera_dist_plan_describe(handle); }

  // Without options: those of the plan. Only seed and seed_offset may differ from them.
  void forward(const Inputs& inputs, const Outputs& outputs, const std::optional<Options>& options = {}) {
    const detail::CInputs in(inputs);
    const detail::COutputs out(outputs);
    const auto o = detail::to_c(options.value_or(Options{}));
    detail::check(tessera_dist_forward(handle, &in.view, &out.view, options ? &o : nullptr));
  }
  void backward(const Inputs& inputs, const Saved& saved, const Gradients& gradients,
                const std::optional<Options>& options = {}) {
    const detail::CInputs in(inputs);
    const detail::CSaved s(saved);
    const detail::CGradients g(gradients);
    const auto o = detail::to_c(options.value_or(Options{}));
    detail::check(tessera_dist_backward(handle, &in.view, &s.view, &g.view, options ? &o : nullptr));
  }

 private:
  tessera_dist_plan* handle = nullptr;
};

// The question of a decoder, the same on every rank.
struct DecoderArgs {
  std::int64_t query_heads = 1, key_heads = 1, head_dim = 64, value_dim = 64;
  Type type = Type::f32;      // of q
  int groups = 64;            // a power of two
  std::int64_t block = 4096;  // keys that lie together
  double timeout = 300;
};

// Few queries, the same on every rank, over caches that are dealt to the ranks in blocks of keys. Shapes: dist.h.
class Decoder {
 public:
  Decoder(const Communicator& communicator, const DecoderArgs& args, const Options& options = {},
          const Execution& execution = {}) {
    tessera_decoder_args c;
    tessera_decoder_args_init(&c);
    c.communicator = communicator.c();
    c.query_heads = args.query_heads, c.key_heads = args.key_heads;
    c.head_dim = args.head_dim, c.value_dim = args.value_dim;
    c.type = static_cast<std::int32_t>(args.type), c.groups = args.groups, c.block = args.block;
    c.timeout = args.timeout;
    const auto o = detail::to_c(options);
    const auto e = detail::to_c(execution);
    detail::check(tessera_decoder_make(&c, &o, &e, &handle));
  }
  Decoder(Decoder&& other) noexcept : handle(std::exchange(other.handle, nullptr)) {}
  Decoder& operator=(Decoder&& other) noexcept {
    std::swap(handle, other.handle);
    return *this;
  }
  ~Decoder() { tessera_decoder_destroy(handle); }

  // The rank that has the key at a position of a sequence, and its row among that rank's.
  std::pair<int, std::int64_t> place(std::int64_t position) const {
    std::int64_t row = 0;
    const int rank = tessera_decoder_place(handle, position, &row);
    return {rank, row};
  }
  std::int64_t rows(std::int64_t length, int rank) const { return tessera_decoder_rows(handle, length, rank); }

  void forward(const Inputs& inputs, const std::vector<std::int64_t>& lengths, const Outputs& outputs) {
    const detail::CInputs in(inputs);
    const detail::COutputs out(outputs);
    detail::check(tessera_decoder_forward(handle, &in.view, lengths.data(), static_cast<std::int64_t>(lengths.size()),
                                          &out.view));
  }

 private:
  tessera_decoder* handle = nullptr;
};

}  // namespace tessera
