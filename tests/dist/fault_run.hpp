// SPDX-License-Identifier: Apache-2.0
// A small call of four ranks that are made to disagree or whose communicators misbehave, and what each of them says.
// Included by the tests of faults and of communicators' own threads.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "dist/faulty.hpp"
#include "tests/dist/world.hpp"

namespace tessera::dist {

inline constexpr double timeout = 1;  // threads of a busy machine get their turn within it

inline Problem small() { return {{96}, 4, 2, 16, 16, Type::f32, {.causal = true}}; }

inline Sharing sharing_of(const Problem& p, int ranks = 4) {
  return {.partition = zigzag(p.lengths, ranks, 4), .scheme = Scheme::ring, .timeout = timeout, .threads = 1};
}

struct Outcome {
  std::vector<std::string> sentences;  // by rank; empty: it was fine
  std::vector<tessera_status> status;
  double seconds = 0;  // of the slowest rank
  Answer all;
};

using Change = std::function<void(int rank, Problem&, Sharing&)>;
using Wrap = std::function<std::shared_ptr<Communicator>(int rank, std::shared_ptr<Communicator>)>;

inline Outcome run(const Change& change, const Wrap& wrap = {}, const std::function<bool(int)>& takes_part = {}) {
  const World world(small(), {}, 3);
  const int ranks = 4;
  Outcome out;
  out.sentences.resize(ranks), out.status.resize(ranks), out.all = world.ranks(sharing_of(small(), ranks));
  for (auto& [name, numbers] : out.all.of)
    for (Int64 i = 0; i < numbers.count(); ++i) numbers.set(i, -77);
  const auto begin = Clock::now();
  run_ranks(ranks, [&](int r, std::shared_ptr<Communicator> c) {
    if (takes_part && !takes_part(r)) return;
    Problem problem = small();
    Sharing sharing = sharing_of(problem, ranks);
    if (change) change(r, problem, sharing);
    World mine(problem, {}, 3);
    try {
      mine.rank(wrap ? wrap(r, c) : c, sharing, out.all);
    } catch (const Error& error) {
      out.sentences[static_cast<std::size_t>(r)] = error.what(),
      out.status[static_cast<std::size_t>(r)] = error.status();
    }
  });
  out.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  return out;
}

inline void expect_all(const Outcome& out, const std::string& sentence) {
  for (const std::string& said : out.sentences) EXPECT_EQ(said, sentence);
  EXPECT_LT(out.seconds, timeout + 1);
}

// Every number of every rank's outputs is still what it was.
inline void expect_untouched(const Outcome& out) {
  for (const auto& [name, numbers] : out.all.of)
    for (Int64 i = 0; i < numbers.count(); ++i) ASSERT_EQ(numbers.get(i), -77) << name;
}

// What a rank that is told says: the first sentence, with the name of the rank that noticed.
inline void expect_heard(const Outcome& out, const std::string& part) {
  for (const std::string& said : out.sentences) EXPECT_NE(said.find(part), std::string::npos) << said;
  EXPECT_LT(out.seconds, timeout + 1);
  expect_untouched(out);
}

inline Wrap on_rank(int rank, Fault fault) {
  return [=](int r, std::shared_ptr<Communicator> c) -> std::shared_ptr<Communicator> {
    return r == rank ? std::make_shared<Faulty>(std::move(c), fault) : c;
  };
}

}  // namespace tessera::dist
