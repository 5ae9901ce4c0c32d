// SPDX-License-Identifier: Apache-2.0
// Valid questions from bytes; see questions.hpp. Everything that the case tables can say can be said here, at small
// sizes.
#include "fuzz/questions.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cases/generator.hpp"
#include "tessera/tessera.hpp"

namespace tessera::fuzz {
namespace {

using cases::Case;

constexpr double usual_cost = 1e5, rare_cost = 2e6;
constexpr double most_elements = 1 << 15;  // with gaps, steps and 8 bytes each they are below call.cpp's most_bytes

std::int64_t length(Bytes& in) {
  const std::uint8_t n = in.byte();
  if (n >= 250) return 41 + in.below(300);
  return n >= 240 ? 0 : 1 + (n + 3) % 40;
}

std::vector<std::int32_t> lengths(Bytes& in, std::int64_t count) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(count));
  for (auto& n : all) n = static_cast<std::int32_t>(length(in));
  return all;
}

std::vector<std::int32_t> used(Bytes& in, const Case& c, const std::vector<std::int32_t>& packed, std::int64_t N) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(c.batches()));
  for (std::size_t b = 0; b < all.size(); ++b)
    all[b] = static_cast<std::int32_t>(in.below((c.packed() ? packed[b] : N) + 1));
  return all;
}

double cost(const Case& c) {
  double pairs = c.packed() ? 0 : static_cast<double>(c.B * c.Nq * c.Nk);
  for (std::size_t b = 0; b < c.packed_q.size(); ++b) pairs += 1.0 * c.packed_q[b] * c.packed_k[b];
  return pairs * static_cast<double>(c.Hq) * static_cast<double>(c.D + c.dim_v());
}

// Elements of the largest tensor: rows of queries or keys, or a bias. That of no sequences or heads may have one of
// each.
double elements(const Case& c) {
  double Nq = static_cast<double>(c.Nq), Nk = static_cast<double>(c.Nk), tokens = static_cast<double>(c.B) * (Nq + Nk);
  if (c.packed()) {
    Nq = *std::max_element(c.packed_q.begin(), c.packed_q.end());
    Nk = *std::max_element(c.packed_k.begin(), c.packed_k.end());
    const auto sum = [](const auto& n) { return std::accumulate(n.begin(), n.end(), std::int64_t{0}); };
    tokens = static_cast<double>(sum(c.packed_q) + sum(c.packed_k) + c.front_q + c.front_k + c.tail_q + c.tail_k);
  }
  const double sequences = static_cast<double>(std::max<std::int64_t>(1, c.B)), pairs = sequences * Nq * Nk;
  const double heads = static_cast<double>(std::max<std::int64_t>(1, c.Hq));
  return heads * std::max(tokens * static_cast<double>(std::max(c.D, c.dim_v())), pairs);
}

void shapes(Bytes& in, Case& c) {
  constexpr std::int64_t dims[] = {64, 80, 96, 111, 128, 192, 256, 512, 576};
  constexpr std::int64_t ratios[] = {1, 2, 3, 1, 4, 5, 7, 8};
  const auto dim = [&](std::int64_t most) {
    return in.rarely() ? std::min(in.pick(dims), most) : 1 + (in.byte() + 7) % 40;
  };
  c.B = 1 + in.below(3), c.Hk = 1 + in.below(2), c.Hq = c.Hk * in.pick(ratios);
  if (in.rarely()) c.Hq = c.Hk = 0;
  c.D = dim(576), c.Dv = in.flag() ? dim(512) : c.D;
  if (c.Dv > 512) c.Dv = 512;
  c.Nq = length(in), c.Nk = length(in);
  if (in.rarely()) c.B = 0;
  if (c.B > 0 && in.flag()) {
    c.packed_q = lengths(in, c.B), c.packed_k = lengths(in, c.B);
    const std::uint8_t around_q = in.byte(), around_k = in.byte();
    c.front_q = around_q / 20, c.tail_q = around_q % 20;
    c.front_k = around_k / 20, c.tail_k = around_k % 20;
  }
  const double limit = in.rarely() ? rare_cost : usual_cost;
  while (cost(c) > limit || elements(c) > most_elements) {
    c.Nq = (c.Nq + 1) / 2, c.Nk = (c.Nk + 1) / 2;
    for (auto& n : c.packed_q) n /= 2;
    for (auto& n : c.packed_k) n /= 2;
    for (auto* n : {&c.front_q, &c.front_k, &c.tail_q, &c.tail_k}) *n /= 2;
    if (c.Hq > c.Hk) c.Hq -= c.Hk;
  }
  if (in.flag()) c.used_q = used(in, c, c.packed_q, c.Nq);
  if (in.flag()) c.used_k = used(in, c, c.packed_k, c.Nk);
}

