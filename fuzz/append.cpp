// SPDX-License-Identifier: Apache-2.0
// Fuzz target of append: valid calls in every form, and damaged ones. Tensors lie in memory of exactly the size that
// their views address, so that AddressSanitizer sees every step beyond it. A valid call is accepted; a refused one has
// a sentence and has written nothing; no call writes to what it reads, and other threads change no bit. See
// docs/testing.md, "Fuzzing".
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <vector>

#include "fuzz/bytes.hpp"
#include "tessera/tessera.hpp"

namespace tessera::fuzz {
namespace {

enum Slot {
  k_new,
  v_new,
  k,
  v,
  offsets,
  used,
  table,
  v_table,
  indptr,
  indices,
  slots,
  cos,
  sin,
  positions,
  q,
  q_out,
  q_positions,
  status,
  k_scale,
  v_scale,
  count
};

// A view, and the bytes that it addresses, from its lowest element on.
struct Argument {
  Tensor view;
  std::vector<std::byte> content;
};

std::size_t bytes_of(Type type) {
  constexpr std::size_t sizes[] = {8, 4, 2, 2, 1, 1, 4, 8, 1, 1};
  const auto code = static_cast<std::size_t>(type);
  return code < std::size(sizes) ? sizes[code] : 1;
}

// The first and the last byte that a view addresses, relative to its data; false: more than a fuzzer gives.
bool reach(const Tensor& t, std::int64_t& low, std::int64_t& high) {
  low = 0, high = static_cast<std::int64_t>(bytes_of(t.type));
  double elements = 1;
  for (std::size_t d = 0; d < 4 && d < static_cast<std::size_t>(std::max(t.ndim, 0)); ++d) {
    if (t.shape[d] <= 0) return high = 0, true;
    elements *= static_cast<double>(t.shape[d]);
    if (t.shape[d] == 1) continue;
    const double step = static_cast<double>(t.shape[d] - 1) * static_cast<double>(t.strides[d]);
    if (std::abs(step) > 1e5) return false;
    (step < 0 ? low : high) += (t.shape[d] - 1) * t.strides[d] * static_cast<std::int64_t>(bytes_of(t.type));
  }
  return elements < 1e5;
}

struct Call {
  std::array<Argument, count> all;
  bool interleaved = false;
  int threads = 1;

