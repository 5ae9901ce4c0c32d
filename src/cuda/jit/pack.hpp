// SPDX-License-Identifier: Apache-2.0
// Packs: archives of cubins compiled ahead of time (AOT), similar to a fat binary. Common problems then have no JIT
// compilation at their first call, and a machine without NVRTC still runs them. Entries are keyed by unit_key():
// sources, configuration and architecture, not the compiler's version. Included by src/cuda/jit, src/api and `tessera
// pack`.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit/compile.hpp"

namespace tessera::cuda {

// A unit with human-readable names: "vector_forward", "f32 D=64".
struct NamedUnit {
  std::string kernel, variant;
  Unit unit;
};

struct PackedKernel {
  std::string architecture, kernel, variant;
  std::vector<char> cubin;
  bool operator==(const PackedKernel&) const = default;
};
using Pack = std::map<std::string, PackedKernel>;  // by unit key

// Makes a pack of the units' cubins: reused from `old` where it has them, compiled in parallel otherwise. `on_compiled`
// is called after each compilation, by one thread at a time. Throws Failure, as compile() does.
Pack make_pack(const std::vector<NamedUnit>& units, const Pack& old, int threads,
               const std::function<void(const NamedUnit&, const Compiled&)>& on_compiled);

// The file format: "TESSERA PACK 1\n", the SHA-256 of the rest in 64 digits, then five fields per kernel (key,
// architecture, kernel, variant, cubin), each after its size in 16 hex digits.
std::string write_pack(const Pack& pack);
Pack read_pack(std::string_view bytes);                           // throws Failure if it is not one
Pack read_pack_file(const std::string& path);                     // likewise, naming the file
void write_pack_file(const std::string& path, const Pack& pack);  // atomic; throws Failure

// Looks in the library's embedded pack, then in the file that $TESSERA_PACK names.
std::optional<std::vector<char>> find_in_packs(const std::string& unit_key);

// Human-readable: how many kernels for which architecture and where; and the list of them.
std::string packs_summary();
std::string packs_text();

// The bytes of the pack that is embedded in the library; empty if it was built without one. Defined by
// embedded_pack.cpp or no_pack.cpp.
std::string_view embedded_pack();

}  // namespace tessera::cuda
