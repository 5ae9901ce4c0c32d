// Runs one case on one or several kernels and judges everything that came out.
// Part of tessera_cases; see suite.hpp.
// Implements the accuracy promise of docs/numerics.md.
#include <chrono>
#include <cstring>

#include "cases/compare.hpp"
#include "cases/model.hpp"
#include "cases/suite.hpp"

namespace tessera::cases {

namespace {

// The caller's workspace: NaN everywhere, exactly as long as the plan says, with margins that must survive.
class Workspace {
 public:
  explicit Workspace(std::size_t bytes) :
      size(bytes), buffer(Type::u8, {static_cast<std::int64_t>(bytes + alignment)}) {
    const auto address = reinterpret_cast<std::uintptr_t>(buffer.tensor().data);
    first = (alignment - address % alignment) % alignment;
  }
  Execution lent(Execution execution) const {
    execution.workspace = static_cast<std::byte*>(buffer.tensor().data) + first;
    execution.workspace_bytes = size;
    return execution;
  }
  bool margins_intact() const {
    if (!buffer.margins_intact()) return false;
    for (std::size_t e = 0; e < size + alignment; ++e)
      if ((e < first || e >= first + size) && !buffer.untouched(static_cast<std::int64_t>(e))) return false;
    return true;
  }

 private:
  static constexpr std::size_t alignment = 64;
  std::size_t size, first = 0;
  Buffer buffer;
};

// Calls the library for one case; messages gather what is wrong besides the numbers.
struct Runner {
  CaseData& data;
  const Execution& execution;
  std::vector<std::string>& messages;

  template <class Out, class... Written>
  void planned(const Plan& plan, const Out& out, const Written&... written) const {
    const Workspace workspace(plan.workspace_size());
    plan.run(data.inputs(), out, written..., data.options(), workspace.lent(execution));
    if (!workspace.margins_intact()) messages.push_back("the call wrote outside its workspace");
  }

  void forward(const Outputs& outputs) const {
    if (data.spec.caller_workspace)
      planned(Plan::forward(data.inputs(), outputs, data.options(), execution), outputs);
    else
      tessera::forward(data.inputs(), outputs, data.options(), execution);
  }

  void backward() const {
    if (data.spec.caller_workspace)
      planned(Plan::backward(data.inputs(), data.saved(), data.gradients(), data.options(), execution), data.saved(),
              data.gradients());
    else
      tessera::backward(data.inputs(), data.saved(), data.gradients(), data.options(), execution);
  }
};

void judge_forward(const Runner& run, const Expectation& expected, CaseReport& report) {
  CaseData& data = run.data;
  if (data.spec.no_lse) {
    run.forward({.o = data.o.tensor(), .lse = {}});
    const auto bits = data.o.bits();
    data.o.restore();
    run.forward(data.outputs());
    if (bits != data.o.bits()) run.messages.push_back("o differs when no lse is asked for");
  } else {
    run.forward(data.outputs());
  }
  report.outputs.push_back(compare("o", data.o, expected.o));
  report.outputs.push_back(compare_lse(data.lse, expected.lse));
}

void judge_backward(const Runner& run, const Expectation& expected, CaseReport& report) {
  CaseData& data = run.data;
  run.backward();
  const auto judge = [&](const char* name, const Buffer& gradient, const Expected& wanted) {
    if (gradient) report.outputs.push_back(compare(name, gradient, wanted));
  };
  judge("dq", data.dq, expected.dq);
  judge("dk", data.dk, expected.dk);
  judge("dv", data.dv, expected.dv);
  judge("dbias", data.dbias, expected.dbias);
  judge("dsinks", data.dsinks, expected.dsinks);
}

std::vector<std::uint64_t> fingerprints(const CaseData& data, bool after_forward) {
  std::vector<std::uint64_t> prints;
  for (const Buffer* input : {&data.q, &data.k, &data.v, &data.bias, &data.mask, &data.d_o, &data.d_lse})
    prints.push_back(input->fingerprint());
  if (after_forward) prints.push_back(data.o.fingerprint()), prints.push_back(data.lse.fingerprint());
  return prints;
}

void run_on(const Case& spec, const Execution& execution, const Expectation& expected, CaseReport& report) {
  CaseData data = build(spec);
  const Runner run{data, execution, report.messages};
  const auto inputs = fingerprints(data, false);
  judge_forward(run, expected, report);
  if (inputs != fingerprints(data, false)) report.messages.push_back("the forward pass changed an input");
  if (spec.backward) {
    const auto saved = fingerprints(data, true);
    judge_backward(run, expected, report);
    if (saved != fingerprints(data, true)) report.messages.push_back("the backward pass changed an input");
  }
  for (const Buffer* buffer : data.buffers())
    if (!buffer->margins_intact()) report.messages.push_back("a margin or gap was written");
}

CaseReport blank_report(const Case& spec, const Execution& execution) {
  CaseReport report;
  report.name = spec.name, report.text = describe(spec), report.reproduce = reproduce(spec);
  report.kernel = execution.kernel ? execution.kernel : "";
  if (execution.kernel) report.reproduce += std::string(" --kernel ") + execution.kernel;
  return report;
}

// Asks for the plan alone, so that a kernel that is not there costs no time.
void plan_case(const CaseData& data, const Execution& execution, CaseReport& report) {
  try {
    report.kernel = Plan::forward(data.inputs(), data.outputs(), data.options(), execution).kernel();
    if (data.spec.backward) Plan::backward(data.inputs(), data.saved(), data.gradients(), data.options(), execution);
  } catch (const Error& error) {
    report.ok = report.skipped = error.status() == TESSERA_UNSUPPORTED;
    report.messages.push_back(error.what());
  }
}

}  // namespace

std::vector<CaseReport> run_case(const Case& spec, const std::vector<Execution>& executions) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<CaseReport> reports;
  for (const Execution& execution : executions) reports.push_back(blank_report(spec, execution));
  try {
    const CaseData data = build(spec);
    const Expectation expected = expect(data);
    for (std::size_t n = 0; n < executions.size(); ++n) {
      CaseReport& report = reports[n];
      plan_case(data, executions[n], report);
      if (!report.ok || report.skipped) continue;
      try {
        run_on(spec, executions[n], expected, report);
      } catch (const std::exception& error) {
        report.messages.push_back(error.what());
      }
      report.ok = report.messages.empty();
      for (const OutputReport& output : report.outputs) report.ok = report.ok && output.ok;
    }
  } catch (const std::exception& error) {
    for (CaseReport& report : reports) report.ok = false, report.messages.push_back(error.what());
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
  for (CaseReport& report : reports) report.seconds = taken.count();
  return reports;
}

CaseReport run_case(const Case& spec, const Execution& execution) {
  return run_case(spec, std::vector<Execution>{execution}).front();
}

}  // namespace tessera::cases
