// SPDX-License-Identifier: Apache-2.0
// Ranks as threads; see threads.hpp.
#include "dist/threads.hpp"

#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

namespace tessera::dist {
namespace {

struct Exchange {
  std::mutex mutex;
  std::map<std::pair<int, int>, std::deque<Bytes>> boxes;  // by sender and receiver, what is on its way
  std::vector<std::optional<std::string>> failures;        // by rank
};

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Exchange> exchange, int rank, int size) :
      exchange(std::move(exchange)), me(rank), ranks(size) {}

  int rank() const override { return me; }
  int size() const override { return ranks; }

  void start(std::span<const Message> messages) override {
    group.assign(messages.begin(), messages.end());
    done.assign(group.size(), false);
    const std::lock_guard lock(exchange->mutex);
    for (std::size_t i = 0; i < group.size(); ++i) {
      if (!group[i].send) continue;
      exchange->boxes[{me, group[i].peer}].push_back(*group[i].bytes);
      done[i] = true;
    }
  }

  std::vector<bool> test() override {
    const std::lock_guard lock(exchange->mutex);
    for (std::size_t i = 0; i < group.size(); ++i) {
      if (done[i]) continue;
      std::deque<Bytes>& box = exchange->boxes[{group[i].peer, me}];
      if (box.empty()) continue;
      if (box.front().size() != group[i].bytes->size())
        throw Error(TESSERA_COMMUNICATION_ERROR, "a message from rank " + std::to_string(group[i].peer) + " has " +
                                                     std::to_string(box.front().size()) + " bytes; " +
                                                     std::to_string(group[i].bytes->size()) + " were expected");
      *group[i].bytes = std::move(box.front());
      box.pop_front();
      done[i] = true;
    }
    return done;
  }

  std::optional<std::string> notice() override {
    const std::lock_guard lock(exchange->mutex);
    for (int r = 0; r < ranks; ++r)
      if (r != me && exchange->failures[static_cast<std::size_t>(r)])
        return exchange->failures[static_cast<std::size_t>(r)];
    return {};
  }

  void fail(const std::string& sentence) noexcept override {
    const std::lock_guard lock(exchange->mutex);
    std::optional<std::string>& mine = exchange->failures[static_cast<std::size_t>(me)];
    try {
      mine = sentence;
    } catch (...) {
      mine.emplace();  // without memory for the sentence they still learn that there was one
    }
    group.clear(), done.clear();
  }

 private:
  std::shared_ptr<Exchange> exchange;
  int me, ranks;
  std::vector<Message> group;
  std::vector<bool> done;
};

}  // namespace

std::vector<std::shared_ptr<Communicator>> thread_communicators(int size) {
  const auto exchange = std::make_shared<Exchange>();
  exchange->failures.resize(static_cast<std::size_t>(size));
  std::vector<std::shared_ptr<Communicator>> all;
  for (int r = 0; r < size; ++r) all.push_back(std::make_shared<ThreadCommunicator>(exchange, r, size));
  return all;
}

void run_ranks(int size, const std::function<void(int rank, std::shared_ptr<Communicator>)>& body) {
  const auto all = thread_communicators(size);
  std::vector<std::thread> threads;
  threads.reserve(all.size());
  bool missing = false;
  try {
    for (int r = 0; r < size; ++r) threads.emplace_back(body, r, all[static_cast<std::size_t>(r)]);
  } catch (const std::exception&) {  // a thread that cannot be had: those that run hear of it, and end
    missing = true;
    all[threads.size()]->fail("out of memory");
  }
  for (std::thread& thread : threads) thread.join();
  if (missing) throw std::bad_alloc();
}

}  // namespace tessera::dist
