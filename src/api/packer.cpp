// SPDX-License-Identifier: Apache-2.0
// Build tool, run by cmake/pack.cmake: `tessera_packer FILE ARCHITECTURE...` compiles common kernels ahead of time and
// writes the pack that the library embeds. Incremental: cubins whose key is unchanged are kept from the existing file.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "api/units.hpp"
#include "core/parallel.hpp"
#include "cuda/jit/cache.hpp"
#include "cuda/jit/nvrtc.hpp"

using namespace tessera;

static void pack(const std::string& path, const std::vector<std::string>& architectures) {
  const bool exists = std::filesystem::exists(path);
  const cuda::Pack old = exists ? cuda::read_pack_file(path) : cuda::Pack{};
  std::vector<cuda::NamedUnit> units;
  std::string names;
  for (const std::string& name : architectures) {
    const auto more = api::plain_units(cuda::target_named(name), api::common_types, api::common_dims);
    units.insert(units.end(), more.begin(), more.end());
    names += (names.empty() ? "" : ", ") + name;
  }
  const auto& found = cuda::find_nvrtc();
  if (!found.nvrtc) std::erase_if(units, [&](const auto& u) { return !old.contains(cuda::unit_key(u.unit)); });

  double seconds = 0;
  const auto pack = cuda::make_pack(units, old, resolve_threads(0),
                                    [&](const auto&, const auto& compiled) { seconds += compiled.seconds; });
  if (exists && pack == old) return;
  cuda::write_pack_file(path, pack);
  std::printf("%zu GPU kernels for %s are packed into the library", pack.size(), names.c_str());
  if (found.nvrtc) std::printf("; compiling took %.1f s of processor time.\n", seconds);
  if (!found.nvrtc) std::printf(": %s. Remove %s to try again.\n", found.reason.c_str(), path.c_str());
}

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fputs("usage: tessera_packer FILE ARCHITECTURE...\n", stderr);
    return 2;
  }
  try {
    pack(argv[1], {argv + 2, argv + argc});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera_packer: %s\n", error.what());
    return 1;
  }
}
