// SPDX-License-Identifier: Apache-2.0
// The CPU backend's kernels and plans; see kernels.hpp. How a plan runs: cpu/run.cpp.
#include "core/failure.hpp"
#include "core/once.hpp"
#include "core/parallel.hpp"
#include "core/tensor.hpp"
#include "cpu/decode.hpp"
#include "cpu/isa.hpp"
#include "cpu/kernels.hpp"
#include "cpu/key_panels.hpp"
#include "cpu/run.hpp"

namespace tessera::cpu {
namespace {

class CpuPlan : public KernelPlan {
 public:
  CpuPlan(const Problem& problem, const Isa& isa, int threads) :
      problem(problem), isa(isa), layout(workspace_layout(problem, isa, threads)) {}

  std::size_t workspace_bytes() const override { return static_cast<std::size_t>(layout.bytes); }

  CutTiles tiles() const override { return {block_q, block_k}; }

  std::string describe() const override {
    std::string out = text("tiles of ", block_q, " queries x ", block_k, " keys in f32, ", isa.lanes, " lanes, ",
                           layout.threads, " threads, ", layout.scratch_bytes, " bytes of scratch each");
    if (const int pieces = isa.pieces(problem))
      out += text("\n               products by ", isa.unit, ", every operand the sum of ", pieces, " bf16",
                  problem.dbias ? "; dBias by multiply-adds in f32" : "");
    if (problem.pass == Pass::forward && panel_room(problem, isa) > 0)
      out += text("\n               K and V packed once per KV head, ", panel_room(problem, isa), " bytes at a time");
    if (decode_bytes(problem) > 0)
      out += text("\n               sequences of at most ", decode_queries, " queries: keys in ",
                  most_chunks(problem.longest_k()), " chunks at most, merged in order");
    if (problem.pass == Pass::backward && problem.dq)
      out +=
          text("\n               dQ in ", groups_of(problem, problem.longest_k()), " images at most, summed in order");
    if (problem.options.part_invariant) out += "\n               the bits of any cut at multiples of these tiles";
    return out;
  }

  void run(const Call& call) const override {
    if (problem.pass == Pass::forward) run_forward(problem, isa, layout, call);
    if (problem.pass == Pass::backward) run_backward(problem, isa, layout, call);
  }

 private:
  Problem problem;
  const Isa& isa;
  WorkspaceLayout layout;
};

class CpuKernel : public Kernel {
 public:
  explicit CpuKernel(const IsaChoice& choice) : choice(choice) {}

  const char* name() const override { return choice.isa->name; }
  DeviceType device() const override { return DeviceType::cpu; }

  PlanOrReason plan(const Problem& p, const Execution& execution) const override {
    if (!isa_choices().fault.empty()) invalid(isa_choices().fault);
    if (!choice.missing.empty()) return {nullptr, choice.missing};
    if (p.options.segment_rows % block_q != 0)
      return {nullptr, text("segment_rows is ", p.options.segment_rows, "; must be a multiple of ", block_q)};
    if (p.q_type == Type::f64 || p.k_type == Type::f64 || p.v_type == Type::f64)
      return {nullptr, "type is f64; this kernel takes f32, f16 and bf16"};
    if (p.q_type == Type::f32 && choice.isa->pieces(p) > 0 && !execution.kernel)
      return {nullptr, "type is f32, which takes six products of bf16 for one; only by name"};
    if (choice.isa->unit && p.qv && !execution.kernel)
      return {nullptr, text("qv is given, so ", choice.isa->unit, " would stay idle; only by name")};
    const bool idle = choice.isa->unit && choice.isa->pieces(p) == 0;
    if (idle && !has_plain_keys(p) && !execution.kernel)
      return {nullptr,
              text("k or v has a type, or scales, for which ", choice.isa->unit, " would stay idle; only by name")};
    if (idle && !execution.kernel)
      return {nullptr, text("not all types are bf16, so ", choice.isa->unit, " would stay idle; only by name")};
    return {std::make_unique<CpuPlan>(p, *choice.isa, resolve_threads(execution.threads)), ""};
  }

 private:
  IsaChoice choice;
};

}  // namespace

std::vector<const Kernel*> kernels() {
  static constinit Once<const std::vector<CpuKernel>> list;
  const auto make = [] { return std::vector<CpuKernel>(isa_choices().list.begin(), isa_choices().list.end()); };
  std::vector<const Kernel*> pointers;
  for (const CpuKernel& kernel : list.get(make)) pointers.push_back(&kernel);
  return pointers;
}

}  // namespace tessera::cpu
