// Packs of compiled kernels; see pack.hpp.
#include "cuda/jit/pack.hpp"

#include <cstdlib>

#include "core/failure.hpp"

namespace tessera::cuda {

// From the build: the pack's bytes, or none.
extern const unsigned char embedded_pack[];
extern const std::size_t embedded_pack_size;

namespace {

constexpr std::string_view magic = "TESSERA PACK 1\n";
constexpr std::size_t key_digits = 64, size_digits = 16;

const Pack& library_pack() {
  static const Pack pack =
      embedded_pack_size == 0 ? Pack{} : read_pack({reinterpret_cast<const char*>(embedded_pack), embedded_pack_size});
  return pack;
}

}  // namespace

std::string write_pack(const Pack& pack) {
  std::string out(magic);
  for (const auto& [key, cubin] : pack) {
    std::string size(size_digits, '0');
    for (std::size_t n = cubin.size(), i = size_digits; i-- > 0; n >>= 4) size[i] = "0123456789abcdef"[n & 15];
    out += key;
    out += size;
    out.append(cubin.data(), cubin.size());
  }
  return out;
}

Pack read_pack(std::string_view bytes) {
  const auto damaged = [] { throw Failure(TESSERA_DEVICE_ERROR, "this is not a pack of kernels, or it is damaged"); };
  if (!bytes.starts_with(magic)) damaged();
  bytes.remove_prefix(magic.size());
  Pack pack;
  while (!bytes.empty()) {
    if (bytes.size() < key_digits + size_digits) damaged();
    const std::string key(bytes.substr(0, key_digits)), digits(bytes.substr(key_digits, size_digits));
    const std::size_t size = std::strtoull(digits.c_str(), nullptr, 16);
    bytes.remove_prefix(key_digits + size_digits);
    if (bytes.size() < size) damaged();
    pack[key].assign(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    bytes.remove_prefix(size);
  }
  return pack;
}

std::optional<std::vector<char>> find_in_packs(const std::string& unit_key) {
  const auto found = library_pack().find(unit_key);
  if (found == library_pack().end()) return {};
  return found->second;
}

std::size_t packed_kernels() { return library_pack().size(); }

}  // namespace tessera::cuda
