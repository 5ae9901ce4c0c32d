// SPDX-License-Identifier: Apache-2.0
// Runs one case on one or several kernels and judges everything that came out.
// Part of tessera_cases; see suite.hpp.
// Implements the accuracy promise of docs/numerics.md.
#include <algorithm>
#include <chrono>

#include "cases/compare.hpp"
#include "cases/device.hpp"
#include "cases/model.hpp"
#include "cases/suite.hpp"

namespace tessera::cases {

namespace {

// The caller's workspace: poisoned with NaN, of exactly the plan's size, with guard zones that must stay intact.
class Workspace {
 public:
  Workspace(Device device, std::size_t bytes) :
      size(bytes), content(bytes + 2 * margin, std::byte{0xFF}), memory(device, content.size()) {
    memory.write(content.data(), content.size());
  }
  Execution lent(Execution execution) const {
    execution.workspace = static_cast<std::byte*>(memory.data()) + margin;
    execution.workspace_bytes = size;
    return execution;
  }
  bool margins_intact() {
    memory.read(content.data(), content.size());
    const auto is_intact = [](std::byte b) { return b == std::byte{0xFF}; };
    return std::all_of(content.begin(), content.begin() + margin, is_intact) &&
           std::all_of(content.end() - margin, content.end(), is_intact);
  }

 private:
  static constexpr std::ptrdiff_t margin = 4096;
  std::size_t size;
  std::vector<std::byte> content;
  DeviceMemory memory;
};

// Calls the library for one case; messages gather what is wrong besides the numbers.
struct Runner {
  CaseData& data;
  Placed& placed;
  const Execution& execution;
  std::vector<std::string>& messages;

  // A GPU's workspace always comes from the caller.
  bool lends_workspace() const { return data.spec.caller_workspace || on_device(); }
  bool on_device() const {
    return execution.device.type == DeviceType::cuda || execution.device.type == DeviceType::vulkan;
  }

  template <class Out, class... Written>
  void planned(const Plan& plan, const Out& out, const Written&... written) const {
    Workspace workspace(execution.device, plan.workspace_size());
    plan.run(placed.inputs(), out, written..., data.options(), workspace.lent(execution));
    if (!workspace.margins_intact()) messages.push_back("the call wrote outside its workspace");
  }

  void forward(bool with_lse) const {
    Outputs outputs = placed.outputs();
    if (!with_lse) outputs.lse = {};
    placed.upload();
    if (lends_workspace())
      planned(Plan::forward(placed.inputs(), outputs, data.options(), execution), outputs);
    else
      tessera::forward(placed.inputs(), outputs, data.options(), execution);
    placed.download();
  }

  void backward() const {
    const Saved saved = placed.saved();
    const Gradients gradients = placed.gradients();
    placed.upload();
    if (lends_workspace())
      planned(Plan::backward(placed.inputs(), saved, gradients, data.options(), execution), saved, gradients);
    else
      tessera::backward(placed.inputs(), saved, gradients, data.options(), execution);
    placed.download();
  }
};

void judge_forward(const Runner& run, const Expectation& expected, CaseReport& report) {
  CaseData& data = run.data;
  if (data.spec.no_lse) {
    run.forward(false);
    const auto bits = data.o.bits();
    data.o.restore();
    run.forward(true);
    if (bits != data.o.bits()) run.messages.push_back("o differs when no lse is asked for");
  } else {
    run.forward(true);
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
  for (const Buffer* input : {&data.q, &data.k, &data.v, &data.bias, &data.mask, &data.d_o, &data.d_lse, &data.k_scale,
                              &data.v_scale, &data.qv})
    prints.push_back(input->fingerprint());
  if (after_forward) prints.push_back(data.o.fingerprint()), prints.push_back(data.lse.fingerprint());
  return prints;
}

void run_on(const Case& spec, const Execution& execution, const Expectation& expected, CaseReport& report) {
  CaseData data = build(spec);
  Placed placed(data, execution.device);
  const Runner run{data, placed, execution, report.messages};
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
  if (execution.device.type == DeviceType::cuda) report.reproduce += " --device cuda";
  if (execution.device.type == DeviceType::vulkan) report.reproduce += " --device vulkan";
  if (!spec.options.deterministic) report.reproduce += " --nondeterministic";
  return report;
}

// Only plans, so that a missing kernel is skipped before anything is computed.
void plan_case(CaseData& data, const Execution& execution, CaseReport& report) {
  try {
    const Placed placed(data, execution.device);
    report.kernel = Plan::forward(placed.inputs(), placed.outputs(), data.options(), execution).kernel();
    if (data.spec.backward)
      Plan::backward(placed.inputs(), placed.saved(), placed.gradients(), data.options(), execution);
  } catch (const Error& error) {
    report.ok = report.skipped = error.status() == TESSERA_UNSUPPORTED;
    report.messages.push_back(error.what());
  }
}

bool runs(const CaseReport& planned) { return planned.ok && !planned.skipped; }

void judge_on(const Case& spec, const Execution& execution, const Expectation& expected, CaseReport& report) {
  try {
    run_on(spec, execution, expected, report);
  } catch (const std::exception& error) {
    report.messages.push_back(error.what());
  }
  report.ok = report.messages.empty();
  for (const OutputReport& output : report.outputs) report.ok = report.ok && output.ok;
}

}  // namespace

std::vector<CaseReport> run_case(const Case& spec, const std::vector<Execution>& executions) {
  const auto start = std::chrono::steady_clock::now();
  std::vector<CaseReport> reports;
  for (const Execution& execution : executions) reports.push_back(blank_report(spec, execution));
  try {
    CaseData data = build(spec);
    bool wanted = false;
    for (std::size_t n = 0; n < executions.size(); ++n) {
      plan_case(data, executions[n], reports[n]);
      wanted = wanted || runs(reports[n]);
    }
    const Expectation expected = wanted ? expect(data) : Expectation{};  // the longest part of most cases
    for (std::size_t n = 0; n < executions.size(); ++n)
      if (runs(reports[n])) judge_on(spec, executions[n], expected, reports[n]);
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
