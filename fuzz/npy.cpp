// SPDX-License-Identifier: Apache-2.0
// Fuzz target of the .npy reader: any bytes as a file. What is refused is refused with one sentence that names the
// file; what is accepted comes out of the writer and the reader as it was. See docs/testing.md, "Fuzzing".
#include "cli/npy.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <sstream>

#include "cli/failure.hpp"
#include "fuzz/bytes.hpp"

namespace {

using tessera::fuzz::finding;

// A file in memory with a path of its own.
class File {
 public:
  File() : descriptor(memfd_create("fuzzed.npy", 0)), path("/proc/self/fd/" + std::to_string(descriptor)) {
    if (descriptor < 0) finding("no file in memory");
  }
  const std::string& holding(const void* data, std::size_t size) const {
    if (ftruncate(descriptor, 0) != 0 || pwrite(descriptor, data, size, 0) != static_cast<ssize_t>(size))
      finding("the file in memory cannot be written");
    return path;
  }

 private:
  int descriptor;
  std::string path;
};

bool same(const tessera::cli::Array& a, const tessera::cli::Array& b) {
  return a.type() == b.type() && a.shape() == b.shape() && a.bytes() == b.bytes() &&
         (a.bytes() == 0 || std::memcmp(a.data<char>(), b.data<char>(), a.bytes()) == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const File file;
  const std::string& path = file.holding(data, size);
  tessera::cli::Array array;
  try {
    array = tessera::cli::read_npy(path);
  } catch (const tessera::cli::Failure& failure) {
    const std::string sentence = failure.what();
    if (!sentence.starts_with(path + ": ") || sentence.back() != '.' || sentence.find('\n') != std::string::npos)
      finding("not a sentence: " + sentence);
    return 0;
  }
  if (array.bytes() > size) finding("more data than the file has");
  std::ostringstream out;
  tessera::cli::write_npy(out, array);
  const std::string bytes = out.str();
  if (!same(array, tessera::cli::read_npy(file.holding(bytes.data(), bytes.size()))))
    finding("not the same array again");
  return 0;
}
