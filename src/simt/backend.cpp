// The ladder's kernels and plans; see kernels.hpp.
#include <optional>

#include "core/failure.hpp"
#include "core/tensor.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/cache.hpp"
#include "simt/arguments.hpp"
#include "simt/kernels.hpp"
#include "simt/unit.hpp"

namespace tessera::simt {
namespace {

constexpr Function naive_forward{"simt/kernel/naive_forward.cuh", "naive_forward", "ForwardParams"};
constexpr Function naive_backward_queries{"simt/kernel/naive_backward.cuh", "naive_backward_queries", "BackwardParams"};
constexpr Function naive_backward_keys{"simt/kernel/naive_backward.cuh", "naive_backward_keys", "BackwardParams"};
constexpr Function delta{"simt/kernel/delta.cuh", "delta", "BackwardParams"};
constexpr Function clear{"simt/kernel/clear.cuh", "clear", "BackwardParams"};

constexpr Function vector_forward{"simt/kernel/vector_forward.cuh", "vector_forward", "ForwardParams"};

// One kernel of a plan and the grid it runs on; the order of steps is the order on the stream.
struct Step {
  const cuda::LoadedKernel* kernel;
  std::int64_t blocks;
  int threads;
  int shared_bytes = 0;
};

// The kernels that a question of the early rungs compiles to.
std::vector<Step> naive_steps(const Problem& p) {
  const int device = p.device.id;
  std::vector<Step> steps;
  const auto add = [&](const Function& function, int threads, std::int64_t blocks) {
    if (blocks == 0) return;
    const std::string unit = unit_text(function, config_of(p, threads));
    steps.push_back({&cuda::find_kernel(unit, kernel_symbol, device), blocks, threads});
  };
  constexpr int rows = 64, warps = 4;
  if (p.pass == Pass::forward) {
    add(naive_forward, rows, query_blocks(p, rows));
    return steps;
  }
  const std::int64_t unused = std::max(p.Hq * p.Nq, p.Hk * p.Nk) * (p.packed ? 1 : p.B);
  if (p.packed || p.seqused_q || p.seqused_k) add(clear, 32 * warps, ceil_div(unused, warps));
  add(delta, 32 * warps, query_blocks(p, warps));
  if (p.dq) add(naive_backward_queries, rows, query_blocks(p, rows));
  if (p.dk || p.dv) add(naive_backward_keys, rows, key_blocks(p, rows));
  return steps;
}

// The tile of `vector`: the largest that fits. A thread keeps rows_per_thread x Dv / 16 numbers of O in registers.
std::optional<Config> vector_config(const Problem& p) {
  const int shared_bytes = cuda::properties(p.device.id).shared_bytes;
  const int rows = p.Dv <= 128 ? 8 : p.Dv <= 256 ? 4 : 2;
  for (const auto& [threads, block_k] : {std::pair{256, 64}, {256, 32}, {128, 32}, {128, 16}, {64, 16}}) {
    Config c = config_of(p, threads);
    c.block_q = threads / lanes_per_row * rows, c.block_k = block_k, c.rows_per_thread = rows;
    if (vector_forward_shared_bytes(c) <= shared_bytes) return c;
  }
  return {};
}

class LadderPlan : public KernelPlan {
 public:
  LadderPlan(const Problem& problem, std::vector<Step> steps) : problem(problem), steps(std::move(steps)) {}

  std::size_t workspace_bytes() const override {
    return problem.pass == Pass::forward ? 0 : static_cast<std::size_t>(2 * row_count(problem)) * sizeof(float);
  }

  std::string describe() const override {
    std::string out = text(cuda::properties(problem.device.id).name, ", ", steps.size(), " launches:");
    for (const Step& s : steps)
      out += text(" ", s.blocks, " blocks x ", s.threads, " threads (", s.kernel->registers(), " registers)");
    return out;
  }

  void run(const Call& call) const override {
    const cuda::CurrentDevice current(problem.device.id);
    ForwardParams forward;
    BackwardParams backward;
    void* params[1] = {&forward};
    if (problem.pass == Pass::forward) forward = forward_params(problem, call);
    if (problem.pass == Pass::backward) backward = backward_params(problem, call), params[0] = &backward;
    for (const Step& s : steps)
      s.kernel->launch({.grid = {static_cast<unsigned>(s.blocks)},
                        .block = {static_cast<unsigned>(s.threads)},
                        .shared_bytes = static_cast<unsigned>(s.shared_bytes),
                        .stream = static_cast<cuda::StreamHandle>(call.execution.stream)},
                       params);
  }

 private:
  Problem problem;
  std::vector<Step> steps;
};

// What the early rungs do not take, by name.
std::string refusal(const Problem& p) {
  const Options& o = p.options;
  if (p.mask) return "a mask tensor is given; this rung takes causal and window only";
  if (p.bias) return "a bias is given; this rung takes none";
  if (p.slopes) return "ALiBi slopes are given; this rung takes none";
  if (p.sinks) return "sinks are given; this rung takes none";
  if (o.softcap > 0) return text("softcap is ", o.softcap, "; this rung takes none");
  if (o.dropout > 0) return text("dropout is ", o.dropout, "; this rung takes none");
  if (o.accumulate) return "accumulate is set; this rung only writes";
  return "";
}

// What holds for every rung.
std::string common_refusal(const Problem& p) {
  if (p.device.type != DeviceType::cuda)
    return text("device is ", tessera::name_of(p.device), "; this kernel runs on cuda");
  if (p.q_type == Type::f64) return "type is f64; this kernel takes f32, f16 and bf16";
  return cuda::find_driver().reason;
}

class NaiveKernel : public Kernel {
 public:
  const char* name() const override { return "naive"; }
  PlanOrReason plan(const Problem& p, const Execution&) const override {
    if (const std::string reason = common_refusal(p); !reason.empty()) return {nullptr, reason};
    if (const std::string reason = refusal(p); !reason.empty()) return {nullptr, reason};
    return {std::make_unique<LadderPlan>(p, naive_steps(p)), ""};
  }
};

class VectorKernel : public Kernel {
 public:
  const char* name() const override { return "vector"; }
  PlanOrReason plan(const Problem& p, const Execution&) const override {
    if (const std::string reason = common_refusal(p); !reason.empty()) return {nullptr, reason};
    if (p.pass != Pass::forward) return {nullptr, "the pass is backward; this kernel has only the forward pass"};
    const std::optional<Config> c = vector_config(p);
    if (!c) return {nullptr, text("D is ", p.D, " and Dv is ", p.Dv, "; no tile fits this GPU's shared memory")};
    std::vector<Step> steps;
    const std::int64_t blocks = query_blocks(p, c->block_q);
    if (blocks > 0) {
      const auto& kernel = cuda::find_kernel(unit_text(vector_forward, *c), kernel_symbol, p.device.id);
      const int bytes = vector_forward_shared_bytes(*c);
      kernel.allow_shared(static_cast<unsigned>(bytes));
      steps.push_back({&kernel, blocks, c->threads, bytes});
    }
    return {std::make_unique<LadderPlan>(p, std::move(steps)), ""};
  }
};

}  // namespace

std::vector<const Kernel*> kernels() {
  static const VectorKernel vector;
  static const NaiveKernel naive;
  return {&vector, &naive};
}

}  // namespace tessera::simt
