// SPDX-License-Identifier: Apache-2.0
// The C ABI of attention over several ranks: partitions, communicators, plans. See tessera/dist.h.
#include <algorithm>
#include <cmath>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/cuda_memory.hpp"
#include "api/dist_rules.hpp"
#include "api/last_error.hpp"
#include "api/structs.hpp"
#include "core/limits.hpp"
#include "dist/attention.hpp"
#include "dist/cost.hpp"
#include "dist/decode.hpp"
#include "dist/threads.hpp"
#include "dist/transport.hpp"
#include "tessera/dist.h"

struct tessera_partition {
  std::vector<std::int64_t> lengths;
  tessera::dist::Partition rows;
  std::vector<std::vector<tessera_span>> spans;
};

struct tessera_communicator {
  std::shared_ptr<tessera::dist::Communicator> messages;
};

struct tessera_dist_plan {
  std::shared_ptr<tessera::dist::Communicator> messages;
  tessera::dist::Plan plan;
  std::string description;
};

struct tessera_decoder {
  std::shared_ptr<tessera::dist::Communicator> messages;
  tessera::dist::Dealing dealing;
  tessera::dist::Decoder decoder;
};

namespace tessera::api {
namespace {

// src/dist speaks as a user of the library does: with tessera::Error.
template <class Body>
tessera_status guarded_dist(Body body) noexcept {
  return guarded([&] {
    try {
      body();
    } catch (const Error& error) {
      throw Failure(error.status(), error.what());
    }
  });
}

// --- partitions

constexpr std::int32_t most_ranks = 1 << 20;

void require_ranks(std::int32_t ranks) {
  if (ranks < 1 || ranks > most_ranks) invalid("ranks: is ", ranks, "; must be from 1 to ", most_ranks);
}

void require_sequences(std::int64_t sequences) {
  if (sequences < 0 || sequences > most_sequences)
    invalid("sequences: is ", sequences, "; must be from 0 to ", most_sequences);
}

tessera_partition_args partition_args(const tessera_partition_args* given) {
  const tessera_partition_args args = require_struct("partition_args", given, tessera_partition_args_init);
  require_ranks(args.ranks);
  if (args.slices < 1 || args.ranks % args.slices != 0)
    invalid("slices: is ", args.slices, "; must be positive and divide the ", args.ranks, " ranks");
  require_sequences(args.sequences);
  if (args.sequences > 0) require("lengths", args.lengths);
  std::int64_t total = 0;
  for (std::int64_t b = 0; b < args.sequences; ++b) {
    if (args.lengths[b] < 0) invalid("lengths: holds ", args.lengths[b], "; must be 0 or more");
    if (args.lengths[b] > most_tokens || (total += args.lengths[b]) > most_tokens)
      invalid("lengths: are more than 2^48 tokens together");
  }
  return args;
}

std::vector<Int64> lengths_of(const std::vector<std::int64_t>& lengths) { return {lengths.begin(), lengths.end()}; }

// Callers see all spans that they have given; the rows of a rank are those of the spans that have some.
tessera_partition* with_spans(const tessera_partition_args& args, dist::Partition rows) {
  auto made = std::make_unique<tessera_partition>();
  made->lengths.assign(args.lengths, args.lengths + args.sequences);
  const std::vector<Int64> lengths = lengths_of(made->lengths);
  for (std::vector<dist::Span>& spans : rows.of) {
    made->spans.emplace_back();
    for (const dist::Span& s : spans) made->spans.back().push_back({s.sequence, s.begin, s.end});
    std::erase_if(spans, [&](const dist::Span& s) { return is_empty(s, lengths); });
  }
  if (const std::string fault = fault_of(rows, lengths); !fault.empty()) invalid(fault);
  made->rows = std::move(rows);
  return made.release();
}

dist::Mask mask_of(const Options& o) {
  return {o.causal, o.window_left, o.window_right, o.alignment == Alignment::offset ? o.diagonal_offset : 0};
}

dist::Partition rows_of(const tessera_partition_args& args) {
  if (args.align < 1 || args.align > most_tokens) invalid("align: is ", args.align, "; must be positive");
  const std::vector<Int64> lengths(args.lengths, args.lengths + args.sequences);
  const int nodes = args.ranks / args.slices;
  dist::Partition rows;
  if (args.kind == TESSERA_ZIGZAG)
    rows = dist::zigzag(lengths, nodes, args.align);
  else if (args.kind == TESSERA_CONTIGUOUS)
    rows = dist::contiguous(lengths, nodes, args.align);
  else if (args.kind == TESSERA_BALANCED)
    rows = dist::balanced(lengths, mask_of(options(args.options)), nodes, args.align);
  else
    invalid("kind: is ", args.kind, "; must be TESSERA_ZIGZAG, TESSERA_CONTIGUOUS or TESSERA_BALANCED");
  return args.slices == 1 ? rows : dist::two_level(rows, args.slices, 1);
}

bool has_rank(const tessera_partition* p, std::int32_t rank) { return p && rank >= 0 && rank < p->rows.ranks(); }

// --- plans

void* const per_thread_stream = reinterpret_cast<void*>(2);  // CU_STREAM_PER_THREAD

struct Question {
  dist::Problem problem;
  dist::Sharing sharing;
};

Question question(const tessera_dist_args& args, const tessera_options* o, const tessera_execution* e) {
  require("partition", args.partition);
  require_timeout(args.timeout);
  const Execution how = execution(e);
  if (how.device.type == DeviceType::vulkan)
    invalid("device: is Vulkan's; over several ranks rows are on CPUs or CUDA GPUs");
  require_no_kernel(how);
  if (how.device.type == DeviceType::cuda && how.stream == per_thread_stream && args.communicator->messages->worker())
    invalid("stream: is the per-thread default stream, which is another one on the thread of this communicator");
  if (args.scheme != TESSERA_RING && args.scheme != TESSERA_GATHER)
    invalid("scheme: is ", args.scheme, "; must be TESSERA_RING or TESSERA_GATHER");
  return {.problem = {lengths_of(args.partition->lengths), args.query_heads, args.key_heads, args.head_dim,
                      args.value_dim, static_cast<Type>(args.type), options(o)},
          .sharing = {.partition = args.partition->rows,
                      .scheme = static_cast<dist::Scheme>(args.scheme),
                      .segment = args.segment,
                      .timeout = args.timeout,
                      .threads = how.threads,
                      .sm_margin = how.sm_margin,
                      .memory = how.device.type == DeviceType::cuda ? cuda_memory(how.device, how.stream)
                                                                    : std::make_shared<dist::Memory>()}};
}

std::string description(const dist::Plan& plan) {
  const dist::Problem& p = plan.question();
  const dist::Shape shape{p.Hq, p.Hk, p.D, p.Dv, p.type == Type::f32 ? 4 : 2};
  return dist::table(plan.schedule(dist::Pass::forward), plan.schedule(dist::Pass::backward), shape);
}

dist::Seed seed_of(const tessera_dist_plan& plan, const tessera_options* given) {
  const Options& own = plan.plan.question().options;
  if (!given) return {own.seed, own.seed_offset};
  Options now = options(given);
  const dist::Seed seed{now.seed, now.seed_offset};
  now.seed = own.seed, now.seed_offset = own.seed_offset;
  if (now != own) invalid("options: are not those of the plan; only seed and seed_offset may differ");
  return seed;
}

// What goes wrong on this rank before the ranks are together, or behind, the others hear too.
template <class Body>
void or_refuse(const std::shared_ptr<dist::Communicator>& messages, Body body) {
  try {
    body();
  } catch (const Failure& failure) {
    dist::refuse(messages, std::make_exception_ptr(Error(failure.status, failure.what())));
  } catch (const std::bad_alloc&) {
    dist::refuse(messages, std::current_exception());
  }
}

}  // namespace
}  // namespace tessera::api