  void words(Slot slot, std::initializer_list<std::int64_t> shape, const std::vector<std::int32_t>& values) {
    all[slot].view = Tensor(nullptr, Type::i32, shape);
    all[slot].content.resize(values.size() * 4);
    if (!values.empty()) std::memcpy(all[slot].content.data(), values.data(), values.size() * 4);
  }
};

Call valid(Bytes& in) {
  constexpr Type types[] = {Type::f32, Type::f16, Type::bf16, Type::f64},
                 caches[] = {Type::f32, Type::f16, Type::bf16, Type::e4m3, Type::i8, Type::f64};
  Call call;
  const std::int64_t B = 1 + in.below(3), n = in.below(4), H = 1 + in.below(3), D = 1 + in.below(20),
                     Dv = 1 + in.below(20);
  const std::int64_t P = 1 + in.below(5), entries = 4, pages = B * entries, form = in.below(4);
  const bool packed = in.flag(), by_slots = form == 3, piece = form == 2;
  const std::int64_t T = B * n;
  const Type from = in.pick(types);
  const auto tokens = [&](Slot slot, std::int64_t heads, std::int64_t width) {
    call.all[slot].view =
        packed ? Tensor(nullptr, from, {T, heads, width}) : Tensor(nullptr, from, {B, n, heads, width});
    for (std::int64_t e = 0; e < 64; ++e) call.all[slot].content.push_back(static_cast<std::byte>(in.byte()));
  };
  tokens(k_new, H, D), tokens(v_new, H, Dv);
  const std::int64_t rows = piece ? entries * P : P, pools = piece ? B : pages;
  call.all[k].view = Tensor(nullptr, in.pick(caches), {pools, rows, H, D});
  call.all[v].view = Tensor(nullptr, in.pick(caches), {pools, rows, H, Dv});
  std::vector<std::int32_t> list, ends, lengths, places;
  for (std::int64_t b = 0; b <= B; ++b) ends.push_back(static_cast<std::int32_t>(b * n));
  for (std::int64_t b = 0; b < B; ++b)
    lengths.push_back(static_cast<std::int32_t>(n + in.below(std::max<std::int64_t>(entries * P - n, 0) + 1)));
  if (entries * P < n) lengths.assign(lengths.size(), static_cast<std::int32_t>(n));  // P 1 and n 4: they just fit
  for (std::int64_t e = 0; e < pages; ++e)
    list.push_back(static_cast<std::int32_t>(in.rarely() ? in.integer() % (1 << 30) : (e * 7 + 3) % pages));
  // Pages that occur twice would be refused: all are different but for those that are none.
  for (std::size_t e = 0; e < list.size(); ++e)
    if (std::count(list.begin(), list.end(), list[e]) > 1) list[e] = -1 - static_cast<std::int32_t>(e);
  if (by_slots) {
    for (std::int64_t t = 0; t < T; ++t)
      places.push_back(static_cast<std::int32_t>(in.rarely() ? -1 - in.below(9) : (t * 5 + 1) % (pages * P)));
    for (std::size_t t = 0; t < places.size(); ++t)
      if (std::count(places.begin(), places.end(), places[t]) > 1) places[t] = -1;
    if (packed) call.words(slots, {T}, places);
    if (!packed) call.words(slots, {B, n}, places);
  } else {
    call.words(used, {B}, lengths);
    if (packed) call.words(offsets, {B + 1}, ends);
  }
  if (form == 0) call.words(table, {B, entries}, list);
  if (form == 1) {
    std::vector<std::int32_t> starts;
    for (std::int64_t b = 0; b <= B; ++b) starts.push_back(static_cast<std::int32_t>(b * entries));
    call.words(indptr, {B + 1}, starts), call.words(indices, {pages}, list);
  }
  if (!piece && in.flag()) call.words(status, {1}, {0});
  if (D >= 2 && in.flag()) {
    const Type type = in.flag() ? from : Type::f32;
    const std::int64_t half = 1 + in.below(D / 2), most = entries * P + 8;
    for (const Slot slot : {cos, sin}) {
      call.all[slot].view = Tensor(nullptr, type, {most, half});
      for (int e = 0; e < 32; ++e) call.all[slot].content.push_back(static_cast<std::byte>(in.byte()));
    }
    if (by_slots || in.flag()) {
      std::vector<std::int32_t> at;
      for (std::int64_t t = 0; t < T; ++t) at.push_back(static_cast<std::int32_t>(in.below(most)));
      if (packed) call.words(positions, {T}, at);
      if (!packed) call.words(positions, {B, n}, at);
    }
    if (in.flag()) {
      tokens(q, 1 + in.below(4), D);
      call.all[q_out].view = call.all[q].view;
      if (in.flag()) call.all[q_out].view.type = from == Type::f64 ? from : Type::f32;
    }
  }
  for (const Slot slot : {k_scale, v_scale}) {
    const Type type = call.all[slot == k_scale ? k : v].view.type;
    if (!in.flag()) continue;
    if ((type == Type::e4m3 || type == Type::i8) && in.flag()) {
      call.all[slot].view = in.flag() ? Tensor(nullptr, Type::f32, {pools, rows, H})
                                      : Tensor(nullptr, Type::f32, {pools, rows, H, 1});  // dims are few
    } else {
      call.all[slot].view = Tensor(nullptr, Type::f32, {in.flag() ? 1 : H});
      for (int e = 0; e < 16; ++e) call.all[slot].content.push_back(static_cast<std::byte>(in.byte()));
    }
  }
  call.interleaved = in.flag(), call.threads = 1 + static_cast<int>(in.below(3));
  return call;
}

void damage(Bytes& in, Call& call) {
  Argument& a = call.all[static_cast<std::size_t>(in.below(count))];
  const auto d = static_cast<std::size_t>(in.below(4));
  switch (in.below(7)) {
    case 0:
      a.view = a.view ? Tensor{} : call.all[static_cast<std::size_t>(in.below(count))].view;
      break;
    case 1:
      a.view.type = static_cast<Type>(in.below(12));
      break;
    case 2:
      a.view.ndim = static_cast<std::int32_t>(in.below(6));
      break;
    case 3:
      a.view.shape[d] = in.integer();
      break;
    case 4:
      a.view.strides[d] = in.flag() ? in.integer() : 0;
      break;
    case 5:
      if (const auto at = static_cast<std::size_t>(in.byte()) * 4; at + 4 <= a.content.size()) {
        const auto value = static_cast<std::int32_t>(in.integer());
        std::memcpy(&a.content[at], &value, 4);
      }
      break;
    default:
      a.view.device = {static_cast<DeviceType>(in.below(4)), 0};
  }
}

using Memory = std::vector<std::vector<std::byte>>;

// Makes the call in memory of its own; false: a view is larger than that.
bool make(const Call& call, int threads, tessera_status& result, Memory& before, Memory& after) {
  std::vector<std::unique_ptr<std::byte, decltype(&std::free)>> blocks;
  std::array<Tensor, count> views;
  before.clear(), after.clear();
  for (std::size_t slot = 0; slot < count; ++slot) {
    views[slot] = call.all[slot].view;
    std::int64_t low = 0, high = 0;
    if (!reach(views[slot], low, high)) return false;
    const auto size = views[slot] ? static_cast<std::size_t>(high - low) : 0;
    blocks.emplace_back(static_cast<std::byte*>(std::malloc(size)), &std::free);
    const auto& content = call.all[slot].content;
    for (std::size_t e = 0; e < size; ++e)
      blocks.back().get()[e] = content.empty() ? std::byte{0xFF} : content[e % content.size()];
    before.emplace_back(blocks.back().get(), blocks.back().get() + size);
    views[slot].data = size > 0 ? blocks.back().get() - low : nullptr;
  }
  AppendArgs a{.k_new = views[k_new], .v_new = views[v_new], .k = views[k], .v = views[v]};
  a.cu_seqlens_new = views[offsets], a.seqused_k = views[used], a.block_table = views[table];
  a.v_block_table = views[v_table], a.page_indptr = views[indptr], a.page_indices = views[indices];
  a.slots = views[slots], a.rotary_cos = views[cos], a.rotary_sin = views[sin], a.positions = views[positions];
  a.q = views[q], a.q_out = views[q_out], a.q_positions = views[q_positions], a.status = views[status];
  a.k_scale = views[k_scale], a.v_scale = views[v_scale], a.interleaved = call.interleaved;
  const detail::CAppendArgs args(a);
  const tessera_execution execution = detail::to_c(Execution{.threads = threads});
  result = tessera_append(&args.view, &execution);
  for (std::size_t slot = 0; slot < count; ++slot)
    after.emplace_back(blocks[slot].get(), blocks[slot].get() + before[slot].size());
  return true;
}

bool written(const Call& call, std::size_t slot) {
  if (slot == k_scale || slot == v_scale) return call.all[slot].view.ndim >= 3;
  return slot == k || slot == v || slot == q_out || slot == status;
}

void check(const Call& call, bool must_succeed) {
  tessera_status status = TESSERA_OK, again = TESSERA_OK;
  Memory before, after, other;
  if (!make(call, call.threads, status, before, after)) return;
  if (status < TESSERA_OK || status > TESSERA_OUT_OF_MEMORY) finding("an unexpected status");
  if (status != TESSERA_OK && !*tessera_last_error()) finding("refused without a sentence");
  if (status != TESSERA_OK && must_succeed) finding(std::string("a valid call was refused: ") + tessera_last_error());
  for (std::size_t slot = 0; slot < count; ++slot)
    if ((status != TESSERA_OK || !written(call, slot)) && before[slot] != after[slot])
      finding(status == TESSERA_OK ? "more than the outputs was written" : "a refused call wrote");
  make(call, call.threads == 1 ? 3 : 1, again, before, other);
  if (again != status || other != after) finding("other bits with other threads");
}

}  // namespace
}  // namespace tessera::fuzz

extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1:quarantine_size_mb=32"; }

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera::fuzz;
  Bytes in(data, size);
  const std::int64_t faults = in.below(4);
  Call call = valid(in);
  for (std::int64_t n = 0; n < faults; ++n) damage(in, call);
  check(call, faults == 0);
  return 0;
}
