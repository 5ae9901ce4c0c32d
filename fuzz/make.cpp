// SPDX-License-Identifier: Apache-2.0
// Making a call: exactly sized memory and structs, the call, and what must hold for every call. See call.hpp.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "fuzz/bytes.hpp"
#include "fuzz/call.hpp"

namespace tessera::fuzz {

Counts counts;

namespace {

constexpr double most_work = 4e6;                // multiplications of one call
constexpr std::size_t most_workspace = 1 << 26;  // bytes

// From malloc, so that its last byte is the last one that may be read or written.
class Block {
 public:
  explicit Block(std::size_t bytes) : length(bytes), memory(static_cast<std::byte*>(std::malloc(bytes)), &std::free) {
    if (bytes > 0) std::memset(memory.get(), 0xFF, bytes);
  }
  std::byte* data() const { return memory.get(); }
  std::size_t size() const { return length; }

 private:
  std::size_t length;
  std::unique_ptr<std::byte, decltype(&std::free)> memory;
};

// A struct of the ABI in as many bytes as it says it has.
template <class Struct>
class Sized {
 public:
  Sized(const Struct& full, std::size_t size, bool given = true, std::size_t count = 1) :
      step(std::clamp(size, sizeof(std::size_t), sizeof(Struct) + 32)), block(step * count), given(given) {
    set(0, full, size);
  }
  void set(std::size_t index, const Struct& full, std::size_t size) {
    std::byte* to = block.data() + index * step;
    std::memcpy(to, &full, std::min(step, sizeof(Struct)));
    std::memcpy(to, &size, sizeof(size));
  }
  operator const Struct*() const { return given ? reinterpret_cast<const Struct*>(block.data()) : nullptr; }

 private:
  std::size_t step;
  Block block;
  bool given;
};

// The memory of all tensors of a call.
class Memory {
 public:
  explicit Memory(const Call& from) : call(from), places(from.arguments.size()) {
    for (std::size_t i = 0; i < places.size(); ++i) {
      places[i].range = addressed(argument(i).view);
      places[i].present = argument(i).given && !argument(i).null && places[i].range.fits;
    }
    for (std::size_t i = 0; i < places.size(); ++i) allocate(i);
    for (const bool outputs : {true, false})
      for (std::size_t i = 0; i < places.size(); ++i)
        if (call.writes(i) == outputs) fill(i);
    for (const auto& block : blocks) before.emplace_back(block.data(), block.data() + block.size());
  }

  const Range& range(std::size_t i) const { return places[i].range; }
  bool present(std::size_t i) const { return places[i].present; }
  void* data(std::size_t i) const {
    if (!present(i)) return nullptr;
    return reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(first(i)) -
                                   static_cast<std::uintptr_t>(range(i).low));
  }
  std::byte* first(std::size_t i) const { return blocks[places[i].block].data() + places[i].begin; }
  std::vector<std::byte> bytes(std::size_t i) const {
    return present(i) ? std::vector<std::byte>(first(i), first(i) + range(i).size) : std::vector<std::byte>{};
  }

  // Number `index` of an i32 tensor, as a kernel would read it.
  std::int32_t entry(std::size_t i, std::int64_t index) const {
    std::int32_t value;
    const auto& view = argument(i).view;
    std::memcpy(&value, first(i) - range(i).low + (view.shape[0] > 1 ? index * view.strides[0] * 4 : 0), 4);
    return value;
  }

  // Whether two elements of outputs share a byte.
  bool outputs_overlap() const {
    for (std::size_t i = 0; i < places.size(); ++i)
      if (call.writes(i) && present(i) && range(i).elements > static_cast<double>(range(i).size)) return true;
    for (std::size_t b = 0; b < blocks.size(); ++b)
      for (const int times : written(b))
        if (times > 1) return true;
    return false;
  }

  // True if every byte is as it was, but for elements of outputs, if those may differ.
  bool intact(bool but_for_outputs) const {
    for (std::size_t b = 0; b < blocks.size(); ++b) {
      if (std::equal(before[b].begin(), before[b].end(), blocks[b].data())) continue;
      if (!but_for_outputs) return false;
      const std::vector<int> free = written(b);
      for (std::size_t n = 0; n < blocks[b].size(); ++n)
        if (free[n] == 0 && blocks[b].data()[n] != before[b][n]) return false;
    }
    return true;
  }

