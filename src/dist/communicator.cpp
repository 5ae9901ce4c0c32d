// SPDX-License-Identifier: Apache-2.0
// Waiting with a limit, agreement and seals; see communicator.hpp.
#include "dist/communicator.hpp"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

namespace tessera::dist {
namespace {

// A hash that reads memory at its speed: four lanes of multiply and rotate, folded. It guards against accidents, not
// against attackers.
UInt64 hash(std::span<const std::byte> data, UInt64 seed) {
  constexpr UInt64 odd = 0x9e3779b97f4a7c15u;
  UInt64 lane[4] = {seed ^ odd, seed + odd, ~seed, seed * odd + data.size()};
  const auto mix = [](UInt64 x, UInt64 word) {
    x = (x ^ word) * 0xff51afd7ed558ccdu;
    return x << 31 | x >> 33;
  };
  std::size_t at = 0;
  for (; at + 32 <= data.size(); at += 32)
    for (std::size_t i = 0; i < 4; ++i) {
      UInt64 word;
      std::memcpy(&word, data.data() + at + 8 * i, 8);
      lane[i] = mix(lane[i], word);
    }
  for (; at < data.size(); ++at) lane[at % 4] = mix(lane[at % 4], static_cast<UInt64>(data[at]) + 1);
  UInt64 all = data.size();
  for (const UInt64 x : lane) all = mix(all, x);
  return all ^ all >> 29;
}

// The other ranks share this machine's processors, as like as not: after a short while a waiting rank sleeps.
void pause(int& tries) {
  if (++tries < 64)
    std::this_thread::yield();
  else
    std::this_thread::sleep_for(std::chrono::microseconds(tries < 1024 ? 50 : 500));
}

// A rank that has not looked for longer was stopped, perhaps with all others (a job that is suspended): it looks again
// before it complains.
constexpr std::chrono::seconds longest_pause{1};

constexpr double most_seconds = 1e9;  // which the clock can count

// For how long telling the others may take.
constexpr std::chrono::milliseconds longest_farewell{150};

}  // namespace

void seal(Bytes& message, UInt64 number) {
  const UInt64 words[2] = {number, hash({message.data(), message.size() - seal_bytes}, number)};
  std::memcpy(message.data() + message.size() - seal_bytes, words, seal_bytes);
}

bool is_sealed(const Bytes& message, UInt64 number) {
  UInt64 words[2];
  std::memcpy(words, message.data() + message.size() - seal_bytes, seal_bytes);
  return words[0] == number && words[1] == hash({message.data(), message.size() - seal_bytes}, number);
}

Line::Line(std::shared_ptr<Communicator> transport, double timeout) :
    transport(std::move(transport)), timeout(timeout),
    limit(std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(timeout > 0 ? std::min(timeout, most_seconds) : 0))) {}

Line::Turn::Turn(Communicator& communicator) : all(communicator) {
  if (all.in_use.exchange(true))
    throw Error(TESSERA_INVALID_ARGUMENT,
                "communicator: is in use by another thread; it and its plans are used by one at a time");
}

void Line::require_usable() const {
  if (!transport->broken.empty())
    throw Error(TESSERA_COMMUNICATION_ERROR,
                "communicator: has failed before (" + transport->broken + "); make a new one, and a plan with it");
}

// What a call that has not returned may still use, the thread's stack and the communicator, stays for good.
void Line::on_its_thread(const std::function<void()>& body) {
  failure = nullptr;
  Worker* const worker = transport->worker();
  if (!worker) return body();
  try {
    worker->run(body);
  } catch (const Worker::Stuck&) {
    transport->kept = transport;
    if (failure) std::rethrow_exception(failure);
    transport->broken.assign(1, '?');
    std::ostringstream sentence;
    sentence << "a call of the transport has not returned within " << timeout << " s";
    transport->broken = sentence.str();
    throw Error(TESSERA_COMMUNICATION_ERROR, transport->broken);
  }
}

