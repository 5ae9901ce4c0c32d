// SPDX-License-Identifier: Apache-2.0
// Records when each warp of `vector_forward` loads, waits and computes: docs/pictures/data/timeline.txt, from which
// draw_pictures draws the timeline. Needs a GPU. Usage: record_timeline FILE
// The kernel is the library's own text with time stamps put between its lines; if those lines change, this says so.
#include <algorithm>
#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <random>

#include "cases/device.hpp"
#include "core/failure.hpp"
#include "cuda/jit/cache.hpp"
#include "cuda/jit/source.hpp"
#include "gpu/unit.hpp"
#include "tools/pictures/plans.hpp"
#include "tools/pictures/timeline.hpp"

namespace tessera::pictures {
namespace {

constexpr int sequences = 1, heads = 16, length = 4096;  // several blocks for every multiprocessor
constexpr Int64 first_drawn_tile = 20, drawn_tiles = 4;  // of 64: long after the start
constexpr int warp = 32;

void replace_once(std::string& text, const std::string& from, const std::string& to) {
  const std::size_t at = text.find(from);
  if (at == text.npos || text.find(from, at + 1) != text.npos)
    throw std::runtime_error("vector_forward.cuh has changed: '" + from + "' is not there exactly once");
  text.replace(at, from.size(), to);
}

// `from` once in the text; before it comes a stamp of event `event` and tile n.
void stamp_before(std::string& text, const std::string& from, Event event) {
  replace_once(text, from, format("trace(stamps, %d, n - tiles.first); ", static_cast<int>(event)) + from);
}

// The unit of a step with stamps. Lane 0 of each warp writes stamps[block][warp][tile][event]; after those of all
// blocks come the numbers of the blocks' multiprocessors.
constexpr const char* traced_file = "ladder/kernel/vector_forward.cuh";

std::string traced_unit(const gpu::Step& step, Int64 tiles) {
  std::string kernel;
  for (const cuda::SourceFile& file : cuda::device_sources())
    if (file.name == traced_file) kernel = file.text;
  replace_once(kernel, "#pragma once", "");
  replace_once(kernel, "void vector_forward(const ForwardParams& p) {",
               "void vector_forward(const ForwardParams& p, unsigned long long* stamps) {");
  stamp_before(kernel, "wait_copies<0>();", Event::wait);
  stamp_before(kernel, "if constexpr (config.stages == 2) load_tiles(n + 1);", Event::load);
  stamp_before(kernel, "kernel.multiply_QK(stage);", Event::multiply_QK);
  stamp_before(kernel, "kernel.softmax(score", Event::softmax);
  stamp_before(kernel, "kernel.multiply_PV(stage);", Event::multiply_PV);
  stamp_before(kernel, "__syncthreads();\n      load_tiles(n + 1);", Event::barrier);
  stamp_before(kernel, "\n      load_tiles(n + 1);", Event::load);

  std::string unit = step.unit;
  replace_once(unit, text("#include \"", traced_file, "\"\n"), "");
  replace_once(unit, "ForwardParams p)", "ForwardParams p, unsigned long long* stamps)");
  replace_once(unit, "<config>(p)", "<config>(p, stamps)");
  const std::string trace = text(
      "namespace tessera::ladder {\n__device__ inline void trace(unsigned long long* stamps, int event, Int64 tile) {",
      "\n  constexpr int warps = ", step.threads / warp, ", events = ", event_count, ", tiles = ", tiles,
      ";\n  if (threadIdx.x % 32 != 0) return;\n  unsigned long long now, sm;",
      "\n  asm volatile(\"mov.u64 %0, %%clock64;\" : \"=l\"(now) : : \"memory\");",
      "\n  stamps[((Int64(blockIdx.x) * warps + threadIdx.x / 32) * tiles + tile) * events + event] = now;",
      "\n  if (threadIdx.x != 0 || tile != 0 || event != 0) return;",
      "\n  asm volatile(\"{ .reg .u32 s; mov.u32 s, %%smid; cvt.u64.u32 %0, s; }\" : \"=l\"(sm));",
      "\n  stamps[Int64(gridDim.x) * warps * tiles * events + blockIdx.x] = sm;\n}\n}\n");
  return "#include \"ladder/kernel/product.cuh\"\n#include \"gpu/kernel/scores.cuh\"\n" + trace + kernel + unit;
}

// The stamps of a whole launch.
class Recording {
 public:
  Recording(const gpu::Step& step, Int64 tiles, const std::vector<std::uint64_t>& stamps) :
      blocks(step.blocks), warps(step.threads / warp), tiles(tiles), stamps(stamps) {}

