// SPDX-License-Identifier: Apache-2.0
// What the launches of Hopper's own kernels address; see extents.hpp.
#include <bit>
#include <cstring>
#include <set>
#include <tuple>

#include "sm90/one_pass_config.hpp"
#include "tests/fake/extents.hpp"

namespace tessera::test {

void Addressed::hopper_forward(const sm90::ForwardParams& p) {
  forward(p.call);
  map("q", p.q, call.in.q);
  if (!call.paged()) map("k", p.k, call.in.k), map("v", p.v, call.in.v);
  if (p.copies_O) map("o", p.o, call.out.o);
  const std::int64_t heads = std::int64_t{p.call.x.Hq} * (call.packed() ? 1 : p.call.x.B);
  if (p.tiles != heads * p.tiles_per_head || p.section < 1 || heads % p.section != 0)
    fault(text(p.tiles, " tiles for ", heads, " heads of ", p.tiles_per_head, " in sections of ", p.section));
  if (launch->grid[0] > static_cast<unsigned>(p.tiles)) fault(text(launch->grid[0], " blocks for ", p.tiles, " tiles"));
  if (p.taken) part("taken", p.taken, sizeof(UInt32));
}

// Every piece of a tile has its boxes, wherever in a page a tile begins: with left padding, anywhere.
void Addressed::hopper_paged(const sm90::PagedParams& p) {
  hopper_forward(p);
  pages(p.pages, p.call.x, p.most);
  if (p.least_queries < 1) fault("takes sequences without queries");
  const std::int64_t size = p.pages.size, keys = setting("block_keys");
  std::set<int> needed;
  for (std::int64_t tile = 0; tile < 2 * size; ++tile)
    for (std::int64_t begin = tile * (p.pages.leftpad.data ? 1 : keys), at = begin; at < begin + keys;) {
      const std::int64_t rows = std::min(size - at % size, begin + keys - at);
      const int level = static_cast<int>(std::bit_width(static_cast<std::uint64_t>(rows))) - 1;
      needed.insert(level), at += std::int64_t{1} << level;
    }
  for (int n = 0; n < sm90::box_sizes; ++n)
    for (const auto& [name, box, of] :
         {std::tuple{"a box of k", p.k_boxes[n], call.in.k}, {"a box of v", p.v_boxes[n], call.in.v}}) {
      fake::EncodedMap m;
      std::memcpy(&m, &box, sizeof(m));
      if (needed.contains(n) || m.address) map(name, box, of);
      if (m.address && m.box[1] != 1U << n) fault(text(name, " has ", m.box[1], " rows, not ", 1 << n));
    }
}

void Addressed::hopper_backward(const sm90::BackwardParams& p) {
  backward(p.call);
  const bool queries = launch->kernel->unit.find("Side::queries") != std::string::npos;
  const Tensor &q = call.in.q, &k = call.in.k, &v = call.in.v, &d_o = call.saved.d_o;
  map("row_QK", p.row_QK, queries ? q : k), map("row_VO", p.row_VO, queries ? d_o : v);
  map("column_QK", p.column_QK, queries ? k : q), map("column_VO", p.column_VO, queries ? v : d_o);
}

void Addressed::one_pass(const sm90::OnePassMemory& memory, const gpu::BackwardParams& p) {
  backward(p);
  const sm90::OnePassConfig c{.D = setting("D"), .Dv = setting("Dv"), .block_queries = setting("block_queries")};
  const std::int64_t per_head = tiles_of(p.x, c.block_queries);
  if (memory.tiles_per_head != per_head) fault(text(memory.tiles_per_head, " tiles per head; there are ", per_head));
  const std::int64_t tiles = p.x.Hq * per_head;
  part("sums", memory.sums, tiles * sm90::parts_of(c) * sm90::part_bytes);
  part("numbers", memory.numbers, 4 * tiles * sm90::numbers_of(c));
  if (is_set("ordered")) part("counts", memory.counts, 4 * tiles);
  part("taken", memory.taken, sizeof(UInt32));
  part("works", memory.works, std::int64_t{memory.blocks} * sm90::one_pass_work_bytes);
}

}  // namespace tessera::test