cases::Dims broadcast(Bytes& in) {
  const std::uint8_t which = in.byte();
  return {.b = (which & 1) == 0, .h = (which & 2) == 0, .i = (which & 4) == 0, .j = (which & 8) == 0};
}

void visibility(Bytes& in, Case& c) {
  Options& o = c.options;
  o.causal = in.flag();
  if (in.flag()) o.window_left = in.rarely() ? std::max<std::int64_t>(in.integer(), -1) : in.below(45) - 1;
  if (in.flag()) o.window_right = in.rarely() ? std::max<std::int64_t>(in.integer(), -1) : in.below(45) - 1;
  o.alignment = static_cast<Alignment>(in.below(3));
  if (o.alignment == Alignment::offset) o.diagonal_offset = in.below(80) - 40;
  if (in.flag()) {
    // Far from zero, near each other.
    const std::int64_t far = in.rarely() ? in.integer() / (1 << 17) : 0;
    o.row0 = far + in.below(200), o.col0 = far + in.below(200);
    o.head0 = in.below(9), o.batch0 = in.below(9);
  }
  c.mask = in.flag();
  if (c.mask) c.mask_dims = broadcast(in), c.mask_density = static_cast<double>(in.below(9)) / 8;
}

void scores(Bytes& in, Case& c) {
  constexpr double scales[] = {0, -0.15, 0.03, 0.5, 1}, softcaps[] = {0.7, 2, 5, 30}, rates[] = {0.1, 0.25, 0.5, 0.9};
  if (in.flag()) c.options.scale = in.pick(scales);
  if (in.flag()) c.options.softcap = in.pick(softcaps);
  c.slopes = static_cast<cases::Slopes>(in.below(3));
  c.bias = in.flag();
  if (c.bias) c.bias_dims = broadcast(in), c.bias_f32 = in.flag(), c.masked_bias = in.flag() ? 0.3 : 0;
  if (in.flag()) {
    c.options.dropout = in.pick(rates);
    c.options.seed = in.raw<std::uint32_t>(), c.options.seed_offset = in.raw<std::uint32_t>();
    c.rng = in.flag();
  }
  c.sinks = static_cast<cases::Sinks>(in.below(3));
}

void outputs(Bytes& in, Case& c) {
  c.dlse = in.flag(), c.no_lse = in.flag(), c.options.accumulate = in.flag();
  c.options.deterministic = !in.flag();
  c.f32_o = in.flag(), c.f32_do = in.flag(), c.f32_grads = in.flag() || c.options.accumulate;
  const std::uint8_t without = in.byte();
  c.grads = {.dq = (without & 1) == 0,
             .dk = (without & 2) == 0,
             .dv = (without & 4) == 0,
             .dbias = (without & 8) == 0,
             .dsinks = (without & 16) == 0};
  if (c.packed() && in.flag()) {
    c.options.max_seqlen_q = *std::max_element(c.packed_q.begin(), c.packed_q.end()) + in.below(9);
    c.options.max_seqlen_k = *std::max_element(c.packed_k.begin(), c.packed_k.end()) + in.below(9);
  }
}

// Dimensions in any order, gaps, steps. Dimensions from `fixed` on keep their places: rows have stride 1.
cases::Layout layout(Bytes& in, std::size_t rank, std::size_t fixed) {
  cases::Layout out;
  for (std::size_t d = 0; d + 1 < std::min(rank, fixed); ++d)
    std::swap(out.order[d], out.order[d + static_cast<std::size_t>(in.below(static_cast<std::int64_t>(fixed - d)))]);
  out.gap = in.below(5), out.shift = in.below(4), out.nonsense = in.flag();
  if (fixed == rank) out.step = 1 + in.below(3);
  return out;
}

