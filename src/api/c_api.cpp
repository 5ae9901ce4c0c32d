// SPDX-License-Identifier: Apache-2.0
// The C ABI: versioned structs in, status codes out; no exception crosses it. See tessera/tessera.h.
#include <cstring>
#include <string>
#include <vector>

#include "api/attention.hpp"
#include "api/last_error.hpp"
#include "api/structs.hpp"
#include "core/check.hpp"
#include "core/failure.hpp"
#include "core/once.hpp"
#include "tessera/tessera.h"

struct tessera_plan {
  tessera::api::Planned planned;
};

namespace {

using namespace tessera;
using namespace tessera::api;

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
