// SPDX-License-Identifier: Apache-2.0
// Fuzz target of the C ABI: valid calls, judged by the rule of docs/numerics.md and repeated with other threads, and
// damaged ones, which must be refused with a sentence or give the same bits again. See docs/testing.md, "Fuzzing".
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>

#include "cases/compare.hpp"
#include "cases/model.hpp"
#include "cases/suite.hpp"
#include "fuzz/bytes.hpp"
#include "fuzz/call.hpp"
#include "fuzz/questions.hpp"

namespace tessera::fuzz {
namespace {

using cases::Buffer;

void print_counts() {
  std::cerr << "c_api: " << counts.calls << " calls, " << counts.refused << " of them refused; " << counts.repeated
            << " repeated in other circumstances; " << counts.judged << " results judged against float64, "
            << counts.unlucky << " of them beyond the rule, within rounding's room\n";
}

[[noreturn]] void wrong(const std::string& what, const Call& call) { finding(what + "\n" + text_of(call)); }

// The same call in other circumstances: other threads, other workspace, tensors apart from each other. Same bits.
void repeat(const Call& call, const Outcome& first) {
  Call again = separated(call);
  again.execution.threads = call.execution.threads == 1 ? 3 : 1;
  if (call.workspace != Workspace::too_small && call.execution.size == sizeof(tessera_execution))
    again.workspace = call.workspace == Workspace::library ? Workspace::caller : Workspace::library;
  const Outcome second = make(again);
  ++counts.repeated;
  if (second.status != first.status)
    wrong("accepted first, then refused with other threads or in memory of its own: " + second.sentence, call);
  if (second.ran && second.outputs != first.outputs)
    wrong("other bits with other threads or in memory of its own", call);
}

// Runs a valid call; false if the kernel that was asked for is not there or does not take the type.
bool succeed(const Call& call, Outcome& outcome) {
  outcome = make(call);
  if (outcome.status == TESSERA_UNSUPPORTED && !call.kernel.empty()) return false;
  if (outcome.status != TESSERA_OK) wrong("a valid call was refused: " + outcome.sentence, call);
  if (!outcome.ran) return false;
  repeat(call, outcome);
  return true;
}

void take(Buffer& buffer, const std::vector<std::byte>& memory) {
  if (!buffer || memory.empty()) return;
  const Tensor& t = buffer.tensor();
  std::int64_t low = 0;
  for (std::size_t d = 0; d < static_cast<std::size_t>(t.ndim); ++d)
    if (t.shape[d] > 1) low += std::min<std::int64_t>((t.shape[d] - 1) * t.strides[d], 0);
  std::byte* first = static_cast<std::byte*>(t.data) + low * static_cast<std::int64_t>(cases::size_of(t.type));
  std::memcpy(first, memory.data(), memory.size());
}

[[noreturn]] void wrong(const cases::OutputReport& report, const Call& call, const cases::Case& spec) {
  wrong(report.name + ": " + report.detail + "\n" + cases::describe(spec), call);
}

// By the rule, with room: R is three standard deviations of the roundings of a few numbers, and among so many calls
// some are beyond that. What is wrong in more than rounding is further off.
void judge(const char* name, const Buffer& output, const cases::Expected& expected, const Call& call,
           const cases::Case& spec) {
  constexpr double room = 4;
  ++counts.judged;
  cases::OutputReport report = cases::compare(name, output, expected);
  if (report.ok) return;
  ++counts.unlucky;
  cases::Expected roomy = expected;
  roomy.rounding = room * report.allowed;
  report = cases::compare(name, output, roomy);
  if (!report.ok) wrong(report, call, spec);
}

void judge_lse(const Buffer& lse, const cases::Expected& expected, const Call& call, const cases::Case& spec) {
  ++counts.judged;
  const cases::OutputReport report = cases::compare_lse(lse, expected);
  if (!report.ok) wrong(report, call, spec);
}

void valid_attention(Bytes& in, bool caches) {
  cases::Case spec = case_from(in);
  if (caches) use_caches(in, spec);
  cases::CaseData data = cases::build(spec);
  Call forward = attention_call(Function::forward, data), backward = attention_call(Function::backward, data);
  execution_from(in, forward);
  backward.kernel = forward.kernel, backward.execution = forward.execution, backward.workspace = forward.workspace;

  Outcome outcome;
  if (!succeed(forward, outcome)) return;
  const auto bits_of_o = outcome.outputs.front();
  take(data.o, outcome.memory[slot_o]), take(data.lse, outcome.memory[slot_lse]);
  const cases::Expectation expected = cases::expect(data);
  judge("o", data.o, expected.o, forward, spec);
  judge_lse(data.lse, expected.lse, forward, spec);
  if (spec.no_lse) {
    forward.arguments[slot_lse].given = false;
    if (!succeed(forward, outcome) || outcome.outputs.front() != bits_of_o) wrong("o differs without lse", forward);
  }

  if (caches) return;
  for (const Slot slot : {slot_o, slot_lse}) {
    Argument& a = backward.arguments[slot];
    a = argument_of(a.name, *data.buffers()[slot]);
  }
  if (!succeed(backward, outcome)) return;
  const auto gradient = [&](const char* name, Slot slot, const cases::Expected& wanted) {
    Buffer& buffer = *data.buffers()[slot];
    if (!buffer) return;
    take(buffer, outcome.memory[slot]);
    judge(name, buffer, wanted, backward, spec);
  };
  gradient("dq", slot_dq, expected.dq), gradient("dk", slot_dk, expected.dk), gradient("dv", slot_dv, expected.dv);
  gradient("dbias", slot_dbias, expected.dbias), gradient("dsinks", slot_dsinks, expected.dsinks);
}

// One element of the merged o, and its bound on errors: weights exp(lse_n - lse) are as exact as f32 knows the lse.
void judge_merged(const Merge& merge, std::int64_t e, std::int64_t row, const Call& call) {
  double largest = -HUGE_VAL, size = 1, sum = 0, weights = 0, bound = 0;
  for (const Buffer& lse : merge.part_lse) {
    largest = std::max(largest, lse.get(row));
    if (std::isfinite(lse.get(row))) size = std::max(size, std::abs(lse.get(row)));
  }
  for (std::size_t n = 0; n < merge.part_o.size() && largest > -HUGE_VAL; ++n) {
    const double w = std::exp(merge.part_lse[n].get(row) - largest), x = merge.part_o[n].get(e);
    sum += w * x, weights += w, bound += w * std::abs(x);
  }
  const double exact = weights > 0 ? sum / weights : 0, got = merge.o.get(e);
  const double allowed =
      cases::spacing(merge.o.type(), exact) + 16 * 0x1p-24 * size * (weights > 0 ? bound / weights : 0);
  if (!(std::abs(got - exact) <= allowed))
    wrong("merged.o" + merge.o.index(e) + " is " + std::to_string(got) + ", must be " + std::to_string(exact), call);
  if (!merge.lse) return;
  const double lse = weights > 0 ? largest + std::log(weights) : -HUGE_VAL, written = merge.lse.get(row);
  if (lse == written) return;
  if (!(std::abs(written - lse) <= 16 * 0x1p-24 * size))
    wrong("merged.lse" + merge.lse.index(row) + " is " + std::to_string(written) + ", must be " + std::to_string(lse),
          call);
}

void valid_merge(Bytes& in) {
  Merge merge = merge_from(in);
  Call call = merge_call(merge);
  execution_from(in, call);
  call.kernel.clear();
  Outcome outcome;
  if (!succeed(call, outcome)) return;
  take(merge.o, outcome.memory[0]), take(merge.lse, outcome.memory[1]);
  const bool packed = merge.o.tensor().ndim == 3;
  const int first = packed ? 0 : 1;
  const std::int64_t N = merge.o.size(first), H = merge.o.size(first + 1), D = merge.o.size(first + 2);
  for (std::int64_t e = 0; e < merge.o.elements(); ++e) {
    const std::int64_t h = e / D % H, i = e / D / H % N, b = e / D / H / N;
    judge_merged(merge, e, (b * H + h) * N + i, call);
  }
  ++counts.judged;
}

void valid_mask(Bytes& in) {
  DropoutMask mask = mask_from(in);
  Call call = mask_call(mask);
  execution_from(in, call);
  call.kernel.clear();
  Outcome outcome;
  if (!succeed(call, outcome)) return;
  take(mask.mask, outcome.memory[0]);
  const Options& o = mask.options;
  const std::int64_t H = mask.mask.size(1), Nq = mask.mask.size(2), Nk = mask.mask.size(3);
  for (std::int64_t e = 0; e < mask.mask.elements(); ++e) {
    const std::int64_t j = e % Nk, i = e / Nk % Nq, h = e / Nk / Nq % H, b = e / Nk / Nq / H;
    const bool kept = cases::kept(o.seed, o.seed_offset, o.dropout, b + o.batch0, h + o.head0, i + o.row0, j + o.col0);
    if (mask.mask.get(e) != (kept ? 1 : 0)) wrong("mask" + mask.mask.index(e) + " is wrong", call);
  }
  ++counts.judged;
}

Call any_call(Bytes& in) {
  const std::int64_t kind = in.below(8);
  if (kind == 6) return merge_call(merge_from(in));
  if (kind == 7) return mask_call(mask_from(in));
  cases::Case spec = case_from(in);
  if (kind >= 4 && in.flag()) use_caches(in, spec);
  Call call = attention_call(kind % 2 == 0 ? Function::forward : Function::backward, cases::build(spec));
  if (kind == 4) use_pages(in, call);
  if (kind == 2 || kind == 3) use_parts(in, call);
  return call;
}

// What the keys are worth is the tests' business; here, that the call is taken and reads nothing but its memory.
void valid_pages(Bytes& in) {
  cases::Case spec = case_from(in);
  if (in.flag()) use_caches(in, spec);
  Call call = attention_call(Function::forward, cases::build(spec));
  use_pages(in, call);
  execution_from(in, call);
  Outcome outcome;
  succeed(call, outcome);
}

void valid_parts(Bytes& in) {
  Call call = attention_call(in.flag() ? Function::forward : Function::backward, cases::build(case_from(in)));
  use_parts(in, call);
  execution_from(in, call);
  // The promise is the CPU kernels', which take no f64.
  const bool reference = call.arguments[slot_q].view.type == TESSERA_F64;
  if (reference) call.options.part_invariant = 0, call.options.segment_rows = 0;
  Outcome outcome;
  succeed(call, outcome);
}

void damaged(Bytes& in) {
  Call call = any_call(in);
  execution_from(in, call);
  Call before = call;
  for (std::int64_t n = 1 + in.below(6); n > 0; --n) {
    before = call;
    damage(in, call);
  }
  // Sometimes the plan is one for the question before the last damage.
  const bool other_plan = in.flag();
  const Outcome outcome = make(call, other_plan ? &before : nullptr);
  if (outcome.status == TESSERA_OK && outcome.ran && !other_plan) repeat(call, outcome);
}

void facts() {
  if (tessera_version() <= 0 || !*tessera_info()) finding("no version or no information");
  tessera_plan_destroy(nullptr);
  if (tessera_plan_workspace_size(nullptr) != 0 || *tessera_plan_kernel(nullptr) || *tessera_plan_describe(nullptr) ||
      tessera_plan_key_tile(nullptr) != 0 || tessera_plan_query_tile(nullptr) != 0)
    finding("a plan that is NULL has facts");
  if (tessera_plan_forward(nullptr, nullptr, nullptr, nullptr, nullptr) != TESSERA_INVALID_ARGUMENT ||
      tessera_plan_run_forward(nullptr, nullptr, nullptr, nullptr, nullptr) != TESSERA_INVALID_ARGUMENT)
    finding("NULL was accepted");
}

}  // namespace
}  // namespace tessera::fuzz

// Memory that cannot be had is an answer of the library's, not the end of the process. The rest saves time.
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1:quarantine_size_mb=32:malloc_context_size=10";
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  std::atexit(tessera::fuzz::print_counts);
  tessera::fuzz::facts();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera::fuzz;
  Bytes in(data, size);
  switch (in.below(16)) {
    case 0:
    case 1:
    case 2:
      valid_attention(in, false);
      break;
    case 7:
      valid_attention(in, true);
      break;
    case 3:
      valid_merge(in);
      break;
    case 4:
      valid_mask(in);
      break;
    case 5:
      valid_pages(in);
      break;
    case 6:
      valid_parts(in);
      break;
    default:
      damaged(in);
  }
  return 0;
}
