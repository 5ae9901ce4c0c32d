// SPDX-License-Identifier: Apache-2.0
// Measured call times; see dist_times.hpp.
#include "cli/dist_times.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>

#include "cli/failure.hpp"
#include "cli/flags.hpp"

namespace tessera::cli {
namespace {

void add_line(const std::string& line, const std::string& place, dist::Machine& machine) {
  std::istringstream words(line);
  std::string pass, rest;
  double gflop = 0, microseconds = 0;
  const bool read = words >> pass >> gflop >> microseconds && !(words >> rest);
  if (!read || (pass != "forward" && pass != "backward") || !(gflop > 0) || !(microseconds > 0))
    throw Failure(place + " is '" + line +
                  "'; must be forward or backward, GFLOP of a call, and its microseconds, both positive.");
  (pass == "forward" ? machine.forward_times : machine.backward_times)
      .points.push_back({gflop * 1e9, microseconds * 1e-6});
}

}  // namespace

void require_no_rates(const CLI::App& command) {
  for (const char* flag : {"--forward", "--backward", "--call"})
    if (is_given(command, flag))
      throw Failure(std::string(flag) + ": is given beside --times, which says it too; give one of them.");
}

void read_call_times(const std::string& path, dist::Machine& machine) {
  std::ifstream file(path);
  if (!file) throw Failure("--times: " + path + " cannot be read.");
  std::string line;
  for (int number = 1; std::getline(file, line); ++number) {
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#') continue;
    add_line(line, "--times: line " + std::to_string(number) + " of " + path, machine);
  }
  for (dist::CallTimes* times : {&machine.forward_times, &machine.backward_times}) {
    const std::string pass = times == &machine.forward_times ? "forward" : "backward";
    if (times->empty()) throw Failure("--times: " + path + " has no line that begins with " + pass + ".");
    auto& points = times->points;
    std::ranges::sort(points, {}, &dist::CallTimes::Point::flops);
    for (std::size_t i = 1; i < points.size(); ++i)
      if (points[i].flops == points[i - 1].flops || points[i].seconds < points[i - 1].seconds) {
        std::ostringstream text;
        text << "--times: " << path << " has a " << pass << " call of " << points[i].flops * 1e-9 << " GFLOP in "
             << points[i].seconds * 1e6 << " us beside one of " << points[i - 1].flops * 1e-9 << " in "
             << points[i - 1].seconds * 1e6 << "; a larger call must not be shorter.";
        throw Failure(text.str());
      }
  }
}

}  // namespace tessera::cli
