// SPDX-License-Identifier: Apache-2.0
// Reads and writes through file descriptors; see file.hpp.
#include "cuda/jit/file.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace tessera::cuda {

bool Descriptor::close() {
  if (number < 0) return true;
  const int closed = ::close(number);
  number = -1;
  return closed == 0;
}

std::optional<std::string> read_content(const Descriptor& file, std::string& reason) {
  struct stat status {};
  if (!file || fstat(file.get(), &status) != 0) {
    reason = std::strerror(errno);
    return {};
  }
  if (S_ISDIR(status.st_mode)) reason = "it is a folder";
  if (!S_ISDIR(status.st_mode) && !S_ISREG(status.st_mode)) reason = "it is not a regular file";
  if (S_ISREG(status.st_mode) && status.st_size > most_bytes) reason = "it is larger than 1 GiB";
  if (!S_ISREG(status.st_mode) || status.st_size > most_bytes) return {};
  std::string content(static_cast<std::size_t>(status.st_size), '\0');
  for (std::size_t have = 0; have < content.size();) {
    const ssize_t got = ::read(file.get(), content.data() + have, content.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      reason = got < 0 ? std::strerror(errno) : "it became shorter while it was read";
      return {};
    }
    have += static_cast<std::size_t>(got);
  }
  return content;
}

std::optional<std::string> read_file(const std::string& path, std::string& reason) {
  return read_content(Descriptor(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC)), reason);
}

bool write_all(const Descriptor& file, const char* bytes, std::size_t count) {
  while (count > 0) {
    const ssize_t written = ::write(file.get(), bytes, count);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes += written, count -= static_cast<std::size_t>(written);
  }
  return true;
}

}  // namespace tessera::cuda
