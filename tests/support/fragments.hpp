// SPDX-License-Identifier: Apache-2.0
// Tiles in shared memory without a GPU: what ldmatrix fetches of one, as the PTX ISA describes it, and how many lanes
// meet in a bank. Included by the tests of layouts (tests/mma/mma_test.cpp, tests/decode/decode_test.cpp).
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "gpu/layout.hpp"

namespace tessera::test {

using Place = std::pair<int, int>;  // row and column of a tile

// Shared memory of a tile of `rows` x `columns`, by the byte of each element.
class TileMemory {
 public:
  TileMemory(int rows, int columns) :
      TileMemory(rows, columns, [&](int row, int column) { return gpu::tile_byte(rows, row, column); }) {}
  // Where elements lie as byte(row, column) says.
  template <class Byte>
  TileMemory(int rows, int columns, Byte byte) {
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < columns; ++column)
        EXPECT_TRUE(cells.emplace(byte(row, column), Place{row, column}).second);
  }
  Place at(int byte) const { return cells.at(byte); }

 private:
  std::map<int, Place> cells;
};

// What lane `lane` gets of matrix `matrix`, two numbers, if lane l names the byte address(l). "ldmatrix": a row's
// numbers lie side by side; turned, rows and columns change places.
template <class Address>
std::pair<Place, Place> loaded(const TileMemory& memory, int lane, int matrix, bool turned, Address address) {
  const auto number = [&](int e) {
    const int row = turned ? lane % 4 * 2 + e : lane / 4, column = turned ? lane / 4 : lane % 4 * 2 + e;
    return memory.at(address(8 * matrix + row) + 2 * column);
  };
  return {number(0), number(1)};
}

// Banks: 32 of 4 bytes.
// How many lanes of the fullest bank, of those whose accesses go together: `bytes` each, 128 at a time.
template <class Address>
int conflicts(int bytes, Address address) {
  int most = 0;
  const int together = 128 / bytes < 32 ? 128 / bytes : 32;
  for (int first = 0; first < 32; first += together) {
    std::map<int, std::set<int>> words;  // by bank: different words of one bank come one after another
    for (int lane = first; lane < first + together; ++lane)
      for (int word = address(lane) / 4; word < (address(lane) + bytes) / 4; ++word) words[word % 32].insert(word);
    for (const auto& [bank, different] : words) most = std::max(most, static_cast<int>(different.size()));
  }
  return most;
}

}  // namespace tessera::test
