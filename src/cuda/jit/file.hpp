// SPDX-License-Identifier: Apache-2.0
// Safe file access, for files that somebody else may have made. A file is opened once and checked by its descriptor (no
// race between check and use), and opening never blocks. Included by the cache, the packs and the sources of
// src/cuda/jit.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <optional>
#include <string>
#include <utility>

namespace tessera::cuda {

// Owns a file descriptor (RAII).
class Descriptor {
 public:
  explicit Descriptor(int number) : number(number) {}
  Descriptor(Descriptor&& other) noexcept : number(std::exchange(other.number, -1)) {}
  ~Descriptor() { close(); }
  explicit operator bool() const { return number >= 0; }
  int get() const { return number; }
  // False: written data may be lost.
  bool close();

 private:
  int number;
};

// Larger files are refused: no pack, entry or text comes near this, and a sparse file may claim any size.
inline constexpr off_t most_bytes = off_t{1} << 30;

// The whole content of a regular file, or nothing and the reason, such as "it is a folder".
std::optional<std::string> read_content(const Descriptor& file, std::string& reason);

// The same by path. A FIFO is refused instead of blocking.
std::optional<std::string> read_file(const std::string& path, std::string& reason);

// Retries partial writes until all is written; false on an error.
bool write_all(const Descriptor& file, const char* bytes, std::size_t count);

}  // namespace tessera::cuda