using namespace tessera;
using namespace tessera::api;

extern "C" {

void tessera_partition_args_init(tessera_partition_args* s) {
  zero(s);
  s->ranks = s->slices = 1;
  s->align = 128;
}
void tessera_transport_init(tessera_transport* s) {
  zero(s);
  s->ranks = 1;
}
void tessera_dist_args_init(tessera_dist_args* s) {
  zero(s);
  s->query_heads = s->key_heads = 1;
  s->head_dim = s->value_dim = 64;
  s->type = TESSERA_F32;
  s->scheme = TESSERA_GATHER;
  s->timeout = 300;
}

tessera_status tessera_partition_make(const tessera_partition_args* given, tessera_partition** partition) {
  return guarded_dist([&] {
    require("partition", partition);
    const tessera_partition_args args = partition_args(given);
    *partition = with_spans(args, rows_of(args));
  });
}

tessera_status tessera_partition_from_spans(const tessera_partition_args* given, const tessera_span* spans,
                                            const int64_t* counts, tessera_partition** partition) {
  return guarded_dist([&] {
    require("partition", partition);
    require("counts", counts);
    const tessera_partition_args args = partition_args(given);
    dist::Partition rows;
    rows.slices = args.slices;
    for (std::int32_t r = 0; r < args.ranks; ++r) {
      if (counts[r] < 0) invalid("counts: holds ", counts[r], "; must be 0 or more");
      if (counts[r] > 0) require("spans", spans);
      rows.of.emplace_back();
      for (std::int64_t i = 0; i < counts[r]; ++i, ++spans)
        rows.of.back().push_back({spans->sequence, spans->begin, spans->end});
    }
    *partition = with_spans(args, std::move(rows));
  });
}

void tessera_partition_destroy(tessera_partition* partition) { delete partition; }

int32_t tessera_partition_ranks(const tessera_partition* partition) { return partition ? partition->rows.ranks() : 0; }

int64_t tessera_partition_rows(const tessera_partition* partition, int32_t rank) {
  return has_rank(partition, rank) ? partition->rows.rows(rank) : 0;
}

const tessera_span* tessera_partition_spans(const tessera_partition* partition, int32_t rank, int64_t* count) {
  const auto* spans = has_rank(partition, rank) ? &partition->spans[static_cast<std::size_t>(rank)] : nullptr;
  if (count) *count = spans ? static_cast<int64_t>(spans->size()) : 0;
  return spans ? spans->data() : nullptr;
}

tessera_status tessera_communicator_make(const tessera_transport* given, tessera_communicator** communicator) {
  return guarded_dist([&] {
    require("communicator", communicator);
    const tessera_transport t = require_struct("transport", given, tessera_transport_init);
    require_ranks(t.ranks);
    if (t.rank < 0 || t.rank >= t.ranks) invalid("rank: is ", t.rank, "; must be from 0 to ", t.ranks - 1);
    if (!t.start) invalid("start: is NULL; it is required");
    if (!t.test) invalid("test: is NULL; it is required");
    if (t.own_thread != 0 && t.own_thread != 1) invalid("own_thread: is ", t.own_thread, "; must be 0 or 1");
    auto made = std::make_unique<tessera_communicator>();
    made->messages = dist::communicator_over(t);
    *communicator = made.release();
  });
}

tessera_status tessera_communicator_threads(int32_t ranks, tessera_communicator** communicators) {
  return guarded_dist([&] {
    require("communicators", communicators);
    require_ranks(ranks);
    std::vector<std::unique_ptr<tessera_communicator>> made;
    for (std::shared_ptr<dist::Communicator>& one : dist::thread_communicators(ranks))
      made.push_back(std::make_unique<tessera_communicator>(tessera_communicator{std::move(one)}));
    for (std::size_t r = 0; r < made.size(); ++r) communicators[r] = made[r].release();
  });
}

void tessera_communicator_destroy(tessera_communicator* communicator) { delete communicator; }

int32_t tessera_communicator_rank(const tessera_communicator* communicator) {
  return communicator ? communicator->messages->rank() : 0;
}

int32_t tessera_communicator_size(const tessera_communicator* communicator) {
  return communicator ? communicator->messages->size() : 0;
}

tessera_status tessera_fail(tessera_status status, const char* sentence) {
  return fail(status, sentence ? sentence : "");
}

tessera_status tessera_dist_plan_make(const tessera_dist_args* given, const tessera_options* o,
                                      const tessera_execution* e, tessera_dist_plan** plan) {
  return guarded_dist([&] {
    const tessera_dist_args args = require_struct("dist_args", given, tessera_dist_args_init);
    require("communicator", args.communicator);
    const std::shared_ptr<dist::Communicator>& messages = args.communicator->messages;
    std::optional<Question> asked;
    or_refuse(messages, [&] {
      require("plan", plan);
      asked = question(args, o, e);
    });
    dist::Plan made(messages, std::move(asked->problem), std::move(asked->sharing));
    or_refuse(messages, [&] {
      std::string text = description(made);
      *plan = new tessera_dist_plan{messages, std::move(made), std::move(text)};
    });
  });
}

void tessera_dist_plan_destroy(tessera_dist_plan* plan) { delete plan; }

const char* tessera_dist_plan_describe(const tessera_dist_plan* plan) { return plan ? plan->description.c_str() : ""; }

tessera_status tessera_dist_forward(tessera_dist_plan* plan, const tessera_inputs* given,
                                    const tessera_outputs* results, const tessera_options* o) {
  return guarded_dist([&] {
    require("plan", plan);
    Inputs in;
    Outputs out;
    dist::Seed seed;
    or_refuse(plan->messages, [&] {
      in = inputs(given), out = outputs(results), seed = seed_of(*plan, o);
      require_no_state(out);
      check_outputs({{"o", out.o}, {"lse", out.lse}}, named(in));
    });
    plan->plan.forward(in, out, seed);
  });
}

tessera_status tessera_dist_backward(tessera_dist_plan* plan, const tessera_inputs* given,
                                     const tessera_saved* saved_given, const tessera_gradients* results,
                                     const tessera_options* o) {
  return guarded_dist([&] {
    require("plan", plan);
    Inputs in;
    Saved saved;
    Gradients out;
    dist::Seed seed;
    or_refuse(plan->messages, [&] {
      in = inputs(given), saved = saved_tensors(saved_given), out = gradients(results), seed = seed_of(*plan, o);
      std::vector<Named> read = named(in);
      for (const Named& t : {Named{"o", saved.o}, {"lse", saved.lse}, {"d_o", saved.d_o}, {"d_lse", saved.d_lse}})
        read.push_back(t);
      check_outputs({{"dq", out.dq}, {"dk", out.dk}, {"dv", out.dv}, {"dbias", out.dbias}, {"dsinks", out.dsinks}},
                    read);
    });
    plan->plan.backward(in, saved, out, seed);
  });
}

void tessera_decoder_args_init(tessera_decoder_args* s) {
  zero(s);
  s->query_heads = s->key_heads = 1;
  s->head_dim = s->value_dim = 64;
  s->type = TESSERA_F32;
  s->groups = 64;
  s->block = 4096;
  s->timeout = 300;
}

tessera_status tessera_decoder_make(const tessera_decoder_args* given, const tessera_options* o,
                                    const tessera_execution* e, tessera_decoder** decoder) {
  return guarded_dist([&] {
    const tessera_decoder_args args = require_struct("decoder_args", given, tessera_decoder_args_init);
    require("communicator", args.communicator);
    const std::shared_ptr<dist::Communicator>& messages = args.communicator->messages;
    dist::DecodeProblem problem;
    int threads = 0;
    or_refuse(messages, [&] {
      require("decoder", decoder);
      problem = {
          args.query_heads, args.key_heads,           args.head_dim, args.value_dim, static_cast<Type>(args.type),
          options(o),       {args.block, args.groups}};
      const Execution how = execution(e);
      require_no_kernel(how);
      if (how.device.type != DeviceType::any && how.device.type != DeviceType::cpu)
        invalid("device: is a GPU; decoding over several ranks is for the CPU's memory");
      threads = how.threads;
      require_timeout(args.timeout);
    });
    dist::Decoder made(messages, problem, args.timeout, threads);
    or_refuse(messages, [&] { *decoder = new tessera_decoder{messages, problem.dealing, std::move(made)}; });
  });
}

void tessera_decoder_destroy(tessera_decoder* decoder) { delete decoder; }

int32_t tessera_decoder_place(const tessera_decoder* decoder, int64_t position, int64_t* row) {
  if (!decoder || position < 0) return -1;
  const dist::Dealing::Place place = decoder->dealing.place(position, decoder->messages->size());
  if (row) *row = place.row;
  return place.rank;
}

int64_t tessera_decoder_rows(const tessera_decoder* decoder, int64_t length, int32_t rank) {
  if (!decoder || length < 0 || rank < 0 || rank >= decoder->messages->size()) return 0;
  return decoder->dealing.rows(length, rank, decoder->messages->size());
}

tessera_status tessera_decoder_forward(tessera_decoder* decoder, const tessera_inputs* given, const int64_t* lengths,
                                       int64_t sequences, const tessera_outputs* results) {
  return guarded_dist([&] {
    require("decoder", decoder);
    Inputs in;
    Outputs out;
    std::vector<Int64> keys;
    or_refuse(decoder->messages, [&] {
      in = inputs(given), out = outputs(results);
      require_no_state(out);
      require_sequences(sequences);
      if (sequences > 0) require("lengths", lengths);
      keys.assign(lengths, lengths + sequences);
      check_outputs({{"o", out.o}, {"lse", out.lse}}, named(in));
    });
    decoder->decoder.forward(in, keys, out);
  });
}

}  // extern "C"