void Line::give_up(const char* sentence) noexcept {
  failure = std::current_exception();
  std::string said;
  try {
    transport->broken = sentence;
    said = "rank " + std::to_string(rank()) + ": " + sentence;
  } catch (...) {  // no memory for a sentence: the others hear that much
    transport->broken.assign(1, '?');
  }
  call(longest_farewell, [said = std::move(said)](Communicator& all) { all.fail(said); });
}

void Line::listen(Clock::duration allowed) {
  const auto heard = call(allowed, [](Communicator& all) { return all.notice(); });
  if (heard) throw Heard{heard->empty() ? "another rank has failed, and did not say why" : *heard};
}

UInt64 Line::start(std::vector<Message> messages) {
  listen(limit);
  if (messages.empty()) return started;
  queue.push_back(std::make_shared<const std::vector<Message>>(std::move(messages)));
  if (queue.size() == 1) start_next(limit);
  return ++started;
}

void Line::start_next(Clock::duration allowed) {
  call(allowed, [group = queue.front()](Communicator& all) { all.start(*group); });
}

// Lets the next group begin where one is complete. Returns the ranks for which the first of the queue waits.
std::set<int> Line::progress(Clock::duration allowed) {
  std::set<int> missing;
  while (!queue.empty()) {
    const std::vector<bool> done = call(allowed, [](Communicator& all) { return all.test(); });
    for (std::size_t i = 0; i < done.size(); ++i)
      if (!done[i]) missing.insert((*queue.front())[i].peer);
    if (!missing.empty()) break;
    queue.pop_front();
    ++complete;
    if (!queue.empty()) start_next(allowed);
  }
  return missing;
}

// MPI moves a part of a message each time it is asked, over TCP: it is asked often enough for the milliseconds of the
// call that comes next. See docs/scale_out.md, "Overlap".
void Line::poll() {
  for (int i = 0; i < 64 && !queue.empty(); ++i) progress(limit);
  listen(limit);
}

void Line::wait(UInt64 group) {
  Clock::duration waited{};
  Clock::time_point last = Clock::now();
  for (int tries = 0;; pause(tries)) {
    const UInt64 before = complete;
    const std::set<int> missing = progress(limit - waited);
    listen(limit - waited);
    if (complete >= group) return;
    const Clock::time_point now = Clock::now();
    waited = complete != before ? Clock::duration{} : waited + std::min<Clock::duration>(now - last, longest_pause);
    last = now;
    if (waited < limit) continue;
    std::ostringstream sentence;
    sentence << "no answer within " << timeout << " s from rank" << (missing.size() == 1 ? "" : "s");
    for (const int r : missing) sentence << (r == *missing.begin() ? " " : ", ") << r;
    throw Error(TESSERA_COMMUNICATION_ERROR, sentence.str());
  }
}

std::vector<Bytes> Line::gather(const Bytes& mine) {
  std::vector<Message> messages;
  std::vector<std::shared_ptr<Bytes>> all;
  plan_number = ++transport->plans;
  const UInt64 number = plan_number << 32 | 0x67617468;  // "gath": a plan's first messages
  const auto sent = std::make_shared<Bytes>(mine);
  sent->resize(mine.size() + seal_bytes);
  seal(*sent, number);
  for (int r = 0; r < size(); ++r) {
    all.push_back(r == rank() ? sent : std::make_shared<Bytes>(sent->size()));
    if (r == rank()) continue;
    messages.push_back({r, true, sent});
    messages.push_back({r, false, all.back()});
  }
  wait(start(std::move(messages)));
  std::vector<Bytes> out;
  for (int r = 0; r < size(); ++r) {
    const Bytes& bytes = *all[static_cast<std::size_t>(r)];
    if (!is_sealed(bytes, number))
      throw Error(TESSERA_COMMUNICATION_ERROR, "a message from rank " + std::to_string(r) + " arrived damaged");
    out.emplace_back(bytes.begin(), bytes.end() - static_cast<std::ptrdiff_t>(seal_bytes));
  }
  return out;
}

}  // namespace tessera::dist
