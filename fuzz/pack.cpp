// SPDX-License-Identifier: Apache-2.0
// Fuzz target of the reader of packs. The first byte chooses: the rest is a whole file, or what follows a file's right
// checksum, which no fuzzer would guess. What is accepted comes out of writer and reader as it was. See
// docs/testing.md, "Fuzzing".
#include "cuda/jit/pack.hpp"

#include <cstring>
#include <memory>

#include "core/failure.hpp"
#include "cuda/jit/sha256.hpp"
#include "fuzz/bytes.hpp"

namespace {

using namespace tessera;

// In memory of exactly its size: AddressSanitizer sees a step beyond it.
cuda::Pack read(const std::string& bytes) {
  const std::unique_ptr<char[]> copy(new char[bytes.size()]);
  if (!bytes.empty()) std::memcpy(copy.get(), bytes.data(), bytes.size());
  return cuda::read_pack({copy.get(), bytes.size()});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::string body(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string empty = cuda::write_pack({});  // magic and checksum
  const std::string magic = empty.substr(0, empty.find('\n') + 1);
  cuda::Pack pack;
  try {
    pack = read(data[0] % 2 == 0 ? magic + cuda::Sha256().add(body).hex() + body : body);
  } catch (const Failure& failure) {
    if (!*failure.what()) fuzz::finding("refused without a sentence");
    return 0;
  }
  std::size_t held = 0;
  for (const auto& [key, kernel] : pack) held += key.size() + kernel.cubin.size();
  if (held > size) fuzz::finding("more kernels than the bytes hold");
  if (read(cuda::write_pack(pack)) != pack) fuzz::finding("not the same pack again");
  return 0;
}
