// SPDX-License-Identifier: Apache-2.0
// Implements cli/report.hpp. What the commands share and only print or write.
#include "cli/report.hpp"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ostream>

#include "cli/failure.hpp"
#include "cli/files.hpp"
#include "cli/isa.hpp"
#include "core/processor.hpp"
#include "tessera/tessera.hpp"

namespace tessera::cli {

std::string format(const char* pattern, ...) {
  va_list arguments, again;
  va_start(arguments, pattern);
  va_copy(again, arguments);
  const int length = std::vsnprintf(nullptr, 0, pattern, arguments);
  va_end(arguments);
  std::string text(static_cast<std::size_t>(std::max(0, length)) + 1, '\0');
  std::vsnprintf(text.data(), text.size(), pattern, again);
  va_end(again);
  text.pop_back();
  return text;
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return format("%.1f us", seconds * 1e6);
  if (seconds < 1) return format("%.2f ms", seconds * 1e3);
  return format("%.2f s", seconds);
}

std::string tflops_text(double operations_per_second) {
  const double rate = operations_per_second / 1e12;
  return format(rate < 1 ? "%.3g" : "%.2f", rate);
}

std::string bytes_text(std::size_t bytes) {
  const double b = static_cast<double>(bytes);
  if (bytes < 1024) return std::to_string(bytes) + " B";
  if (b < 1024.0 * 1024) return format("%.1f KiB", b / 1024);
  if (b < 1024.0 * 1024 * 1024) return format("%.1f MiB", b / (1024 * 1024));
  return format("%.2f GiB", b / (1024.0 * 1024 * 1024));
}

std::string Table::heading() const {
  std::vector<std::string> names;
  for (const Column& column : columns) names.push_back(column.heading);
  return row(names);
}

std::string Table::row(const std::vector<std::string>& cells) const {
  std::string line;
  for (std::size_t c = 0; c < columns.size() && c < cells.size(); ++c)
    line += format(columns[c].left ? "%-*s  " : "%*s  ", columns[c].width, cells[c].c_str());
  line.erase(line.find_last_not_of(' ') + 1);
  return line + "\n";
}

int usable_threads() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
}

std::string compiler() {
#if defined(__clang__)
  return format("clang %d.%d.%d", __clang_major__, __clang_minor__, __clang_patchlevel__);
#else
  return format("g++ %d.%d.%d", __GNUC__, __GNUC_MINOR__, __GNUC_PATCHLEVEL__);
#endif
}

std::string version() {
  const int v = tessera::version();
  return format("%d.%d.%d", v / 10000, v / 100 % 100, v % 100);
}

Json machine() {
  Json json;
  json["tessera"] = version();
  json["compiler"] = compiler();
  json["cpu"] = processor();
  json["instructions"] = name_of(best_isa());
  json["threads"] = usable_threads();
  json["memory_bytes"] = static_cast<long long>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
  return json;
}

void require_stdout() {
  errno = 0;
  if (std::fflush(stdout) == 0 && !std::ferror(stdout)) return;
  throw Failure(std::string("cannot write to standard output: ") +
                (errno != 0 ? std::strerror(errno) : "an earlier part of it was refused") + ".");
}

void save_json(const std::string& path, const Json& json) {
  if (path.empty()) return;
  Files files;
  files.add(path, [&](std::ostream& out) { out << json.text(); });
  files.commit();
}

}  // namespace tessera::cli