void fill_normal(cases::Buffer& buffer, std::uint64_t seed, double spread) {
  cases::Generator random(seed);
  for (std::int64_t e = 0; e < buffer.elements(); ++e) buffer.set(e, spread * random.normal());
}

}  // namespace

static cases::Cached cached(Bytes& in) {
  constexpr Type types[] = {Type::e4m3, Type::i8, Type::bf16, Type::f32, Type::f16};
  constexpr double sizes[] = {1, 1, 1, 0, 0x1p-140, 0x1p-60, 0x1p60};
  cases::Cached out;
  if (!in.rarely()) out.type = in.pick(types);
  out.scales = static_cast<cases::Scales>(in.below(6)), out.size = in.pick(sizes);
  return out;
}

void use_caches(Bytes& in, Case& c) {
  c.cached_k = cached(in), c.cached_v = cached(in), c.backward = false, c.options.accumulate = false;
  c.qv = in.flag();
  c.tree = static_cast<cases::Tree>(in.below(5)), c.positions = in.flag();
}

Case case_from(Bytes& in) {
  constexpr Type types[] = {Type::f32, Type::f16, Type::bf16, Type::f32, Type::f16, Type::bf16, Type::f64};
  Case c;
  c.name = "fuzzed";
  c.type = in.pick(types);
  c.style = static_cast<cases::Style>(in.below(6));
  c.distribution = static_cast<cases::Distribution>(in.below(7));
  c.seed = in.raw<std::uint16_t>();
  shapes(in, c);
  visibility(in, c);
  scores(in, c);
  outputs(in, c);
  return c;
}

// A contiguous view of this shape.
static void shape_view(tessera_tensor& view, const std::vector<std::int64_t>& shape) {
  view.ndim = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), view.shape);
  view.strides[view.ndim - 1] = 1;
  for (int d = view.ndim - 1; d > 0; --d)
    view.strides[d - 1] = view.strides[d] * std::max<std::int64_t>(view.shape[d], 1);
}

void use_pages(Bytes& in, Call& call) {
  auto& all = call.arguments;
  const int heads = all[slot_q].view.ndim - 2;
  const std::int64_t B = all[slot_cu_q].given ? all[slot_cu_q].view.shape[0] - 1 : all[slot_q].view.shape[0];
  const std::int64_t size = 1 + in.below(20), pages = in.below(12), entries = in.below(6);
  for (const Slot slot : {slot_k, slot_v}) {
    tessera_tensor& view = all[slot].view;
    shape_view(view, {pages, size, view.shape[heads], view.shape[heads + 1]});
  }
  for (const Slot slot : {slot_k_scale, slot_v_scale})
    if (tessera_tensor& view = all[slot].view; view.ndim >= 3) {
      std::vector<std::int64_t> shape{pages, size, view.shape[2]};
      if (view.ndim == 4) shape.push_back(view.shape[3]);
      shape_view(view, shape);
    }
  const auto words = [&](Slot slot, std::initializer_list<std::int64_t> shape,
                         const std::vector<std::int32_t>& values) {
    Argument& a = all[slot];
    a.given = true, a.view.type = TESSERA_I32;
    shape_view(a.view, shape);
    a.content.resize(values.size() * 4);
    if (!values.empty()) std::memcpy(a.content.data(), values.data(), a.content.size());
  };
  const auto page_list = [&] {
    std::vector<std::int32_t> list(static_cast<std::size_t>(B * entries));
    for (auto& page : list) page = static_cast<std::int32_t>(in.rarely() ? in.integer() : in.below(pages + 1));
    return list;
  };
  std::vector<std::int32_t> lengths, leftpad, indptr{0}, status{0};
  for (std::int64_t b = 0; b < B; ++b) {
    lengths.push_back(static_cast<std::int32_t>(in.below(entries * size + 1)));
    leftpad.push_back(static_cast<std::int32_t>(in.below(lengths.back() + 1)));
    indptr.push_back(indptr.back() + static_cast<std::int32_t>(entries));
  }
  all[slot_cu_k].given = false, call.options.max_seqlen_k = -1;
  words(slot_used_k, {B}, lengths);
  if (in.flag()) {
    words(slot_page_indptr, {B + 1}, indptr), words(slot_page_indices, {B * entries}, page_list());
  } else {
    words(slot_block_table, {B, entries}, page_list());
    if (in.flag()) words(slot_v_block_table, {B, entries}, page_list());
  }
  if (in.flag()) words(slot_leftpad, {B}, leftpad);
  if (in.flag()) words(slot_status, {1}, status);
  // Those of the case are as wide as its own keys.
  for (const Slot slot : {slot_bias, slot_mask})
    if (all[slot].view.shape[3] < entries * size) all[slot].given = false;
}