  std::uint64_t multiprocessor(Int64 block) const {
    return stamps[static_cast<std::size_t>(blocks * warps * tiles * event_count + block)];
  }
  // In the order of time; events that this kernel does not have are left out.
  std::vector<Stamp> of_warp(Int64 block, Int64 number) const {
    std::vector<Stamp> all;
    for (Int64 tile = 0; tile < tiles; ++tile)
      for (int event = 0; event < event_count; ++event)
        if (const std::uint64_t cycle = stamps[index(block, number, tile, event)])
          all.push_back({static_cast<Event>(event), tile, static_cast<std::int64_t>(cycle)});
    std::sort(all.begin(), all.end(), [](const Stamp& a, const Stamp& b) { return a.cycle < b.cycle; });
    return all;
  }

  const Int64 blocks, warps, tiles;

 private:
  std::size_t index(Int64 block, Int64 number, Int64 tile, int event) const {
    return static_cast<std::size_t>(((block * warps + number) * tiles + tile) * event_count + event);
  }
  const std::vector<std::uint64_t>& stamps;
};

// The first blocks of one multiprocessor, as many as it holds at once.
std::vector<Int64> neighbours(const Recording& recording, std::size_t at_once) {
  std::map<std::uint64_t, std::vector<Int64>> by_multiprocessor;
  for (Int64 block = 0; block < recording.blocks; ++block)
    by_multiprocessor[recording.multiprocessor(block)].push_back(block);
  for (const auto& [multiprocessor, blocks] : by_multiprocessor)
    if (blocks.size() >= at_once) return {blocks.begin(), blocks.begin() + static_cast<std::ptrdiff_t>(at_once)};
  throw std::runtime_error("no multiprocessor had as many blocks as it can hold");
}

// How the cycles of all warps divide among the events.
std::vector<double> shares(const Recording& recording) {
  std::vector<double> sums(event_count);
  double all = 0;
  for (Int64 block = 0; block < recording.blocks; ++block)
    for (Int64 number = 0; number < recording.warps; ++number) {
      const std::vector<Stamp> stamps = recording.of_warp(block, number);
      for (std::size_t n = 0; n + 1 < stamps.size(); ++n) {
        const auto cycles = static_cast<double>(stamps[n + 1].cycle - stamps[n].cycle);
        sums[static_cast<std::size_t>(stamps[n].event)] += cycles, all += cycles;
      }
    }
  for (double& sum : sums) sum /= all;
  return sums;
}

Timeline timeline_of(const Recording& recording, const gpu::Step& step, const std::string& gpu) {
  Timeline out{.gpu = gpu,
               .tile_queries = setting_of(step, "block_rows"),
               .tile_keys = setting_of(step, "block_cols"),
               .stages = setting_of(step, "stages"),
               .shares = shares(recording),
               .blocks = {}};
  const std::vector<Int64> blocks = neighbours(recording, static_cast<std::size_t>(setting_of(step, "blocks_per_sm")));
  std::int64_t begin = 0, end = 0;
  for (const Stamp& stamp : recording.of_warp(blocks[0], 0)) {
    if (stamp.tile == first_drawn_tile && begin == 0) begin = stamp.cycle;
    if (stamp.tile == first_drawn_tile + drawn_tiles && end == 0) end = stamp.cycle;
  }
  out.cycles = end - begin;
  for (const Int64 block : blocks) {
    Timeline::Block& drawn = out.blocks.emplace_back(Timeline::Block{block, {}});
    for (Int64 number = 0; number < recording.warps; ++number) {
      const std::vector<Stamp> all = recording.of_warp(block, number);
      std::vector<Stamp>& kept = drawn.warps.emplace_back();
      for (std::size_t n = 0; n < all.size(); ++n) {
        const bool ends_inside = n + 1 < all.size() && all[n + 1].cycle > begin;
        if (ends_inside && all[n].cycle < end) kept.push_back({all[n].event, all[n].tile, all[n].cycle - begin});
      }
    }
  }
  return out;
}

Timeline record() {
  Problem p = api::plain_problem(Pass::forward, Type::f32, {64, 64});
  p.B = sequences, p.Hq = p.Hk = heads, p.Nq = p.Nk = length;
  const gpu::Step planned = step_of(steps_of("vector", p), "vector_forward");
  const std::string& missing = cuda::find_driver().reason;
  if (!missing.empty()) {
    const cuda::Compiled compiled =
        cuda::compile({traced_unit(planned, length / setting_of(planned, "block_cols")), drawn_architecture});
    throw std::runtime_error(format("the traced kernel compiles for %s (%d registers, %d bytes spilled), but ",
                                    drawn_architecture, compiled.resources.registers, compiled.resources.spill_bytes) +
                             missing);
  }
  const cuda::Properties& gpu = cuda::properties(0);
  const gpu::Step step = step_of(ladder::vector_steps(p, gpu), "vector_forward");
  const Int64 tiles = length / setting_of(step, "block_cols");
  const Device device{DeviceType::cuda, 0};
  const cuda::CurrentDevice current(0);

  std::vector<float> numbers(static_cast<std::size_t>(p.B * p.Nq * p.Hq * p.D));
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::unique_ptr<cases::DeviceMemory>> memory;
  const auto tensor = [&](std::initializer_list<std::int64_t> shape, std::size_t count) {
    for (std::size_t n = 0; n < count; ++n) numbers[n] = normal(random);
    memory.push_back(std::make_unique<cases::DeviceMemory>(device, count * sizeof(float)));
    memory.back()->write(reinterpret_cast<const std::byte*>(numbers.data()), count * sizeof(float));
    return Tensor(memory.back()->data(), Type::f32, shape, device);
  };
  Call call;
  call.inputs.q = tensor({p.B, p.Nq, p.Hq, p.D}, numbers.size());
  call.inputs.k = tensor({p.B, p.Nk, p.Hk, p.D}, numbers.size());
  call.inputs.v = tensor({p.B, p.Nk, p.Hk, p.Dv}, numbers.size());
  call.outputs.o = tensor({p.B, p.Nq, p.Hq, p.Dv}, numbers.size());
  call.outputs.lse = tensor({p.B, p.Hq, p.Nq}, static_cast<std::size_t>(p.B * p.Hq * p.Nq));
  gpu::ForwardParams params = gpu::forward_params(p, call, p.options.scale);

  std::vector<std::uint64_t> stamps(
      static_cast<std::size_t>(step.blocks * (step.threads / warp) * tiles * event_count + step.blocks));
  const cases::DeviceMemory stamp_memory(device, stamps.size() * sizeof(stamps[0]));
  stamp_memory.fill(std::byte{0});
  void* stamp_data = stamp_memory.data();
  void* arguments[] = {&params, &stamp_data};
  const cuda::LoadedKernel& kernel = *cuda::find_kernel(traced_unit(step, tiles), gpu::kernel_symbol, 0);
  kernel.allow_shared(static_cast<unsigned>(step.shared_bytes));
  for (int run = 0; run < 3; ++run)  // the last one counts: clocks and caches are warm
    kernel.launch({.grid = {static_cast<unsigned>(step.blocks)},
                   .block = {static_cast<unsigned>(step.threads)},
                   .shared_bytes = static_cast<unsigned>(step.shared_bytes)},
                  arguments);
  stamp_memory.read(reinterpret_cast<std::byte*>(stamps.data()), stamps.size() * sizeof(stamps[0]));
  return timeline_of(Recording(step, tiles, stamps), step, gpu.name);
}

}  // namespace
}  // namespace tessera::pictures

int main(int argc, char** argv) {
  if (argc != 2) return std::fprintf(stderr, "usage: record_timeline FILE\n"), 2;
  try {
    const tessera::pictures::Timeline timeline = tessera::pictures::record();
    tessera::pictures::save(timeline, argv[1]);
    std::printf("%lld cycles of %zu blocks written to %s\n", static_cast<long long>(timeline.cycles),
                timeline.blocks.size(), argv[1]);
  } catch (const std::exception& error) {
    return std::fprintf(stderr, "record_timeline: %s\n", error.what()), 1;
  }
  return 0;
}