  std::vector<std::uint64_t> elements(std::size_t i) const {
    std::vector<std::uint64_t> all;
    const auto type = static_cast<Type>(argument(i).view.type);
    each_element(i, [&](std::size_t at, std::size_t bytes) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, first(i) + at, bytes);
      const std::uint64_t infinite = type == Type::f64    ? 0x7FF0000000000000
                                     : type == Type::f32  ? 0x7F800000
                                     : type == Type::f16  ? 0x7C00
                                     : type == Type::bf16 ? 0x7F80
                                                          : ~std::uint64_t{0};
      const std::uint64_t magnitude = bits & ((std::uint64_t{1} << (8 * bytes - 1)) - 1);
      all.push_back(magnitude > infinite ? infinite + 1 : bits);  // any NaN is as good as another
    });
    return all;
  }

 private:
  struct Place {
    Range range;
    bool present = false;
    std::size_t block = 0, begin = 0;
  };

  const Argument& argument(std::size_t i) const { return call.arguments[i]; }
  bool hosted(std::size_t i) const {
    const int host = argument(i).host;
    return host >= 0 && places[static_cast<std::size_t>(host)].present &&
           argument(static_cast<std::size_t>(host)).host < 0;
  }

  void allocate(std::size_t i) {
    if (!places[i].present || hosted(i)) return;
    const std::size_t shift = argument(i).shift;
    std::size_t size = places[i].range.size;
    for (std::size_t j = 0; j < places.size(); ++j)
      if (places[j].present && hosted(j) && static_cast<std::size_t>(argument(j).host) == i) {
        places[j].block = blocks.size(), places[j].begin = shift + argument(j).place;
        size = std::max(size, argument(j).place + places[j].range.size);
      }
    places[i].block = blocks.size(), places[i].begin = shift;
    blocks.emplace_back(shift + size);
  }

  void fill(std::size_t i) {
    const auto& content = argument(i).content;
    if (!places[i].present || content.empty()) return;
    for (std::size_t n = 0; n < places[i].range.size; n += content.size())
      std::copy_n(content.begin(), std::min(content.size(), places[i].range.size - n), first(i) + n);
  }

  // How many elements of outputs each byte of a block belongs to.
  std::vector<int> written(std::size_t block) const {
    std::vector<int> times(blocks[block].size(), 0);
    for (std::size_t i = 0; i < places.size(); ++i)
      if (call.writes(i) && present(i) && places[i].block == block)
        each_element(i, [&](std::size_t at, std::size_t bytes) {
          for (std::size_t n = 0; n < bytes; ++n) ++times[places[i].begin + at + n];
        });
    return times;
  }

  template <class Use>
  void each_element(std::size_t i, const Use& use) const {
    const tessera_tensor& view = argument(i).view;
    if (places[i].range.size == 0) return;
    const std::size_t bytes = cases::size_of(static_cast<Type>(view.type));
    std::array<std::int64_t, 4> shape{1, 1, 1, 1}, strides{};
    for (int d = 0; d < view.ndim; ++d)
      if (view.shape[d] > 1)
        shape[static_cast<std::size_t>(d)] = view.shape[d], strides[static_cast<std::size_t>(d)] = view.strides[d];
    for (std::int64_t a = 0; a < shape[0]; ++a)
      for (std::int64_t b = 0; b < shape[1]; ++b)
        for (std::int64_t c = 0; c < shape[2]; ++c)
          for (std::int64_t d = 0; d < shape[3]; ++d) {
            const std::int64_t at = a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3];
            use(static_cast<std::size_t>(at * static_cast<std::int64_t>(bytes) - places[i].range.low), bytes);
          }
  }

  const Call& call;
  std::vector<Place> places;
  std::vector<Block> blocks;
  std::vector<std::vector<std::byte>> before;
};