void use_parts(Bytes& in, Call& call) {
  auto& all = call.arguments;
  const tessera_tensor q = all[slot_q].view, v = all[slot_v].view;
  const bool packed = q.ndim == 3;
  const std::int64_t B = packed ? all[slot_cu_q].view.shape[0] - 1 : q.shape[0];
  const std::int64_t N = q.shape[q.ndim - 3], H = q.shape[q.ndim - 2], Dv = v.shape[v.ndim - 1];
  const auto give = [&](Slot slot, std::int32_t type, const std::vector<std::int64_t>& shape, std::size_t bytes) {
    Argument& a = all[slot];
    a.given = true, a.view.type = type;
    shape_view(a.view, shape);
    std::size_t count = 1;
    for (const std::int64_t n : shape) count *= static_cast<std::size_t>(n);
    a.content.assign(count * bytes, std::byte{0});
    return count;
  };
  const std::vector<std::int64_t> rows = packed ? std::vector{N, H, Dv} : std::vector{B, N, H, Dv};
  const std::vector<std::int64_t> numbers = packed ? std::vector{H, N} : std::vector{B, H, N};
  const auto give_state = [&](Slot first) {
    const std::size_t floats = give(first, TESSERA_F32, rows, 4);
    give(static_cast<Slot>(first + 1), TESSERA_F32, numbers, 4);
    const std::size_t sums = give(static_cast<Slot>(first + 2), TESSERA_F64, numbers, 8);
    for (std::size_t n = 0; n < floats; ++n) {
      const auto x = static_cast<float>(n % 7) - 3;
      std::memcpy(&all[first].content[4 * n], &x, 4);
    }
    for (std::size_t n = 0; n < sums; ++n) {  // every third row has seen nothing
      const float m = n % 3 == 0 ? -HUGE_VALF : static_cast<float>(n % 5);
      const double l = n % 3 == 0 ? 0 : 1.5;
      std::memcpy(&all[first + 1].content[4 * n], &m, 4);
      std::memcpy(&all[first + 2].content[8 * n], &l, 8);
    }
  };
  const bool forward = call.function == Function::forward, invariant = in.flag();
  const std::int64_t row_tile = invariant ? 64 : 1, key_tile = invariant ? 192 : 1;
  call.options.part_invariant = invariant;
  call.options.row0 = in.below(9) * row_tile, call.options.col0 = in.below(9) * key_tile;
  if (invariant && in.flag()) call.options.segment_rows = 64 * (1 + in.below(3));
  if (forward && in.flag()) give_state(slot_from_o), all[slot_sinks].given = false;
  if (forward && in.flag()) give_state(slot_to_o), all[slot_o].given = all[slot_lse].given = false;
  for (const auto& [slot, tile] :
       {std::pair{slot_seq_row0, row_tile}, {slot_seq_col0, key_tile}, {slot_seq_batch0, std::int64_t{1}}}) {
    if (!in.flag()) continue;
    give(slot, TESSERA_I64, {B}, 8);
    for (std::int64_t b = 0; b < B; ++b) {
      const std::int64_t x = in.below(5) * tile;
      std::memcpy(&all[slot].content[static_cast<std::size_t>(8 * b)], &x, 8);
    }
  }
}

