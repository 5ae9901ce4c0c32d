// SPDX-License-Identifier: Apache-2.0
// Embeds the pack that cmake/pack.cmake makes during the build, with the assembler's .incbin; see pack.hpp.
// TESSERA_PACK_FILE is its path, in quotes.
#include "cuda/jit/pack.hpp"

extern "C" const char tessera_pack_begin[], tessera_pack_end[];

asm(".pushsection .rodata\n"
    ".global tessera_pack_begin, tessera_pack_end\n"
    ".hidden tessera_pack_begin, tessera_pack_end\n"
    "tessera_pack_begin:\n"
    ".incbin \"" TESSERA_PACK_FILE
    "\"\n"
    "tessera_pack_end:\n"
    ".popsection\n");

namespace tessera::cuda {

std::string_view embedded_pack() {
  return {tessera_pack_begin, static_cast<std::size_t>(tessera_pack_end - tessera_pack_begin)};
}

}  // namespace tessera::cuda
