// SPDX-License-Identifier: Apache-2.0
// A communicator that misbehaves once: it loses, damages, shortens or delays the messages of one group, drops all
// from one on, or throws.
// Included by tests of failures and by `tessera dist faults`.
#pragma once

#include <thread>

#include "dist/communicator.hpp"

namespace tessera::dist {

struct Fault {
  enum Kind { none, drop, lose, corrupt, wrong_size, delay, fail } kind = none;
  int group = 0;  // which one, from 0; the first is that of the agreement
  double seconds = 0;
};

class Faulty : public Communicator {
 public:
  Faulty(std::shared_ptr<Communicator> real, Fault fault) : real(std::move(real)), fault(fault) {}

  int rank() const override { return real->rank(); }
  int size() const override { return real->size(); }
  Worker* worker() override { return real->worker(); }
  std::vector<bool> test() override { return real->test(); }
  std::optional<std::string> notice() override { return real->notice(); }
  void fail(const std::string& sentence) noexcept override { real->fail(sentence); }

  void start(std::span<const Message> group) override {
    std::vector<Message> messages(group.begin(), group.end());
    const int number = started++;
    if (fault.kind == Fault::drop && number >= fault.group)
      std::erase_if(messages, [](const Message& m) { return m.send; });
    if (number == fault.group) {
      if (fault.kind == Fault::fail) throw Error(TESSERA_COMMUNICATION_ERROR, "the network is down");
      if (fault.kind == Fault::delay) std::this_thread::sleep_for(std::chrono::duration<double>(fault.seconds));
      for (Message& m : messages) {
        if (!m.send) continue;
        m.bytes = std::make_shared<Bytes>(*m.bytes);
        if (fault.kind == Fault::corrupt) (*m.bytes)[m.bytes->size() / 2] ^= std::byte{16};
        if (fault.kind == Fault::wrong_size) m.bytes->pop_back();
      }
      if (fault.kind == Fault::lose) std::erase_if(messages, [](const Message& m) { return m.send; });
    }
    real->start(messages);
  }

 private:
  std::shared_ptr<Communicator> real;
  Fault fault;
  int started = 0;
};

}  // namespace tessera::dist
