// SPDX-License-Identifier: Apache-2.0
// Trains a layer of attention on four ranks that are threads of this program, and on one, and compares the losses.
// layer.hpp is the part that matters; train_mpi.cpp is the same with processes.
#include <barrier>
#include <cstdio>
#include <exception>
#include <thread>

#include "layer.hpp"

namespace {

std::vector<double> train_on_threads(int ranks, int steps) {
  const std::vector<tessera::Communicator> communicators = tessera::Communicator::threads(ranks);
  std::vector<std::vector<double>> losses(communicators.size());
  std::vector<Numbers> given(communicators.size());
  std::barrier<> barrier(ranks);
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < communicators.size(); ++r)
    threads.emplace_back([&, r] {
      const auto sum = [&](Numbers& numbers) {  // in the order of ranks, so that all have the same bits
        given[r] = numbers;
        barrier.arrive_and_wait();
        numbers.assign(numbers.size(), 0);
        for (const Numbers& part : given)
          for (std::size_t i = 0; i < part.size(); ++i) numbers[i] += part[i];
        barrier.arrive_and_wait();
      };
      try {
        losses[r] = train(communicators[r], sum, steps);
      } catch (const std::exception& error) {  // every rank gets a sentence when one fails
        std::fprintf(stderr, "rank %zu: %s\n", r, error.what());
        barrier.arrive_and_drop();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return losses[0];
}

}  // namespace

int main() {
  const std::vector<double> one = train_on_threads(1, 40), four = train_on_threads(4, 40);
  return one.empty() || !report(one, four, 4);
}