// The call's structs in memory, and the functions of the ABI called with them.
class Caller {
 public:
  Caller(const Call& call, const Memory& memory) : call(call) {
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
      tessera_tensor view = call.arguments[i].view;
      view.data = memory.data(i);
      tensors.push_back(std::make_unique<Sized<tessera_tensor>>(view, view.size, call.arguments[i].given));
    }
  }

  tessera_status run() const {
    const Sized<tessera_execution> e = execution(nullptr, 0);
    const Sized<tessera_options> o(call.options, call.options.size, call.options_given);
    switch (call.function) {
      case Function::forward:
        return counted(tessera_forward(inputs(), outputs(), o, e));
      case Function::backward:
        return counted(tessera_backward(inputs(), saved(), gradients(), o, e));
      case Function::merge:
        return counted(tessera_merge(parts(), call.partials, merged(), e));
      default:
        return counted(tessera_dropout_mask(*tensors[0], *tensors[1], o, e));
    }
  }

  tessera_status plan(tessera_plan** plan) const {
    const Sized<tessera_execution> e = execution(nullptr, 0);
    const Sized<tessera_options> o(call.options, call.options.size, call.options_given);
    if (call.function == Function::forward) return counted(tessera_plan_forward(inputs(), outputs(), o, e, plan));
    return counted(tessera_plan_backward(inputs(), saved(), gradients(), o, e, plan));
  }

  tessera_status run(const tessera_plan* plan, const Block* workspace) const {
    const Sized<tessera_execution> e =
        execution(workspace ? workspace->data() : nullptr, workspace ? workspace->size() : 0);
    const Sized<tessera_options> o(call.options, call.options.size, call.options_given);
    if (call.function == Function::forward) return counted(tessera_plan_run_forward(plan, inputs(), outputs(), o, e));
    return counted(tessera_plan_run_backward(plan, inputs(), saved(), gradients(), o, e));
  }

 private:
  static tessera_status counted(tessera_status status) {
    ++counts.calls;
    if (status != TESSERA_OK) ++counts.refused;
    return status;
  }

  Sized<tessera_execution> execution(void* workspace, std::size_t bytes) const {
    tessera_execution e = call.execution;
    e.workspace = workspace, e.workspace_bytes = bytes;
    e.kernel = call.kernel.empty() ? nullptr : call.kernel.c_str();
    return {e, e.size, call.execution_given};
  }

  const tessera_tensor* at(std::size_t i) const { return *tensors[i]; }
  Sized<tessera_inputs> inputs() const {
    tessera_inputs in;
    tessera_inputs_init(&in);
    in.q = at(slot_q), in.k = at(slot_k), in.v = at(slot_v), in.bias = at(slot_bias), in.mask = at(slot_mask);
    in.slopes = at(slot_slopes), in.sinks = at(slot_sinks), in.rng = at(slot_rng);
    in.cu_seqlens_q = at(slot_cu_q), in.cu_seqlens_k = at(slot_cu_k);
    in.seqused_q = at(slot_used_q), in.seqused_k = at(slot_used_k);
    in.block_table = at(slot_block_table), in.v_block_table = at(slot_v_block_table);
    in.page_indptr = at(slot_page_indptr), in.page_indices = at(slot_page_indices), in.leftpad_k = at(slot_leftpad);
    in.state_o = at(slot_from_o), in.state_m = at(slot_from_m), in.state_l = at(slot_from_l);
    in.seq_row0 = at(slot_seq_row0), in.seq_col0 = at(slot_seq_col0), in.seq_batch0 = at(slot_seq_batch0);
    in.k_scale = at(slot_k_scale), in.v_scale = at(slot_v_scale), in.qv = at(slot_qv);
    in.tree_mask = at(slot_tree_mask), in.positions = at(slot_positions);
    return {in, call.sizes[0], call.given[0]};
  }
  Sized<tessera_outputs> outputs() const {
    return {{sizeof(tessera_outputs), at(slot_o), at(slot_lse), at(slot_status), at(slot_to_o), at(slot_to_m),
             at(slot_to_l)},
            call.sizes[1],
            call.given[1]};
  }
  Sized<tessera_saved> saved() const {
    return {
        {sizeof(tessera_saved), at(slot_o), at(slot_lse), at(slot_d_o), at(slot_d_lse)}, call.sizes[2], call.given[2]};
  }
  Sized<tessera_gradients> gradients() const {
    const tessera_gradients g{sizeof g, at(slot_dq), at(slot_dk), at(slot_dv), at(slot_dbias), at(slot_dsinks)};
    return {g, call.sizes[3], call.given[3]};
  }
  // The array's step is the size of its structs.
  Sized<tessera_outputs> parts() const {
    const std::size_t count = (call.arguments.size() - 2) / 2;
    Sized<tessera_outputs> all({}, call.sizes[0], call.given[0], count);
    for (std::size_t n = 0; n < count; ++n)
      all.set(n, {sizeof(tessera_outputs), at(2 + 2 * n), at(3 + 2 * n), {}, {}, {}, {}}, call.sizes[0]);
    return all;
  }
  Sized<tessera_outputs> merged() const {
    return {{sizeof(tessera_outputs), at(0), at(1), {}, {}, {}, {}}, call.sizes[1], call.given[1]};
  }

  const Call& call;
  std::vector<std::unique_ptr<Sized<tessera_tensor>>> tensors;
};

