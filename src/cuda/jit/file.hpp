// Files that somebody else may have made: opened once, judged by what was opened, and never waited for.
// Included by the cache, the packs and the device text of src/cuda/jit.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>

#include <optional>
#include <string>
#include <utility>

namespace tessera::cuda {

// An open file or folder; closed at the end of its scope.
class Descriptor {
 public:
  explicit Descriptor(int number) : number(number) {}
  Descriptor(Descriptor&& other) noexcept : number(std::exchange(other.number, -1)) {}
  ~Descriptor() { close(); }
  explicit operator bool() const { return number >= 0; }
  int get() const { return number; }
  // False where what was written may be lost.
  bool close();

 private:
  int number;
};

// Larger files are refused: no pack, entry or text comes near this, and a sparse file may claim any size.
inline constexpr off_t most_bytes = off_t{1} << 30;

// A regular file's whole content; else nothing, and the reason: "it is a folder".
std::optional<std::string> read_content(const Descriptor& file, std::string& reason);

// The same of a file that is named. A FIFO is not waited for, it is refused.
std::optional<std::string> read_file(const std::string& path, std::string& reason);

// Writes all of it; false where the system refuses.
bool write_all(const Descriptor& file, const char* bytes, std::size_t count);

}  // namespace tessera::cuda