Merge merge_from(Bytes& in) {
  constexpr Type types[] = {Type::f32, Type::f16, Type::bf16, Type::f64};
  cases::Shape shape{1 + in.below(2), length(in), 1 + in.below(3), 1 + in.below(40)};
  while (shape[0] * shape[1] * shape[2] * shape[3] > 4000) shape[1] /= 2;
  const bool packed = in.flag();
  if (packed) shape.erase(shape.begin());
  const cases::Shape rows = packed ? cases::Shape{shape[1], shape[0]} : cases::Shape{shape[0], shape[2], shape[1]};
  const auto make = [&](cases::Buffer& o, cases::Buffer& lse, bool with_lse) {
    const Type type = in.pick(types);
    o = cases::Buffer(type, shape, layout(in, shape.size(), shape.size() - 1));
    const Type single = type == Type::f64 && in.flag() ? Type::f64 : Type::f32;
    if (with_lse) lse = cases::Buffer(single, rows, layout(in, rows.size(), rows.size()));
  };
  Merge merge;
  make(merge.o, merge.lse, !in.flag());
  const std::int64_t parts = 1 + in.below(5);
  for (std::int64_t n = 0; n < parts; ++n) {
    make(merge.part_o.emplace_back(), merge.part_lse.emplace_back(), true);
    const std::uint8_t seed = in.byte();
    fill_normal(merge.part_o.back(), seed, 1);
    fill_normal(merge.part_lse.back(), seed + 1000U, 3);
    if (!in.flag()) continue;
    for (std::int64_t e = 0; e < merge.part_lse.back().elements(); e += 1 + seed % 3)
      merge.part_lse.back().set(e, -HUGE_VAL);
  }
  return merge;
}

Call merge_call(const Merge& merge) {
  Call call;
  call.function = Function::merge;
  call.partials = static_cast<std::int64_t>(merge.part_o.size());
  call.sizes[0] = sizeof(tessera_outputs);
  call.arguments.push_back(argument_of("merged.o", merge.o));
  call.arguments.push_back(argument_of("merged.lse", merge.lse));
  for (std::size_t n = 0; n < merge.part_o.size(); ++n) {
    call.arguments.push_back(argument_of("partials[].o", merge.part_o[n]));
    call.arguments.push_back(argument_of("partials[].lse", merge.part_lse[n]));
  }
  return call;
}

DropoutMask mask_from(Bytes& in) {
  DropoutMask out;
  cases::Shape shape{1 + in.below(2), 1 + in.below(3), length(in), length(in)};
  while (shape[2] * shape[3] > 2000) shape[2] /= 2, shape[3] /= 2;
  out.mask = cases::Buffer(Type::u8, shape, layout(in, 4, 4));
  Options& o = out.options;
  o.dropout = static_cast<double>(in.below(65536)) / 65536;
  o.seed = in.raw<std::uint32_t>(), o.seed_offset = in.raw<std::uint32_t>();
  const std::int64_t far = in.flag() ? in.integer() / (1 << 17) : 0;
  o.row0 = far + in.below(200), o.col0 = far + in.below(200), o.head0 = in.below(9), o.batch0 = in.below(9);
  if (in.flag()) {
    out.rng = cases::Buffer(Type::i64, {2}, layout(in, 1, 1));
    out.rng.fill({static_cast<double>(o.seed), static_cast<double>(o.seed_offset)});
  }
  return out;
}

Call mask_call(const DropoutMask& mask) {
  Call call;
  call.function = Function::dropout_mask;
  call.options = detail::to_c(mask.options);
  if (mask.rng) call.options.seed = call.options.seed_offset = 0;
  call.arguments.push_back(argument_of("mask", mask.mask));
  call.arguments.push_back(argument_of("rng", mask.rng));
  return call;
}

void execution_from(Bytes& in, Call& call) {
  constexpr const char* kernels[] = {"", "reference", "sse4", "avx2", "avx512", "avx512bf16", "amx"};
  constexpr std::int32_t threads[] = {1, 3, 2, 0};
  call.kernel = in.pick(kernels);
  call.execution.threads = in.pick(threads);
  call.workspace = in.flag() ? Workspace::caller : Workspace::library;
}

}  // namespace tessera::fuzz
