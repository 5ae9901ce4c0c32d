// SPDX-License-Identifier: Apache-2.0
// See cpu/key_panels.hpp.
#include "cpu/key_panels.hpp"

#include <utility>

#include "core/limits.hpp"
#include "cpu/head_job.hpp"

namespace tessera::cpu {
namespace {

// Blocks of keys that some query of the sequence sees.
Range seen_blocks(const Sequence& s) {
  const Range seen = visible_keys(s.mask, {0, s.nq});
  return seen.empty() ? Range{} : Range{seen.begin / block_k, ceil_div(seen.end, block_k)};
}

}  // namespace

Int64 panel_room(const Problem& p, const Isa& isa) {
  const Int64 blocks =
      p.packed && !p.pages ? lesser(p.Nk, p.Nk / block_k + p.B) : product({p.B, key_blocks(p.longest_k())});
  return lesser(product({p.Hk, blocks, isa.panel_bytes(p)}), most_panel_bytes);
}

std::vector<std::vector<SharedKeys>> rounds_of(const Problem& p, const Isa& isa, const WorkspaceLayout& layout,
                                               const Call& call, const std::vector<Sequence>& sequences) {
  char* begin = static_cast<char*>(call.execution.workspace) + layout.panels;
  const Int64 room = panel_room(p, isa);
  std::vector<std::vector<SharedKeys>> rounds(1);
  Int64 used = 0;
  for (const Sequence& s : sequences)
    for (Int64 kv = 0; kv < p.Hk; ++kv) {
      const Int64 wanted = seen_blocks(s).end * isa.panel_bytes(p);
      const bool packed = wanted > 0 && wanted <= room;
      const Int64 bytes = packed ? wanted : 0;
      if (used + bytes > room) rounds.emplace_back(), used = 0;
      rounds.back().push_back({&s, kv, packed ? reinterpret_cast<float*>(begin + used) : nullptr});
      used += bytes;
    }
  return rounds;
}

Step pack_round(const Problem& p, const Isa& isa, const WorkspaceLayout& layout, const Call& call,
                const std::vector<SharedKeys>& round) {
  struct Block {
    const SharedKeys* keys;
    Int64 number;
  };
  std::vector<Block> blocks;
  for (const SharedKeys& keys : round) {
    const Range seen = keys.panels ? seen_blocks(*keys.sequence) : Range{};
    for (Int64 n = seen.begin; n < seen.end; ++n) blocks.push_back({&keys, n});
  }
  const auto count = Int64(blocks.size());
  return {count, [&, blocks = std::move(blocks)](Int64 index, int worker) {
            const Block& block = blocks[static_cast<std::size_t>(index)];
            const HeadJob head = head_job(p, call, *block.keys->sequence, block.keys->kv * p.heads_per_kv());
            float* out = block.keys->panels + block.number * isa.panel_bytes(p) / Int64(sizeof(float));
            isa.pack_panel(head, {block.number * block_k, lesser((block.number + 1) * block_k, head.nk)}, out,
                           scratch_of(call, layout, worker));
          }};
}

}  // namespace tessera::cpu
