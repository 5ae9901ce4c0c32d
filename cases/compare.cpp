// SPDX-License-Identifier: Apache-2.0
// The accuracy rule, the positions of infinities and NaN, and elements that must be exact or unwritten. Part of
// tessera_cases; see compare.hpp. Implements docs/numerics.md, "The rule".
#include "cases/compare.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace tessera::cases {

namespace {

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", x);
  return text;
}

void fail(OutputReport& report, const Buffer& output, std::int64_t e, const std::string& what) {
  report.ok = false;
  if (report.detail.empty()) report.detail = output.index(e) + " " + what;  // the first says enough
}

bool largest_finite(Type type, double x) {
  return std::isfinite(x) && std::abs(x) >= (type == Type::f16 ? 65504 : 3e38);
}

// Checks that need no tolerance. True: the element is excluded from the norms.
bool settled(OutputReport& report, const Buffer& output, const Expected& expected, std::int64_t e, double x) {
  const auto n = static_cast<std::size_t>(e);
  if (std::isnan(expected.bound[n])) {
    if (!output.untouched(e)) fail(report, output, e, "lies beyond the used length but was written: " + number(x));
    return true;
  }
  const double wanted = std::isfinite(expected.model[n]) ? expected.exact[n] : expected.model[n];
  if (!std::isfinite(wanted)) {
    const bool same = std::isnan(wanted) ? std::isnan(x) : x == wanted;
    const bool on_the_edge = std::isfinite(expected.exact[n]) && largest_finite(output.type(), x);
    if (!same && !on_the_edge) fail(report, output, e, "is " + number(x) + ", must be " + number(wanted));
    return true;
  }
  if (!std::isfinite(x)) {
    fail(report, output, e, "is " + number(x) + ", must be " + number(wanted));
    return true;
  }
  // Nothing contributes to this element: it must be exactly zero, or exactly what the buffer held.
  if (expected.bound[n] == 0 && x != expected.exact[n])
    fail(report, output, e, "is " + number(x) + ", must be exactly " + number(expected.exact[n]));
  return false;
}

std::string worst_text(const Buffer& output, std::int64_t e, double x, double wanted) {
  return output.index(e) + " " + number(x) + " for " + number(wanted);
}

}  // namespace

OutputReport compare(const std::string& name, const Buffer& output, const Expected& expected) {
  OutputReport report{.name = name, .type = output.type(), .worst = {}, .detail = {}};
  const std::vector<double> values = output.values();
  double error = 0, model = 0, bound = 0, norm = 0, furthest = -1;
  for (std::int64_t e = 0; e < output.elements(); ++e) {
    const auto n = static_cast<std::size_t>(e);
    const double x = values[n];
    if (settled(report, output, expected, e, x)) continue;
    const double off = x - expected.exact[n], model_off = expected.model[n] - expected.exact[n];
    error += off * off, model += model_off * model_off;
    bound += expected.bound[n] * expected.bound[n], norm += expected.exact[n] * expected.exact[n];
    if (std::abs(off) <= furthest) continue;
    furthest = std::abs(off);
    report.worst = worst_text(output, e, x, expected.exact[n]);
  }
  report.error = std::sqrt(error), report.model_error = std::sqrt(model), report.norm = std::sqrt(norm);
  report.allowed = std::max(model_factor * report.model_error, expected.rounding) + absolute_factor * std::sqrt(bound);
  report.underflow = expected.underflow;
  if (!(report.error <= report.allowed + report.underflow)) {
    report.ok = false;
    if (report.detail.empty()) report.detail = "error beyond the allowed one; worst " + report.worst;
  }
  return report;
}

OutputReport compare_lse(const Buffer& output, const Expected& expected) {
  OutputReport report{.name = "lse", .type = output.type(), .worst = {}, .detail = {}};
  double norm = 0;
  for (std::int64_t e = 0; e < output.elements(); ++e) {
    const auto n = static_cast<std::size_t>(e);
    const double x = output.get(e);
    if (settled(report, output, expected, e, x)) continue;
    const double off = std::abs(x - expected.exact[n]);
    const double allowed = absolute_factor * expected.bound[n] + spacing(output.type(), expected.exact[n]) / 2;
    norm += expected.exact[n] * expected.exact[n];
    if (report.allowed == 0 || off * report.allowed > report.error * allowed) {
      report.error = off, report.allowed = allowed;
      report.model_error = std::abs(expected.model[n] - expected.exact[n]);
      report.worst = worst_text(output, e, x, expected.exact[n]);
    }
    if (off > allowed) fail(report, output, e, "is " + number(x) + ", must be " + number(expected.exact[n]));
  }
  report.norm = std::sqrt(norm);
  return report;
}

}  // namespace tessera::cases
