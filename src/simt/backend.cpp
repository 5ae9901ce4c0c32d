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

constexpr Function sink_gradient{"simt/kernel/sink_gradient.cuh", "sink_gradient", "BackwardParams"};
constexpr Function vector_forward{"simt/kernel/vector_forward.cuh", "vector_forward", "ForwardParams"};
constexpr Function vector_backward_queries{"simt/kernel/vector_backward.cuh", "vector_backward_queries",
                                           "BackwardParams"};
constexpr Function vector_backward_keys{"simt/kernel/vector_backward.cuh", "vector_backward_keys", "BackwardParams"};

// One kernel of a plan and the grid it runs on; the order of steps is the order on the stream.
struct Step {
  const cuda::LoadedKernel* kernel;
  std::int64_t blocks;
  int threads;
  int shared_bytes = 0;
};

// The tile of `vector`: the largest that fits the GPU's shared memory. `rows` of a block's rows belong to one thread,
// which keeps its share of their results in registers.
std::optional<Config> vector_config(const Problem& p, int rows, int (*shared_bytes)(const Config&)) {
  for (const auto& [threads, block_cols] : {std::pair{256, 64}, {256, 32}, {128, 32}, {128, 16}, {64, 16}}) {
    Config c = config_of(p, threads);
    c.block_rows = threads / lanes_per_row * rows, c.block_cols = block_cols, c.rows_per_thread = rows;
    if (shared_bytes(c) <= cuda::properties(p.device.id).shared_bytes) return c;
  }
  return {};
}

// Collects the kernels of a plan.
class Steps {
 public:
  explicit Steps(const Problem& p) : p(p) {}

  void add(const Function& function, const Config& config, std::int64_t blocks, int shared_bytes = 0) {
    if (blocks == 0) return;
    const cuda::LoadedKernel* kernel = cuda::find_kernel(unit_text(function, config), kernel_symbol, p.device.id);
    if (shared_bytes > 0) kernel->allow_shared(static_cast<unsigned>(shared_bytes));
    list.push_back({kernel, blocks, config.threads, shared_bytes});
  }

  // What every backward pass begins with: unused rows cleared, delta and LSE prepared.
  void add_backward_start() {
    constexpr int warps = 4;
    const Config c = config_of(p, 32 * warps);
    const std::int64_t rows = std::max(p.Hq * p.Nq, p.Hk * p.Nk) * (p.packed ? 1 : p.B);
    const bool has_unused = p.packed || p.seqused_q || p.seqused_k;
    if (has_unused && !p.options.accumulate) add(clear, c, ceil_div(rows, warps));
    add(delta, c, query_blocks(p, warps));
  }

  std::vector<Step> list;

 private:
  const Problem& p;
};

std::vector<Step> naive_steps(const Problem& p) {
  constexpr int rows = 64;
  const Config c = config_of(p, rows);
  Steps steps(p);
  if (p.pass == Pass::forward) {
    steps.add(naive_forward, c, query_blocks(p, rows));
    return steps.list;
  }
  steps.add_backward_start();
  if (p.dq) steps.add(naive_backward_queries, c, query_blocks(p, rows));
  if (p.dk || p.dv) steps.add(naive_backward_keys, c, key_blocks(p, rows));
  return steps.list;
}

// Empty: no tile fits.
std::optional<std::vector<Step>> vector_steps(const Problem& p) {
  Steps steps(p);
  if (p.pass == Pass::forward) {
    // Options need registers of their own: with eight rows to a thread they would spill.
    const Config options = config_of(p, 0);
    const bool plain = !options.softcap && !options.alibi && !options.mask && !options.dropout && !p.bias;
    const int rows = p.Dv <= 128 && plain ? 8 : p.Dv <= 256 ? 4 : 2;
    const std::optional<Config> c = vector_config(p, rows, vector_forward_shared_bytes);
    if (!c) return {};
    steps.add(vector_forward, *c, query_blocks(p, c->block_rows), vector_forward_shared_bytes(*c));
    return steps.list;
  }
  steps.add_backward_start();
  if (p.dq) {
    const int rows = p.D <= 64 ? 8 : p.D <= 128 ? 4 : 2;
    const std::optional<Config> c = vector_config(p, rows, vector_backward_shared_bytes);
    if (!c) return {};
    steps.add(vector_backward_queries, *c, query_blocks(p, c->block_rows), vector_backward_shared_bytes(*c));
  }
  if (p.dk || p.dv) {
    const std::int64_t width = p.D + p.Dv;
    const int rows = width <= 64 ? 8 : width <= 256 ? 4 : width <= 512 ? 2 : 1;
    const std::optional<Config> c = vector_config(p, rows, vector_backward_shared_bytes);
    if (!c) return {};
    steps.add(vector_backward_keys, *c, key_blocks(p, c->block_rows), vector_backward_shared_bytes(*c));
  }
  if (p.dsinks) steps.add(sink_gradient, config_of(p, 256), p.Hq);
  return steps.list;
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
    if (p.dbias) return {nullptr, "dBias is asked for; this kernel does not compute it yet"};
    std::optional<std::vector<Step>> steps = vector_steps(p);
    if (!steps) return {nullptr, text("D is ", p.D, " and Dv is ", p.Dv, "; no tile fits this GPU's shared memory")};
    return {std::make_unique<LadderPlan>(p, std::move(*steps)), ""};
  }
};

}  // namespace

std::vector<const Kernel*> kernels() {
  static const VectorKernel vector;
  static const NaiveKernel naive;
  return {&vector, &naive};
}

}  // namespace tessera::simt
