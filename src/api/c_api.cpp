// SPDX-License-Identifier: Apache-2.0
// The C ABI: versioned structs in, status codes out; no exception crosses it. See tessera/tessera.h.
#include <cstring>
#include <string>
#include <vector>

#include "api/attention.hpp"
#include "api/last_error.hpp"
#include "core/check.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "tessera/tessera.h"

struct tessera_plan {
  tessera::api::Planned planned;
};

namespace {

using namespace tessera;
using api::guarded;

// --- structs

// Offsets at which the fields of a struct end. A caller's size must be one of them: a truncated field is refused.
template <class Struct, class... Fields>
bool ends_one_of(std::size_t size, Fields Struct::*... fields) {
  static_assert((sizeof(Fields) + ...) == sizeof(Struct), "every field, and no padding");
  const Struct s{};
  const auto end = [&](const auto& field) {
    return static_cast<std::size_t>(reinterpret_cast<const char*>(&field + 1) - reinterpret_cast<const char*>(&s));
  };
  return ((end(s.*fields) == size) || ...);
}

bool ends_a_field(const tessera_tensor*, std::size_t size) {
  using T = tessera_tensor;
  return ends_one_of(size, &T::size, &T::data, &T::type, &T::ndim, &T::device_type, &T::device_id, &T::shape,
                     &T::strides);
}
bool ends_a_field(const tessera_inputs*, std::size_t size) {
  using T = tessera_inputs;
  return ends_one_of(size, &T::size, &T::q, &T::k, &T::v, &T::bias, &T::mask, &T::slopes, &T::sinks, &T::cu_seqlens_q,
                     &T::cu_seqlens_k, &T::seqused_q, &T::seqused_k, &T::rng, &T::block_table, &T::v_block_table,
                     &T::page_indptr, &T::page_indices, &T::leftpad_k, &T::state_o, &T::state_m, &T::state_l,
                     &T::seq_row0, &T::seq_col0, &T::seq_batch0, &T::k_scale, &T::v_scale, &T::qv, &T::tree_mask,
                     &T::positions);
}
bool ends_a_field(const tessera_outputs*, std::size_t size) {
  using T = tessera_outputs;
  return ends_one_of(size, &T::size, &T::o, &T::lse, &T::status, &T::state_o, &T::state_m, &T::state_l);
}
bool ends_a_field(const tessera_append_args*, std::size_t size) {
  using T = tessera_append_args;
  return ends_one_of(size, &T::size, &T::k_new, &T::v_new, &T::k, &T::v, &T::cu_seqlens_new, &T::seqused_k,
                     &T::block_table, &T::v_block_table, &T::page_indptr, &T::page_indices, &T::slots, &T::rotary_cos,
                     &T::rotary_sin, &T::positions, &T::q, &T::q_out, &T::q_positions, &T::status, &T::interleaved,
                     &T::reserved, &T::k_scale, &T::v_scale);
}
bool ends_a_field(const tessera_saved*, std::size_t size) {
  using T = tessera_saved;
  return ends_one_of(size, &T::size, &T::o, &T::lse, &T::d_o, &T::d_lse);
}
bool ends_a_field(const tessera_gradients*, std::size_t size) {
  using T = tessera_gradients;
  return ends_one_of(size, &T::size, &T::dq, &T::dk, &T::dv, &T::dbias, &T::dsinks);
}
bool ends_a_field(const tessera_options*, std::size_t size) {
  using T = tessera_options;
  return ends_one_of(size, &T::size, &T::scale, &T::softcap, &T::causal, &T::alignment, &T::diagonal_offset,
                     &T::window_left, &T::window_right, &T::dropout, &T::seed, &T::seed_offset, &T::row0, &T::col0,
                     &T::head0, &T::batch0, &T::max_seqlen_q, &T::max_seqlen_k, &T::accumulate, &T::deterministic,
                     &T::part_invariant, &T::reserved, &T::segment_rows);
}
bool ends_a_field(const tessera_execution*, std::size_t size) {
  using T = tessera_execution;
  return ends_one_of(size, &T::size, &T::device_type, &T::device_id, &T::stream, &T::threads, &T::sm_margin,
                     &T::workspace, &T::workspace_bytes, &T::kernel);
}

// ABI compatibility. A caller with an older header passes a shorter struct: the missing fields take their defaults. A
// longer struct, from a newer header, may hold fields that this library would ignore, so it is refused.
template <class Struct>
Struct read_struct(const char* name, const Struct* given, void (*init)(Struct*)) {
  Struct full;
  init(&full);
  if (!given) return full;
  if (given->size < sizeof(std::size_t))
    invalid(name, ": size is ", given->size, "; call tessera_", name, "_init before filling it in");
  if (given->size > sizeof(Struct))
    invalid(name, ": size is ", given->size, " but this library, version ", tessera_version(), ", knows ",
            sizeof(Struct), "; the header is newer than the library");
  if (!ends_a_field(given, given->size))
    invalid(name, ": size is ", given->size, ", which ends inside a field; must be the size of a tessera_", name,
            " that some header declares");
  std::memcpy(static_cast<void*>(&full), given, given->size);
  full.size = sizeof(Struct);
  return full;
}

template <class Struct>
Struct require_struct(const char* name, const Struct* given, void (*init)(Struct*)) {
  if (!given) invalid(name, ": is NULL; it is required");
  return read_struct(name, given, init);
}

Tensor tensor(const char* name, const tessera_tensor* given) {
  if (!given) return {};
  const tessera_tensor c = read_struct("tensor", given, tessera_tensor_init);
  Tensor t;
  t.data = c.data;
  t.type = static_cast<Type>(c.type);
  t.device = {static_cast<DeviceType>(c.device_type), c.device_id};
  t.ndim = c.ndim;
  // ndim == 0 means "not given" inside the library: a given tensor without dimensions must not be taken for an absent
  // one.
  if (c.ndim < 1 || c.ndim > 4) invalid(name, ": has ", c.ndim, " dimensions; tensors have 1 to 4");
  for (std::size_t i = 0; i < 4; ++i) t.shape[i] = c.shape[i], t.strides[i] = c.strides[i];
  return t;
}

Inputs inputs(const tessera_inputs* given) {
  const tessera_inputs c = require_struct("inputs", given, tessera_inputs_init);
  return {.q = tensor("q", c.q),
          .k = tensor("k", c.k),
          .v = tensor("v", c.v),
          .bias = tensor("bias", c.bias),
          .mask = tensor("mask", c.mask),
          .slopes = tensor("slopes", c.slopes),
          .sinks = tensor("sinks", c.sinks),
          .cu_seqlens_q = tensor("cu_seqlens_q", c.cu_seqlens_q),
          .cu_seqlens_k = tensor("cu_seqlens_k", c.cu_seqlens_k),
          .seqused_q = tensor("seqused_q", c.seqused_q),
          .seqused_k = tensor("seqused_k", c.seqused_k),
          .rng = tensor("rng", c.rng),
          .block_table = tensor("block_table", c.block_table),
          .v_block_table = tensor("v_block_table", c.v_block_table),
          .page_indptr = tensor("page_indptr", c.page_indptr),
          .page_indices = tensor("page_indices", c.page_indices),
          .leftpad_k = tensor("leftpad_k", c.leftpad_k),
          .state = {.o = tensor("inputs.state_o", c.state_o),
                    .m = tensor("inputs.state_m", c.state_m),
                    .l = tensor("inputs.state_l", c.state_l)},
          .seq_row0 = tensor("seq_row0", c.seq_row0),
          .seq_col0 = tensor("seq_col0", c.seq_col0),
          .seq_batch0 = tensor("seq_batch0", c.seq_batch0),
          .k_scale = tensor("k_scale", c.k_scale),
          .v_scale = tensor("v_scale", c.v_scale),
          .qv = tensor("qv", c.qv),
          .tree_mask = tensor("tree_mask", c.tree_mask),
          .positions = tensor("positions", c.positions)};
}

Outputs outputs(const tessera_outputs* given) {
  const tessera_outputs c = require_struct("outputs", given, tessera_outputs_init);
  return {.o = tensor("o", c.o),
          .lse = tensor("lse", c.lse),
          .status = tensor("status", c.status),
          .state = {.o = tensor("outputs.state_o", c.state_o),
                    .m = tensor("outputs.state_m", c.state_m),
                    .l = tensor("outputs.state_l", c.state_l)}};
}

AppendArgs append_args(const tessera_append_args* given) {
  const tessera_append_args c = require_struct("append_args", given, tessera_append_args_init);
  return {.k_new = tensor("k_new", c.k_new),
          .v_new = tensor("v_new", c.v_new),
          .k = tensor("k", c.k),
          .v = tensor("v", c.v),
          .cu_seqlens_new = tensor("cu_seqlens_new", c.cu_seqlens_new),
          .seqused_k = tensor("seqused_k", c.seqused_k),
          .block_table = tensor("block_table", c.block_table),
          .v_block_table = tensor("v_block_table", c.v_block_table),
          .page_indptr = tensor("page_indptr", c.page_indptr),
          .page_indices = tensor("page_indices", c.page_indices),
          .slots = tensor("slots", c.slots),
          .rotary_cos = tensor("rotary_cos", c.rotary_cos),
          .rotary_sin = tensor("rotary_sin", c.rotary_sin),
          .positions = tensor("positions", c.positions),
          .q = tensor("q", c.q),
          .q_out = tensor("q_out", c.q_out),
          .q_positions = tensor("q_positions", c.q_positions),
          .status = tensor("status", c.status),
          .interleaved = c.interleaved != 0,
          .k_scale = tensor("k_scale", c.k_scale),
          .v_scale = tensor("v_scale", c.v_scale)};
}

Saved saved_tensors(const tessera_saved* given) {
  const tessera_saved c = require_struct("saved", given, tessera_saved_init);
  return {.o = tensor("o", c.o),
          .lse = tensor("lse", c.lse),
          .d_o = tensor("d_o", c.d_o),
          .d_lse = tensor("d_lse", c.d_lse)};
}

Gradients gradients(const tessera_gradients* given) {
  const tessera_gradients c = require_struct("gradients", given, tessera_gradients_init);
  return {.dq = tensor("dq", c.dq),
          .dk = tensor("dk", c.dk),
          .dv = tensor("dv", c.dv),
          .dbias = tensor("dbias", c.dbias),
          .dsinks = tensor("dsinks", c.dsinks)};
}

Options options(const tessera_options* given) {
  const tessera_options c = read_struct("options", given, tessera_options_init);
  return {.scale = c.scale,
          .softcap = c.softcap,
          .causal = c.causal != 0,
          .alignment = static_cast<Alignment>(c.alignment),
          .diagonal_offset = c.diagonal_offset,
          .window_left = c.window_left,
          .window_right = c.window_right,
          .dropout = c.dropout,
          .seed = c.seed,
          .seed_offset = c.seed_offset,
          .row0 = c.row0,
          .col0 = c.col0,
          .head0 = c.head0,
          .batch0 = c.batch0,
          .max_seqlen_q = c.max_seqlen_q,
          .max_seqlen_k = c.max_seqlen_k,
          .accumulate = c.accumulate != 0,
          .deterministic = c.deterministic != 0,
          .part_invariant = c.part_invariant != 0,
          .segment_rows = c.segment_rows};
}

Execution execution(const tessera_execution* given) {
  const tessera_execution c = read_struct("execution", given, tessera_execution_init);
  return {.device = {static_cast<DeviceType>(c.device_type), c.device_id},
          .stream = c.stream,
          .threads = c.threads,
          .workspace = c.workspace,
          .workspace_bytes = c.workspace_bytes,
          .kernel = c.kernel,
          .sm_margin = c.sm_margin};
}

// --- a call from the C structs

struct CheckedCall {
  Call call;
  Problem problem;
};

CheckedCall forward_call(const tessera_inputs* in, const tessera_outputs* out, const tessera_options* o,
                         const tessera_execution* e) {
  CheckedCall c;
  c.call = {.inputs = inputs(in),
            .outputs = outputs(out),
            .saved = {},
            .gradients = {},
            .options = options(o),
            .execution = execution(e)};
  c.problem = check_forward(c.call.inputs, c.call.outputs, c.call.options, c.call.execution);
  return c;
}

CheckedCall backward_call(const tessera_inputs* in, const tessera_saved* saved, const tessera_gradients* grads,
                          const tessera_options* o, const tessera_execution* e) {
  CheckedCall c;
  c.call = {.inputs = inputs(in),
            .outputs = {},
            .saved = saved_tensors(saved),
            .gradients = gradients(grads),
            .options = options(o),
            .execution = execution(e)};
  c.problem = check_backward(c.call.inputs, c.call.saved, c.call.gradients, c.call.options, c.call.execution);
  return c;
}

tessera_plan* make_plan(const CheckedCall& c) {
  auto plan = std::make_unique<tessera_plan>();
  plan->planned = api::choose(c.problem, c.call.execution);
  plan->planned.description = api::describe(plan->planned, c.call.execution);
  return plan.release();
}

void require_plan(const void* plan) {
  if (!plan) invalid("plan: is NULL; it is required");
}

void run_plan(const tessera_plan* plan, const CheckedCall& c) {
  require_plan(plan);
  api::run(plan->planned, c.problem, c.call);
}

void run_now(const CheckedCall& c) { api::run(*api::choose_cached(c.problem, c.call.execution), c.problem, c.call); }

template <class Struct>
void zero(Struct* s) {
  std::memset(s, 0, sizeof(*s));
  s->size = sizeof(*s);
}

}  // namespace

