// SPDX-License-Identifier: Apache-2.0
// Which addresses of K a warp reads in one instruction, and how often a block fetches each byte: `naive` beside
// `vector`, by the kernels' own index functions. See pictures.hpp.
#include <set>

#include "tools/pictures/drawn_tile.hpp"
#include "tools/pictures/pictures.hpp"

namespace tessera::pictures {
namespace {

using namespace ladder;

constexpr int keys = drawn_tile.block_cols, D = drawn_tile.D, warp = 32;
constexpr int sector = 32;  // bytes that memory delivers at once
constexpr int naive_rows = 64;

// K of one head, contiguous.
struct Keys {
  alignas(128) float data[keys][D];
  TokenRef ref() { return {data, 0, D, D}; }
  Int64 byte(const void* address) const {
    return static_cast<const char*>(address) - reinterpret_cast<const char*>(data);
  }
};

// One instruction of a warp: the first byte of K that each lane reads; all lanes read `bytes`.
struct Instruction {
  std::vector<Int64> lanes;
  int bytes;

  std::size_t sectors() const {
    std::set<Int64> touched;
    for (const Int64 first : lanes)
      for (Int64 at = first / sector; at <= (first + bytes - 1) / sector; ++at) touched.insert(at);
    return touched.size();
  }
};

// What a block reads of a tile of K, instruction by instruction, warp after warp.
std::vector<Instruction> naive_reads(Keys& K) {
  std::vector<Instruction> all;
  for (int first = 0; first < naive_rows; first += warp)
    for (Int64 j = 0; j < keys; ++j)
      for (int d = 0; d < D; ++d) {
        Instruction one{{}, sizeof(float)};
        // naive_forward.cuh: a lane is a query, and the address does not depend on it.
        for (int lane = 0; lane < warp; ++lane) one.lanes.push_back(K.byte(row_of<Element::f32>(K.ref(), 0, j, 0) + d));
        all.push_back(one);
      }
  return all;
}

std::vector<Instruction> vector_reads(Keys& K) {
  static float tile[keys][tile_pitch(drawn_tile, D)];
  std::vector<Instruction> all;
  for (int first = 0; first < drawn_tile.threads; first += warp) {
    std::vector<Instruction> of_warp;
    for (int lane = 0; lane < warp; ++lane) {
      std::vector<Access> recorded;
      threadIdx.x = static_cast<unsigned>(first + lane);
      accesses = &recorded;
      load_tile<drawn_tile, D>(tile, TileRows<Element::f32>(K.ref(), K.data[0]), keys);
      accesses = nullptr;
      const std::vector<Access> reads = inside(recorded, K.data);
      of_warp.resize(reads.size(), {{}, sizeof(float4)});
      for (std::size_t n = 0; n < reads.size(); ++n) of_warp[n].lanes.push_back(K.byte(reads[n].address));
    }
    all.insert(all.end(), of_warp.begin(), of_warp.end());
  }
  return all;
}

// How often a byte of the tile is fetched, which must be the same for all.
std::size_t fetches(const std::vector<Instruction>& all) {
  std::vector<std::size_t> count(sizeof(Keys::data));
  for (const Instruction& one : all) {
    std::set<Int64> bytes;  // lanes that read the same byte share one fetch
    for (const Int64 first : one.lanes)
      for (Int64 at = first; at < first + one.bytes; ++at) bytes.insert(at);
    for (const Int64 at : bytes) ++count[static_cast<std::size_t>(at)];
  }
  if (count[0] == 0 || std::set<std::size_t>(count.begin(), count.end()).size() != 1)
    throw std::runtime_error("memory_access: not every byte is fetched, and as often as the others");
  return count[0];
}

constexpr double left = 150, cell = 11.5, row_height = 30;

double byte_x(Int64 byte) { return left + double(byte % (4 * D)) / 4 * cell; }

void draw_row(Sheet& sheet, double y, const std::string& name) {
  sheet.text(left - 12, y + 19, name, "end", colour::ink, 12);
  sheet.rect(left, y, D * cell, row_height, colour::empty);
  for (int n = 0; n <= 4 * D; n += sector)
    sheet.line({byte_x(n % (4 * D)) + (n == 4 * D ? D * cell : 0), y},
               {byte_x(n % (4 * D)) + (n == 4 * D ? D * cell : 0), y + row_height}, colour::faint, 0.8);
}

void draw_naive(Sheet& sheet, const std::vector<Instruction>& reads, double y) {
  sheet.text(24, y, "naive: a thread per query. All 32 lanes want the same number of K at the same time.", "start",
             colour::ink, 14, true);
  for (int n = 0; n < 3; ++n) {
    const double row_y = y + 18 + n * (row_height + 8);
    draw_row(sheet, row_y, format("instruction %d", n));
    const Instruction& one = reads[static_cast<std::size_t>(n)];
    const double begin = byte_x(one.lanes[0] / sector * sector);
    sheet.rect(begin, row_y, sector / 4 * cell, row_height, "#f3d3d3");
    sheet.rect(byte_x(one.lanes[0]), row_y, cell, row_height, colour::red);
    sheet.rect(begin + sector / 4 * cell + 4, row_y + 5, 262, row_height - 10, colour::empty);
    sheet.text(begin + sector / 4 * cell + 8, row_y + 19, "lanes 0-31: 4 bytes, of a sector of 32", "start",
               colour::red, 12);
  }
}

void draw_vector(Sheet& sheet, const std::vector<Instruction>& reads, double y) {
  sheet.text(24, y, "vector: a thread per piece. Each lane copies 16 bytes of the tile to shared memory.", "start",
             colour::ink, 14, true);
  const Instruction& one = reads[0];
  for (int n = 0; n < 2; ++n) draw_row(sheet, y + 18 + n * (row_height + 8), format("row %d of the tile", n));
  for (std::size_t lane = 0; lane < one.lanes.size(); ++lane) {
    const Int64 row = one.lanes[lane] / (4 * D);
    const double row_y = y + 18 + double(row) * (row_height + 8), x = byte_x(one.lanes[lane]);
    sheet.rect(x + 0.7, row_y + 1, double(one.bytes) / 4 * cell - 1.4, row_height - 2,
               lane % 2 ? colour::blue : "#4b86c2");
    sheet.text(x + double(one.bytes) / 8 * cell, row_y + 19, format("%zu", lane), "middle", "#ffffff", 11);
  }
  sheet.text(left, y + 18 + 2 * (row_height + 8) + 10,
             format("instruction 0 of warp 0: lanes 0-31, %zu bytes in %zu sectors, all of them wanted",
                    one.lanes.size() * static_cast<std::size_t>(one.bytes), one.sectors()),
             "start", colour::blue, 12);
}

struct Figures {
  std::size_t instructions, sectors, fetches;
  int queries;
  double pairs() const { return double(queries) * keys; }
};

Figures figures(const std::vector<Instruction>& all, int queries) {
  Figures f{all.size(), 0, fetches(all), queries};
  for (const Instruction& one : all) f.sectors += one.sectors();
  return f;
}

}  // namespace

Sheet memory_access() {
  check_drawn_tile();
  const gpu::Step naive = step_of(steps_of("naive", drawn_problem(Pass::forward)), "naive_forward");
  if (naive.threads != naive_rows) throw std::runtime_error("memory_access: naive has other blocks now");
  static Keys K;
  const std::vector<Instruction> slow = naive_reads(K), fast = vector_reads(K);
  const Figures a = figures(slow, naive_rows), b = figures(fast, drawn_tile.block_rows);

  Sheet sheet(left + D * cell + 30, 560, "Memory accesses of naive and vector");
  draw_naive(sheet, slow, 36);
  draw_vector(sheet, fast, 196);

  const double y = 336, columns[] = {430, 580, 730};
  sheet.text(24, y, format("A block and %d keys of K (%d dims, f32)", keys, D), "start", colour::ink, 14, true);
  sheet.text(columns[0], y, "naive", "end", colour::red, 13, true);
  sheet.text(columns[1], y, "vector", "end", colour::blue, 13, true);
  sheet.text(columns[2], y, "naive / vector", "end", colour::faint, 13, true);
  int line = 0;
  const auto row = [&](const std::string& what, double x, double z, const char* pattern, bool ratio = true) {
    const double at = y + 26 + 24 * line++;
    sheet.line({24, at - 17}, {columns[2], at - 17}, colour::grid);
    sheet.text(24, at, what, "start", colour::ink, 13);
    sheet.text(columns[0], at, format(pattern, x), "end");
    sheet.text(columns[1], at, format(pattern, z), "end");
    if (ratio) sheet.text(columns[2], at, format("%.0f", x / z), "end", colour::faint);
  };
  row("queries of the block", a.queries, b.queries, "%.0f", false);
  row("load instructions of its warps", double(a.instructions), double(b.instructions), "%.0f");
  row("sectors of 32 bytes asked for", double(a.sectors), double(b.sectors), "%.0f");
  row("each byte is fetched ... times", double(a.fetches), double(b.fetches), "%.0f");
  row("load instructions per 1000 pairs", 1000 * double(a.instructions) / a.pairs(),
      1000 * double(b.instructions) / b.pairs(), "%.1f");
  row("sectors per 1000 pairs", 1000 * double(a.sectors) / a.pairs(), 1000 * double(b.sectors) / b.pairs(), "%.1f");
  sheet.text(24, y + 26 + 24 * line + 6,
             "V is read in the same way. The caches serve most of naive's sectors; what they cannot give back is the",
             "start", colour::faint, 12);
  sheet.text(24, y + 26 + 24 * line + 24,
             "instructions: one load of one number for each multiply-add, where vector reads its tile from shared "
             "memory.",
             "start", colour::faint, 12);
  return sheet;
}

}  // namespace tessera::pictures