bool whole(const Call& call) {
  const Call fresh;
  for (std::size_t n = 0; n < 4; ++n)
    if (call.sizes[n] != fresh.sizes[n] || !call.given[n]) return false;
  for (const Argument& a : call.arguments)
    if (a.view.size != sizeof(tessera_tensor)) return false;
  return call.options_given && call.options.size == sizeof(tessera_options);
}

// Multiplications of forward or backward, from the lengths that the tensors hold: views with stride 0 may have any
// size.
double work(const Call& call, const Memory& memory) {
  const auto& a = call.arguments;
  const bool paged = a[slot_block_table].given || a[slot_page_indices].given;
  const bool packed = a[slot_cu_q].given && (a[slot_cu_k].given || paged) && whole(call);
  const int token = packed ? 0 : 1;
  const auto size = [&](Slot slot, int d) {
    return static_cast<double>(std::max<std::int64_t>(a[slot].view.shape[d], 0));
  };
  const double B = packed ? size(slot_cu_q, 0) : size(slot_q, 0), heads = size(slot_q, token + 1);
  const double dims = size(slot_q, token + 2) + size(slot_v, paged ? 3 : token + 2) + 16;
  constexpr std::int64_t most_sequences = 4096;
  if (B * (heads + 1) > 1e5) return 1e300;
  const auto readable = [&](Slot slot, double count) {
    const tessera_tensor& view = a[slot].view;
    return whole(call) && a[slot].given && memory.present(slot) && view.type == TESSERA_I32 && view.ndim == 1 &&
           static_cast<double>(view.shape[0]) == count;
  };
  const auto length = [&](Slot tokens, Slot cu, Slot used, std::int64_t b) {
    if (readable(used, packed ? B - 1 : B)) return static_cast<double>(std::max(memory.entry(used, b), 0));
    if (packed && readable(cu, B)) return std::max(0.0, 1.0 * memory.entry(cu, b + 1) - memory.entry(cu, b));
    return size(tokens, token);
  };
  double sum = 0;
  const auto sequences = static_cast<std::int64_t>(packed ? std::max(B - 1, 0.0) : B);
  if (sequences > most_sequences) return 1e300;
  for (std::int64_t b = 0; b < sequences; ++b) {
    const double nq = length(slot_q, slot_cu_q, slot_used_q, b), nk = length(slot_k, slot_cu_k, slot_used_k, b);
    sum += (nq + 1) * (nk + 1) * (heads + 1) * dims;
  }
  return sum;
}

class Making {
 public:
  Making(const Call& call, const Call* planned) : call(call), planned(planned), memory(call), caller(call, memory) {
    if (std::getenv("TESSERA_FUZZ_SHOW")) std::fprintf(stderr, "%s\n", text_of(call).c_str());
  }

  Outcome make() {
    if (call.function == Function::forward || call.function == Function::backward)
      attend();
    else if (affordable_without_plan())
      settle(caller.run());
    return std::move(outcome);
  }

