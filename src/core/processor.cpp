// SPDX-License-Identifier: Apache-2.0
// See processor.hpp.
#include "core/processor.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <string_view>

namespace tessera {

std::string processor() {
  char text[4096];  // the first processor's part; not a stream, which takes the file for missing when memory is short
  const int file = open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC);
  const ssize_t bytes = file < 0 ? 0 : read(file, text, sizeof(text));
  if (file >= 0) close(file);
  const std::string_view all(text, bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  const auto line = all.find("model name");
  const auto begin = line == all.npos ? all.npos : all.find(": ", line), end = all.find('\n', line);
  return begin < end && end != all.npos ? std::string(all.substr(begin + 2, end - begin - 2)) : "unknown";
}

}  // namespace tessera
