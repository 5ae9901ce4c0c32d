// SPDX-License-Identifier: Apache-2.0
// What launches address; see extents.hpp. Those of Hopper's own kernels: extents_hopper.cpp.
#include "tests/fake/extents.hpp"

#include <algorithm>
#include <cstring>

#include "cases/buffer.hpp"
#include "decode/config.hpp"

namespace tessera::test {
namespace {

template <class Params>
Params params_of(const fake::Launch& launch) {
  Params params;
  std::memcpy(static_cast<void*>(&params), launch.parameters.data(), sizeof(params));
  return params;
}

std::int64_t ceil_div_of(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

std::int64_t width_of(const Tensor& t) { return t ? t.shape[static_cast<std::size_t>(t.ndim - 1)] : 0; }

}  // namespace

Extent extent_of(const void* data, std::int64_t element_bytes, std::initializer_list<Axis> axes) {
  std::int64_t low = 0, high = 1;
  for (const Axis& axis : axes) {
    if (axis.count <= 0) return {};
    const std::int64_t last = (axis.count - 1) * axis.stride;
    (last < 0 ? low : high) += last;
  }
  const auto base = reinterpret_cast<std::uintptr_t>(data);
  return {base + static_cast<std::uintptr_t>(low * element_bytes),
          base + static_cast<std::uintptr_t>(high * element_bytes)};
}

Extent extent_of(const Tensor& t) {
  Axis axes[4]{{1, 0}, {1, 0}, {1, 0}, {1, 0}};
  for (std::size_t d = 0; d < static_cast<std::size_t>(t.ndim); ++d)
    axes[d] = {t.shape[d], t.shape[d] == 1 ? 0 : t.strides[d]};
  return extent_of(t.data, static_cast<std::int64_t>(cases::size_of(t.type)), {axes[0], axes[1], axes[2], axes[3]});
}

void Addressed::fault(const std::string& what) { found.push_back(launch->kernel->function + ": " + what); }

int Addressed::setting(const char* name) const {
  const std::string wanted = text(".", name, " = ");
  const std::size_t at = launch->kernel->unit.find(wanted);
  return at == std::string::npos ? -1 : std::stoi(launch->kernel->unit.substr(at + wanted.size()));
}

bool Addressed::is_set(const char* name) const {
  return launch->kernel->unit.find(text(".", name, " = true")) != std::string::npos;
}

// --- tensors

void Addressed::tensor(const char* name, const void* data, const Extent& addressed, const Tensor& of) {
  if (!of) {
    if (data) fault(text(name, " is not given but has a pointer"));
    return;
  }
  if (addressed.empty()) return;
  if (!data) return fault(text(name, " is given but has no pointer"));
  const Extent whole = extent_of(of);
  if (!whole.holds(addressed))
    fault(text(name, " is addressed from byte ", static_cast<std::int64_t>(addressed.begin - whole.begin), " to ",
               static_cast<std::int64_t>(addressed.end - whole.begin), " of ", whole.end - whole.begin));
  std::uintptr_t begin = 0;
  const fake::Allocation* memory = fake::machine().find(addressed.begin, begin);
  if (!memory || !Extent{begin, begin + memory->bytes}.holds(addressed))
    fault(text(name, " leaves its allocation"));
  else if (memory->device != launch->device)
    fault(text(name, " is on cuda:", memory->device, " but the launch on cuda:", launch->device));
}

void Addressed::tokens(const char* name, const gpu::TokenRef& ref, const Tensor& of, std::int64_t B, std::int64_t N,
                       std::int64_t H) {
  const auto bytes = static_cast<std::int64_t>(cases::size_of(of.type));
  tensor(name, ref.data,
         extent_of(ref.data, bytes,
                   {{call.packed() ? 1 : B, ref.batch}, {N, ref.token}, {H, ref.head}, {width_of(of), 1}}),
         of);
}

void Addressed::rows(const char* name, const gpu::RowRef& ref, const Tensor& of, const gpu::Question& x) {
  tensor(name, ref.data,
         extent_of(ref.data, sizeof(float), {{call.packed() ? 1 : x.B, ref.batch}, {x.Hq, ref.head}, {x.Nq, ref.row}}),
         of);
}

void Addressed::pairs(const char* name, const gpu::PairRef& ref, const Tensor& of, const gpu::Question& x) {
  // Packed: as many rows and keys as the tensor has; no sequence has more.
  const std::int64_t nq = call.packed() ? of.shape[2] : x.Nq, nk = call.packed() ? of.shape[3] : x.Nk;
  tensor(name, ref.data,
         extent_of(ref.data, static_cast<std::int64_t>(cases::size_of(of.type)),
                   {{x.B, ref.batch}, {x.Hq, ref.head}, {nq, ref.row}, {nk, ref.key}}),
         of);
}

void Addressed::lengths(const char* name, const gpu::LengthRef& ref, const Tensor& of, std::int64_t count) {
  tensor(name, ref.data, extent_of(ref.data, sizeof(Int32), {{count, ref.stride}}), of);
}

void Addressed::map(const char* name, const sm90::TensorMap& map, const Tensor& of) {
  fake::EncodedMap m;
  std::memcpy(&m, &map, sizeof(m));
  const auto* data = reinterpret_cast<const void*>(m.address);
  if (!data) return fault(text("the tensor map of ", name, " is empty"));
  const auto axis = [&](int d) {
    return Axis{static_cast<std::int64_t>(m.shape[d]), static_cast<std::int64_t>(m.strides[d - 1]) / 2};
  };
  const auto size = [&](int d) { return static_cast<std::uint64_t>(of.shape[static_cast<std::size_t>(d)]); };
  const int n = of.ndim;
  if (m.shape[0] != size(n - 1) || m.shape[1] != size(n - 3) || m.shape[2] != size(n - 2) ||
      m.shape[3] != (n == 4 ? size(0) : 1))
    fault(text("the tensor map of ", name, " has another shape"));
  // A dimension of size 1 has whichever stride.
  tensor(name, data, extent_of(data, 2, {{static_cast<std::int64_t>(m.shape[0]), 1}, axis(1), axis(2), axis(3)}), of);
}

// --- the workspace

void Addressed::part(const char* name, const void* data, std::int64_t bytes) {
  if (bytes <= 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const Extent extent{begin, begin + static_cast<std::uintptr_t>(bytes)};
  if (!call.workspace().holds(extent))
    return fault(text(name, " takes bytes ", static_cast<std::int64_t>(extent.begin - call.workspace().begin), " to ",
                      static_cast<std::int64_t>(extent.end - call.workspace().begin), " of a workspace of ",
                      call.workspace().end - call.workspace().begin));
  furthest = std::max(furthest, extent.end);
  for (const auto& [other, taken] : parts)
    if (other == name ? taken != extent : taken.meets(extent)) fault(text(name, " is not where it was, or in ", other));
  parts[name] = extent;
}

// --- parameters

void Addressed::question(const gpu::Question& x) {
  tokens("q", x.q, call.in.q, x.B, x.Nq, x.Hq);
  if (!call.paged()) {
    tokens("k", x.k, call.in.k, x.B, x.Nk, x.Hk);
    tokens("v", x.v, call.in.v, x.B, x.Nk, x.Hk);
  }
  lengths("cu_seqlens_q", x.cu_seqlens_q, call.in.cu_seqlens_q, x.B + std::int64_t{1});
  lengths("cu_seqlens_k", x.cu_seqlens_k, call.in.cu_seqlens_k, x.B + std::int64_t{1});
  lengths("seqused_q", x.seqused_q, call.in.seqused_q, x.B);
  lengths("seqused_k", x.seqused_k, call.in.seqused_k, x.B);
  pairs("bias", x.bias, call.in.bias, x);
  pairs("mask", x.mask, call.in.mask, x);
  tensor("slopes", x.slopes, extent_of(x.slopes, sizeof(float), {{x.B, x.slope_batch}, {x.Hq, x.slope_head}}),
         call.in.slopes);
  tensor("sinks", x.sinks, extent_of(x.sinks, sizeof(float), {{x.Hq, x.sink_head}}), call.in.sinks);
  tensor("rng", x.rng, extent_of(x.rng, sizeof(Int64), {{2, x.rng_stride}}), call.in.rng);
}

void Addressed::forward(const gpu::ForwardParams& p) {
  question(p.x);
  tokens("o", p.o, call.out.o, p.x.B, p.x.Nq, p.x.Hq);
  rows("lse", p.lse, call.out.lse, p.x);
}

void Addressed::states(const gpu::States& s, const gpu::Question& x) {
  const auto state = [&](const char* name, const gpu::StateRef& ref, const State& of) {
    tokens(name, ref.o, of.o, x.B, x.Nq, x.Hq);
    rows(name, ref.m, of.m, x);
    tensor(name, ref.l,
           extent_of(ref.l, sizeof(double),
                     {{call.packed() ? 1 : x.B, ref.l_batch}, {x.Hq, ref.l_head}, {x.Nq, ref.l_row}}),
           of.l);
  };
  state("inputs.state", s.in, call.in.state);
  state("outputs.state", s.out, call.out.state);
}

void Addressed::backward(const gpu::BackwardParams& p) {
  const gpu::Question& x = p.x;
  question(x);
  tokens("o", p.o, call.saved.o, x.B, x.Nq, x.Hq);
  tokens("d_o", p.d_o, call.saved.d_o, x.B, x.Nq, x.Hq);
  rows("lse", p.lse, call.saved.lse, x);
  rows("d_lse", p.d_lse, call.saved.d_lse, x);
  tokens("dq", p.dq, call.grads.dq, x.B, x.Nq, x.Hq);
  tokens("dk", p.dk, call.grads.dk, x.B, x.Nk, x.Hk);
  tokens("dv", p.dv, call.grads.dv, x.B, x.Nk, x.Hk);
  const Tensor& dbias = call.grads.dbias;
  tensor("dbias", p.dbias.data,
         extent_of(p.dbias.data, static_cast<std::int64_t>(cases::size_of(dbias.type)),
                   {{p.dbias_batches, p.dbias.batch},
                    {p.dbias_heads, p.dbias.head},
                    {p.dbias_rows, p.dbias.row},
                    {p.dbias_keys, p.dbias.key}}),
         dbias);
  tensor("dsinks", p.dsinks, extent_of(p.dsinks, sizeof(float), {{x.Hq, p.dsink_head}}), call.grads.dsinks);

  const std::int64_t batches = call.packed() ? 1 : x.B;
  const Extent query_rows = extent_of(nullptr, 1, {{x.Hq, p.row_head}, {batches, p.row_batch}, {x.Nq, 1}});
  const Extent key_rows = extent_of(nullptr, 1, {{x.Hk, p.key_head}, {batches, p.key_batch}, {x.Nk, 1}});
  const auto count = [](const Extent& rows) { return static_cast<std::int64_t>(rows.end); };
  part("delta", p.delta, 4 * count(query_rows));
  part("lse2", p.lse2, 4 * count(query_rows));
  const auto sum = [&](const char* name, const gpu::Sum& s, const Extent& rows, const Tensor& gradient) {
    if (!s.data) return;
    part(name, s.data, 4 * s.copy * s.copies);
    if (s.copies > 0 && s.copy < count(rows) * gpu::padded_to_4(static_cast<int>(width_of(gradient))))
      fault(text(name, " has copies of ", s.copy, " numbers for ", count(rows), " rows"));
  };
  sum("dq_sum", p.dq_sum, query_rows, call.grads.dq);
  sum("dk_sum", p.dk_sum, key_rows, call.grads.dk);
  sum("dv_sum", p.dv_sum, key_rows, call.grads.dv);
}

void Addressed::cleared(const void* zero, std::int64_t chunks) {
  const auto begin = reinterpret_cast<std::uintptr_t>(zero);
  zeros = {begin, begin + static_cast<std::uintptr_t>(16 * chunks)};
  if (!call.workspace().holds(zeros) || begin % 16 != 0) fault("sets to 0 what is not the workspace's");
}

void Addressed::begins_at_zero(const char* name) {
  if (const auto at = parts.find(name); at != parts.end() && !zeros.holds(at->second))
    fault(text(name, " does not begin at 0"));
}

template <class Params>
void Addressed::mma_grid(const Params& p, std::int64_t tiles_per_head, std::int64_t heads_of_rows) {
  const std::int64_t heads = heads_of_rows * (call.packed() ? 1 : p.call.x.B);
  if (p.section < 1 || heads % p.section != 0 || launch->grid[0] != heads * tiles_per_head)
    fault(text(launch->grid[0], " blocks for ", heads, " heads of ", tiles_per_head, " tiles in sections of ",
               p.section));
  if (p.D != width_of(call.in.q) || p.Dv != width_of(call.in.v)) fault("has other head dims than the tensors");
  if (p.D > setting("D") || p.Dv > setting("Dv")) fault("has tiles that are narrower than the tensors");
}

void Addressed::mma_forward(const mma::ForwardParams& p) {
  forward(p.call);
  mma_grid(p, p.tiles_per_head, p.call.x.Hq);
}

void Addressed::mma_paged(const mma::PagedParams& p) {
  mma_forward(p);
  pages(p.pages, p.call.x, p.most);
  scale("k_scale", p.k_scale, call.in.k_scale, call.in.k, p.call.x);
  scale("v_scale", p.v_scale, call.in.v_scale, call.in.v, p.call.x);
  if (p.even || p.least_queries < 1) fault("takes all sequences to be of one length, or those without queries");
}

void Addressed::mma_backward(const mma::BackwardParams& p) {
  backward(p.call);
  const bool queries = launch->kernel->unit.find("Side::queries") != std::string::npos;
  mma_grid(p, p.tiles_per_head, queries ? p.call.x.Hq : p.call.x.Hk);
}

void Addressed::mma_sums(const mma::OnePassMemory& memory, const gpu::BackwardParams& p, const mma::QuerySums& sums,
                         bool ordered) {
  backward(p);
  const std::int64_t per_head = tiles_of(p.x, sums.queries);
  if (memory.tiles_per_head != per_head) fault(text(memory.tiles_per_head, " tiles per head; there are ", per_head));
  const std::int64_t tiles = p.x.Hq * per_head;
  part("sums", memory.sums, 4 * tiles * sums.tile_numbers());
  if (ordered) part("counts", memory.counts, 4 * tiles);
  part("taken", memory.taken, sizeof(UInt32));
}

void Addressed::mma_one_pass(const mma::OnePassParams& p) {
  const int warps = setting("warps") * (is_set("paired") ? 2 : 1);
  mma_sums(p.memory, p.call, {.D = setting("D"), .queries = setting("block_queries"), .warps = warps},
           is_set("ordered"));
  mma_grid(p, p.blocks_per_head, p.call.x.Hk);
  for (const char* counted : {"taken", "counts"}) begins_at_zero(counted);
  if (!is_set("ordered")) begins_at_zero("sums");
}

void Addressed::pool(const char* name, const gpu::TokenRef& ref, const gpu::PageTable& table, const Tensor& of,
                     const Tensor& of_table) {
  const std::int64_t size = of.shape[1], heads = of.shape[2], width = of.shape[3];
  tensor(name, ref.data,
         extent_of(ref.data, static_cast<std::int64_t>(cases::size_of(of.type)),
                   {{table.pages, ref.batch}, {size, ref.token}, {heads, ref.head}, {width, 1}}),
         of);
  const bool listed = of_table.ndim == 1;
  tensor("a page table", table.entries,
         extent_of(table.entries, sizeof(Int32),
                   {{listed ? 1 : of_table.shape[0], table.sequence},
                    {of_table.shape[static_cast<std::size_t>(of_table.ndim - 1)], table.entry}}),
         of_table);
}

void Addressed::scale(const char* name, const gpu::ScaleRef& ref, const Tensor& of, const Tensor& keys,
                      const gpu::Question& x, Int64 group) {
  const std::int64_t pages = keys.ndim == 4 ? keys.shape[0] : 1, places = keys.shape[keys.ndim == 4 ? 1 : 0];
  tensor(name, ref.data,
         extent_of(ref.data, sizeof(float),
                   {{x.B, ref.sequence},
                    {pages, ref.page},
                    {places, ref.place},
                    {x.Hk, ref.head},
                    {of.ndim == 4 ? ceil_div(width_of(keys), 128) : 1, group}}),
         of);
}

// Keys in pages, in tables of whichever form.
void Addressed::pages(const gpu::PageTables& p, const gpu::Question& x, const gpu::LengthBounds& most) {
  if (most.queries < 0 || most.queries > x.Nq || most.keys < 0 || most.keys > x.Nk)
    fault(text("takes up to ", most.queries, " queries and ", most.keys, " keys of ", x.Nq, " and ", x.Nk));
  if (!call.paged()) {
    if (p.k.entries || p.v.entries || p.status) fault("has pages that nobody gave");
    return;
  }
  const Tensor& of_k = call.in.page_indices ? call.in.page_indices : call.in.block_table;
  pool("k", x.k, p.k, call.in.k, of_k);
  pool("v", x.v, p.v, call.in.v, call.in.v_block_table ? call.in.v_block_table : of_k);
  lengths("page_indptr", p.indptr, call.in.page_indptr, x.B + std::int64_t{1});
  lengths("leftpad_k", p.leftpad, call.in.leftpad_k, x.B);
  tensor("status", p.status, extent_of(p.status, sizeof(Int32), {{1, 0}}), call.out.status);
  if (p.size != call.in.k.shape[1]) fault("has pages of another size");
}

void Addressed::decode(const decode::Params& p) {
  forward(p.call);
  const gpu::Question& x = p.call.x;
  pages(p.pages, x, p.most);
  tokens("qv", p.qv, call.in.qv, x.B, x.Nq, x.Hq);
  scale("k_scale", p.k_scale, call.in.k_scale, call.in.k, x, p.k_scale_group);
  scale("v_scale", p.v_scale, call.in.v_scale, call.in.v, x, p.v_scale_group);
  const decode::Draft& draft = p.draft;
  const std::int64_t batches = call.packed() ? 1 : x.B;
  tensor("tree_mask", draft.tree,
         extent_of(draft.tree, sizeof(Int32),
                   {{batches, draft.tree_batch}, {x.Nq, draft.tree_row}, {draft.tree_bits / 32, draft.tree_word}}),
         call.in.tree_mask);
  tensor("positions", draft.positions,
         extent_of(draft.positions, sizeof(Int32), {{batches, draft.position_batch}, {x.Nq, draft.position_row}}),
         call.in.positions);
  const decode::Memory& m = p.memory;
  const std::int64_t groups = std::int64_t{x.Hk} * p.groups.count, queries = p.groups.block_queries;
  if (queries > 0 && (!call.packed() || queries * p.group != p.rows * p.groups.block_tiles))
    fault(text("numbers ", p.groups.block_tiles, " tiles for each ", queries, " queries"));
  if (p.groups.count != (queries > 0 ? (x.Nq / queries + x.B) * p.groups.block_tiles : std::int64_t{x.B} * p.tiles))
    fault(text("goes through ", p.groups.count, " groups of rows"));
  if (m.most_items != groups + m.most_slots) fault(text(m.most_items, " items for ", groups, " groups of rows"));
  if (m.queue) {
    part("queue", m.queue, sizeof(decode::Queue));
    part("groups", m.groups, std::int64_t{p.groups.count} * static_cast<std::int64_t>(sizeof(decode::Group)));
    part("items", m.items, std::int64_t{m.most_items} * static_cast<std::int64_t>(sizeof(decode::Item)));
  } else if (m.groups || m.items || queries > 0 || p.groups.count > decode::most_direct_groups) {
    fault("has no queue where it needs one, or half of one");
  }
  part("counts", m.counts, 4 * std::int64_t{m.climbs} * m.most_slots);
  if (p.D != width_of(call.in.q) || p.Dv != width_of(call.in.v)) fault("has other head dims than the tensors");
  if (p.group * x.Hk != x.Hq) fault("has other groups of heads than the tensors");
  if (launch->kernel->function != "attend") return;
  if (p.D > setting("D") || p.Dv > setting("Dv")) fault("has tiles that are narrower than the tensors");
  if ((m.queue == nullptr) != is_set("direct")) fault("has a queue that nobody reads, or reads none");
  if (p.rows != setting("rows")) fault("has tiles of other rows than the schedule");
  const std::int64_t state = std::int64_t{4} * decode::state_floats(p.rows, setting("Dv"));
  part("stacks", m.stacks, launch->grid[0] * m.stack_levels * state);
  part("states", m.states, m.most_slots * state);
}

std::int64_t Addressed::tiles_of(const gpu::Question& x, std::int64_t queries) const {
  return call.packed() ? x.Nq / queries + x.B : x.B * ceil_div_of(x.Nq, queries);
}

void Addressed::check(const fake::Launch& given) {
  launch = &given;
  const std::string& type = given.kernel->parameter_type;
  if (type == "tessera::gpu::ForwardParams") return forward(params_of<gpu::ForwardParams>(given));
  if (type == "tessera::gpu::BackwardParams") return backward(params_of<gpu::BackwardParams>(given));
  if (type == "tessera::mma::ForwardParams") return mma_forward(params_of<mma::ForwardParams>(given));
  if (type == "tessera::mma::PagedParams") return mma_paged(params_of<mma::PagedParams>(given));
  if (type == "tessera::mma::BackwardParams") return mma_backward(params_of<mma::BackwardParams>(given));
  if (type == "tessera::mma::PrepareParams") {
    const auto p = params_of<mma::PrepareParams>(given);
    backward(p.call);
    return cleared(p.zero, p.zeros);
  }
  if (type == "tessera::mma::OnePassParams") return mma_one_pass(params_of<mma::OnePassParams>(given));
  if (type == "tessera::mma::FinishParams") {
    const auto p = params_of<mma::FinishParams>(given);
    return mma_sums(p.memory, p.call, {setting("D"), setting("queries"), setting("warps")}, is_set("ordered"));
  }
  if (type == "tessera::decode::Params") return decode(params_of<decode::Params>(given));
  if (type == "tessera::sm90::ForwardParams") return hopper_forward(params_of<sm90::ForwardParams>(given));
  if (type == "tessera::sm90::CarriedParams") {
    const auto p = params_of<sm90::CarriedParams>(given);
    hopper_forward(p);
    return states(p.states, p.call.x);
  }
  if (type == "tessera::gpu::StateParams") {
    const auto p = params_of<gpu::StateParams>(given);
    forward(p);
    return states(p.states, p.x);
  }
  if (type == "tessera::sm90::PagedParams") return hopper_paged(params_of<sm90::PagedParams>(given));
  if (type == "tessera::sm90::BackwardParams") return hopper_backward(params_of<sm90::BackwardParams>(given));
  if (type == "tessera::sm90::RestartParams")
    return part("taken", params_of<sm90::RestartParams>(given).taken, sizeof(UInt32));
  if (type == "tessera::sm90::FinishParams") {
    const auto p = params_of<sm90::FinishParams>(given);
    return one_pass(p.memory, p.call);
  }
  if (type == "tessera::sm90::PrepareParams") {
    const auto p = params_of<sm90::PrepareParams>(given);
    one_pass(p.memory, p.call);
    cleared(p.zero, p.zeros);
    for (const char* counted : {"taken", "counts"}) begins_at_zero(counted);
    return;
  }
  if (type == "tessera::sm90::OnePassParams") {
    const auto p = params_of<sm90::OnePassParams>(given);
    one_pass(p.memory, p.call);
    map("q", p.q, call.in.q), map("k", p.k, call.in.k), map("v", p.v, call.in.v), map("d_o", p.d_o, call.saved.d_o);
    return;
  }
  fault(text("has parameters of a type that this test does not know: ", type));
}

}  // namespace tessera::test
