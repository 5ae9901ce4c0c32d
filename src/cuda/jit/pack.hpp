// Packs: cubins compiled ahead of time, so that ordinary use has no cold start and a machine without NVRTC still runs
// them. Keyed by unit_key(): sources, configuration and architecture, not by the compiler that made them. Included by
// src/cuda/jit, src/api and `tessera pack`.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit/compile.hpp"

namespace tessera::cuda {

// A unit with names for people: "vector_forward", "f32 D=64".
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

// The units' cubins: from `old` where it has them, compiled by several threads otherwise. `on_compiled` hears of each
// compilation, one at a time. Throws Failure, as compile() does.
Pack make_pack(const std::vector<NamedUnit>& units, const Pack& old, int threads,
               const std::function<void(const NamedUnit&, const Compiled&)>& on_compiled);

// The file format: "TESSERA PACK 1\n", the SHA-256 of the rest in 64 digits, then five fields per kernel (key,
// architecture, kernel, variant, cubin), each after its size in 16 hex digits.
std::string write_pack(const Pack& pack);
Pack read_pack(std::string_view bytes);                           // throws Failure if it is not one
Pack read_pack_file(const std::string& path);                     // likewise, naming the file
void write_pack_file(const std::string& path, const Pack& pack);  // complete or absent; throws Failure

// What the library holds, and then what the file named by $TESSERA_PACK holds.
std::optional<std::vector<char>> find_in_packs(const std::string& unit_key);

// For people: how many kernels for which architecture and where; and which.
std::string packs_summary();
std::string packs_text();

// From the build: the bytes of the pack that is part of the library, none if it has none. Defined by embedded_pack.cpp
// or no_pack.cpp.
std::string_view embedded_pack();

}  // namespace tessera::cuda
