// Packs: cubins compiled when the library was built and put into it, so that ordinary use has no cold start and a
// machine without NVRTC still runs them. Keyed by unit_key(): sources, configuration and architecture, not by the
// compiler that made them. Included by src/cuda/jit and `tessera pack`.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::cuda {

using Pack = std::map<std::string, std::vector<char>>;  // unit key -> cubin

// The file format: "TESSERA PACK 1\n", then per entry a 64-digit key, the cubin's size as 16 hex digits, and the cubin.
std::string write_pack(const Pack& pack);
Pack read_pack(std::string_view bytes);  // throws Failure if it is not one

// Looks into the pack that is part of the library.
std::optional<std::vector<char>> find_in_packs(const std::string& unit_key);
std::size_t packed_kernels();

}  // namespace tessera::cuda