 private:
  bool lacks_memory() const {
    for (std::size_t i = 0; i < call.arguments.size(); ++i)
      if (call.arguments[i].given && memory.range(i).elements > 0 && !memory.present(i)) return true;
    return false;
  }

  // Whatever is refused for its form needs no time; of the rest, outputs in real memory bound the work.
  bool affordable_without_plan() const {
    const tessera_tensor& out = call.arguments[0].view;
    double rows = 1;
    for (int d = 0; d + 1 < out.ndim && d < 3; ++d)
      rows *= static_cast<double>(std::max<std::int64_t>(out.shape[d], 1));
    return rows < 1e6;
  }

  void attend() {
    tessera_plan* plan = nullptr;
    if (planned) {
      const Memory other(*planned);
      settle(Caller(*planned, other).plan(&plan), true);
      if (outcome.status != TESSERA_OK) return;
    } else {
      settle(caller.plan(&plan), true);
      if (outcome.status != TESSERA_OK) {
        settle(caller.run());
        if (outcome.status == TESSERA_OK) fail("what cannot be planned runs");
        return;
      }
    }
    const std::unique_ptr<tessera_plan, decltype(&tessera_plan_destroy)> owner(plan, &tessera_plan_destroy);
    const std::size_t bytes = tessera_plan_workspace_size(plan);
    if (!*tessera_plan_kernel(plan) || !*tessera_plan_describe(plan)) fail("a plan without a name or a description");
    if (lacks_memory() && whole(call)) return settle(caller.run());
    if (lacks_memory() || bytes > most_workspace || work(call, memory) > most_work) return;
    if (call.workspace == Workspace::library) return settle(planned ? caller.run(plan, nullptr) : caller.run());
    const bool too_small = call.workspace == Workspace::too_small && bytes > 0;
    const Block workspace(too_small ? bytes - 1 : bytes);
    settle(caller.run(plan, &workspace));
    const bool told = call.execution_given && call.execution.size == sizeof(tessera_execution);
    if (too_small && told && outcome.status == TESSERA_OK) fail("a workspace that is too small was accepted");
  }

  void settle(tessera_status status, bool planning = false) {
    outcome.status = status;
    outcome.ran = !planning;
    if (status < TESSERA_OK || status > TESSERA_DEVICE_ERROR) fail("an unexpected status");
    if (status != TESSERA_OK) outcome.sentence = tessera_last_error();
    if (status != TESSERA_OK && outcome.sentence.empty()) fail("refused without a sentence");
    const bool written = status == TESSERA_OK && !planning;
    if (written && whole(call) && lacks_memory()) fail("a tensor without memory was accepted");
    if (written && memory.outputs_overlap()) fail("outputs that overlap were accepted");
    if (!memory.intact(written)) fail(written ? "more than the outputs was written" : "a refused call or a plan wrote");
    if (!written) return;
    outcome.outputs.clear(), outcome.memory.clear();
    for (std::size_t i = 0; i < call.arguments.size(); ++i) {
      outcome.memory.push_back(memory.bytes(i));
      if (call.writes(i) && memory.present(i)) outcome.outputs.push_back(memory.elements(i));
    }
  }

  [[noreturn]] void fail(const std::string& what) const {
    finding(what + "\nstatus " + std::to_string(outcome.status) + " " + outcome.sentence + "\n" + text_of(call));
  }

  const Call& call;
  const Call* planned;
  Memory memory;
  Caller caller;
  Outcome outcome;
};

}  // namespace

Outcome make(const Call& call, const Call* planned) { return Making(call, planned).make(); }

Call separated(const Call& call) {
  const Memory memory(call);
  Call other = call;
  for (std::size_t i = 0; i < call.arguments.size(); ++i) {
    Argument& a = other.arguments[i];
    if (!memory.present(i)) continue;
    a.shift = reinterpret_cast<std::uintptr_t>(memory.first(i)) % 16;
    a.host = -1;
    a.content = memory.bytes(i);
  }
  return other;
}

}  // namespace tessera::fuzz