extern "C" {

void tessera_tensor_init(tessera_tensor* t) {
  zero(t);
  t->type = TESSERA_F32;
  t->device_type = TESSERA_DEVICE_CPU;
}
void tessera_inputs_init(tessera_inputs* s) { zero(s); }
void tessera_outputs_init(tessera_outputs* s) { zero(s); }
void tessera_append_args_init(tessera_append_args* s) { zero(s); }
void tessera_saved_init(tessera_saved* s) { zero(s); }
void tessera_gradients_init(tessera_gradients* s) { zero(s); }
void tessera_options_init(tessera_options* s) {
  zero(s);
  s->scale = TESSERA_DEFAULT_SCALE;
  s->window_left = s->window_right = -1;
  s->max_seqlen_q = s->max_seqlen_k = -1;
  s->deterministic = 1;
}
void tessera_execution_init(tessera_execution* s) { zero(s); }

tessera_status tessera_forward(const tessera_inputs* in, const tessera_outputs* out, const tessera_options* o,
                               const tessera_execution* e) {
  return guarded([&] { run_now(forward_call(in, out, o, e)); });
}

tessera_status tessera_backward(const tessera_inputs* in, const tessera_saved* saved, const tessera_gradients* grads,
                                const tessera_options* o, const tessera_execution* e) {
  return guarded([&] { run_now(backward_call(in, saved, grads, o, e)); });
}

tessera_status tessera_append(const tessera_append_args* args, const tessera_execution* e) {
  return guarded([&] { api::append(append_args(args), execution(e)); });
}

tessera_status tessera_merge(const tessera_outputs* partials, int64_t n, const tessera_outputs* merged,
                             const tessera_execution* e) {
  return guarded([&] {
    if (n < 1) invalid("n: is ", n, "; merging needs at least one partial result");
    if (!partials) invalid("partials: is NULL but n is ", n, "; it is required");
    std::vector<Outputs> parts;
    // The array's stride is the caller's struct size, which the first element holds.
    const auto* bytes = reinterpret_cast<const char*>(partials);
    for (int64_t i = 0; i < n; ++i) {
      const auto* part = reinterpret_cast<const tessera_outputs*>(bytes + static_cast<std::size_t>(i) * partials->size);
      if (part->size != partials->size)
        invalid("partials[", i, "]: size is ", part->size, " but that of partials[0] is ", partials->size,
                "; all elements of an array have one size");
      parts.push_back(outputs(part));
    }
    api::merge(parts, outputs(merged), execution(e));
  });
}

tessera_status tessera_dropout_mask(const tessera_tensor* mask, const tessera_tensor* rng, const tessera_options* o,
                                    const tessera_execution* e) {
  return guarded([&] { api::dropout_mask(tensor("mask", mask), tensor("rng", rng), options(o), execution(e)); });
}

tessera_status tessera_plan_forward(const tessera_inputs* in, const tessera_outputs* out, const tessera_options* o,
                                    const tessera_execution* e, tessera_plan** plan) {
  return guarded([&] {
    require_plan(plan);
    *plan = make_plan(forward_call(in, out, o, e));
  });
}

tessera_status tessera_plan_backward(const tessera_inputs* in, const tessera_saved* saved,
                                     const tessera_gradients* grads, const tessera_options* o,
                                     const tessera_execution* e, tessera_plan** plan) {
  return guarded([&] {
    require_plan(plan);
    *plan = make_plan(backward_call(in, saved, grads, o, e));
  });
}

void tessera_plan_destroy(tessera_plan* plan) { delete plan; }

size_t tessera_plan_workspace_size(const tessera_plan* plan) { return plan ? plan->planned.workspace_bytes() : 0; }
const char* tessera_plan_kernel(const tessera_plan* plan) { return plan ? plan->planned.kernel->name() : ""; }
int64_t tessera_plan_key_tile(const tessera_plan* plan) { return plan ? plan->planned.plan->tiles().keys : 0; }
int64_t tessera_plan_query_tile(const tessera_plan* plan) { return plan ? plan->planned.plan->tiles().queries : 0; }
const char* tessera_plan_describe(const tessera_plan* plan) { return plan ? plan->planned.description.c_str() : ""; }

tessera_status tessera_plan_run_forward(const tessera_plan* plan, const tessera_inputs* in, const tessera_outputs* out,
                                        const tessera_options* o, const tessera_execution* e) {
  return guarded([&] { run_plan(plan, forward_call(in, out, o, e)); });
}

tessera_status tessera_plan_run_backward(const tessera_plan* plan, const tessera_inputs* in, const tessera_saved* saved,
                                         const tessera_gradients* grads, const tessera_options* o,
                                         const tessera_execution* e) {
  return guarded([&] { run_plan(plan, backward_call(in, saved, grads, o, e)); });
}

const char* tessera_last_error(void) { return api::last_sentence(); }

int tessera_version(void) {
  return TESSERA_VERSION_MAJOR * 10000 + TESSERA_VERSION_MINOR * 100 + TESSERA_VERSION_PATCH;
}

const char* tessera_info(void) {
  static constinit Once<const std::string> known;
  const char* lines = "";
  guarded([&] { lines = known.get(api::info).c_str(); });
  return lines;
}

}  // extern "C"
