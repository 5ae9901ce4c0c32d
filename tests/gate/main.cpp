// SPDX-License-Identifier: Apache-2.0
// `gate quick` and `gate full` (of units whose kernel's name or text holds WORD): the compile gate as a program; see
// gate.hpp.
// `--list` counts without compiling; `--pack FILE` judges nothing and writes what it compiled, for
// tools/compare_kernels.py. Exit status: 0 all pass, 1 faults, 2 wrong usage, 77 skipped for want of NVRTC.
// Run by ctest and by `make gate`.
#include <cstdio>
#include <cstring>
#include <exception>

#include "core/parallel.hpp"
#include "tests/gate/gate.hpp"
#include "tests/support/nvrtc.hpp"

using namespace tessera;

static void write_pack(const std::vector<gate::GateUnit>& units, const char* path) {
  std::vector<cuda::NamedUnit> named;
  for (const gate::GateUnit& u : units) named.push_back(u.named);
  cuda::write_pack_file(path, cuda::make_pack(named, {}, resolve_threads(0), [](const auto&, const auto&) {}));
}

static int run(bool full, const char* word, bool list, const char* pack) {
  gate::UnitSet set = gate::chosen_units(gate::known_units(), full ? gate::Depth::full : gate::Depth::quick);
  const auto holds_word = [&](const gate::GateUnit& u) {
    return (u.named.kernel + "\n" + u.named.unit.text).find(word) != std::string::npos;
  };
  if (word) std::erase_if(set.units, [&](const auto& u) { return !holds_word(u); });
  std::printf(
      "%zu problems need %zu different units. %zu of them are compiled%s%s: of every kernel, %s.\n", set.problems,
      set.known, set.units.size(), word ? ", those that hold " : "", word ? word : "",
      full ? "any two settings that meet in some unit, and any two options with a third setting (decode: any three)"
           : "every setting, and any two options, on or off");
  std::printf("%zu problems are taken by no kernel that they are for%s\n", set.refused.size(),
              set.refused.empty() ? "." : ", such as");
  for (std::size_t i = 0; i < set.refused.size(); i += 1 + set.refused.size() / 5)
    std::printf("  %s\n", set.refused[i].c_str());
  if (list) return 0;
  if (pack) return write_pack(set.units, pack), 0;
  return gate::run_gate(set.units, resolve_threads(0)) == 0 ? 0 : 1;
}

int main(int argc, char** argv) {
  const bool full = argc > 1 && !std::strcmp(argv[1], "full"), quick = argc > 1 && !std::strcmp(argv[1], "quick");
  const bool list = argc > 2 && !std::strcmp(argv[argc - 1], "--list");
  const char* pack = argc > 3 && !std::strcmp(argv[argc - 2], "--pack") ? argv[argc - 1] : nullptr;
  const int words = argc - 2 - list - (pack ? 2 : 0);
  if ((!full && !quick) || words > 1) {
    std::fputs("usage: gate quick|full [WORD] [--list | --pack FILE]\n", stderr);
    return 2;
  }
  if (const std::string reason = test::nvrtc_missing(); !list && !reason.empty()) {
    std::printf("The gate cannot run. %s.\n", reason.c_str());
    return test::nvrtc_required() ? 1 : 77;
  }
  try {
    return run(full, words ? argv[2] : nullptr, list, pack);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gate: %s\n", error.what());
    return 1;
  }
}
