// SPDX-License-Identifier: Apache-2.0
// What dist asks of a transport: start a group of messages, look whether they are done, tell the others of a failure.
// Everything else (deadlines, agreement, who is missing) is built on that, here, once for all transports. Included by
// the executor and by every transport. Implements docs/scale_out.md, "Failure".
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "dist/worker.hpp"
#include "math/types.hpp"
#include "tessera/tessera.hpp"

namespace tessera::dist {

using Bytes = std::vector<std::byte>;

// One end of a message. The transport shares the memory until the message is complete, also if everybody else has
// given up on it.
struct Message {
  int peer = 0;
  bool send = false;
  std::shared_ptr<Bytes> bytes;  // what is sent, or room of exactly the size that is expected
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Begins a group; the group before is complete. At most one message for each peer and direction.
  virtual void start(std::span<const Message> group) = 0;
  // Makes progress, and says of each message of the group whether it is complete. Does not wait. Throws Error where the
  // transport reports one, a message of another size included.
  virtual std::vector<bool> test() = 0;
  // The sentence of another rank that has failed, if one has said so.
  virtual std::optional<std::string> notice() = 0;
  // Tells every other rank, and gives up what is under way. Only a fresh communicator works afterwards.
  virtual void fail(const std::string& sentence) noexcept = 0;

  // The thread on which plans work with this communicator, where calls of the transport may never return. Null: the
  // caller's.
  virtual Worker* worker() { return nullptr; }

  UInt64 plans = 0;                    // and decoders, that have been asked for here: as many on every rank
  std::string broken;                  // the sentence of the first failure here, if there was one
  std::shared_ptr<Communicator> kept;  // itself, for good: a call that has not returned still uses its memory
  std::atomic<bool> in_use{false};     // by a thread, for the time of a call
};

// A communicator as the executor uses it: with a limit of time for every wait, and refusing everything after a failure.
class Line {
 public:
  Line(std::shared_ptr<Communicator> transport, double timeout);

  int rank() const { return transport->rank(); }
  int size() const { return transport->size(); }

  // Puts a group at the end of the queue: groups travel one after the other. Returns its number.
  UInt64 start(std::vector<Message> group);
  // Between two pieces of work: progress, and word of others' failures.
  void poll();
  // Until this group and all before it are complete. Beyond the limit: an Error that names the ranks that have not
  // answered.
  void wait(UInt64 group);
  // Every rank's bytes, all of the same size, in the order of ranks: how a plan begins.
  std::vector<Bytes> gather(const Bytes& mine);
  // Which plan of the communicator's this is, the same on every rank, for the numbers of its messages: two plans may
  // have messages of the same sizes.
  UInt64 plan() const { return plan_number; }

  // Runs a body that all ranks run. If it throws, the others are told, and the communicator is of no more use.
  template <class Body>
  void together(Body body) {
    const Turn turn(*transport);
    require_usable();
    on_its_thread([&] {
      try {
        body();
      } catch (const Heard& heard) {
        transport->broken = heard.sentence;
        throw Error(TESSERA_COMMUNICATION_ERROR, heard.sentence);
      } catch (const std::bad_alloc&) {
        give_up("out of memory");
        throw;
      } catch (const std::exception& error) {
        give_up(error.what());
        throw;
      }
    });
  }

 private:
  struct Heard {  // from another rank: it needs no telling
    std::string sentence;
  };
  // For the time of a call nobody else may make one: two at once would mix their messages.
  class Turn {
   public:
    explicit Turn(Communicator& communicator);
    ~Turn() { all.in_use = false; }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Communicator& all;
  };
  void require_usable() const;
  void on_its_thread(const std::function<void()>& body);
  void give_up(const char* sentence) noexcept;
  // A call of the transport, which should return within this time. The body has what it needs in itself: when the
  // caller has gone on without this thread, this object may be gone.
  template <class Body>
  auto call(Clock::duration allowed, Body body) {
    Communicator& all = *transport;
    const Worker::Call inside(all.worker(), allowed);
    return body(all);
  }
  void listen(Clock::duration allowed);
  void start_next(Clock::duration allowed);
  std::set<int> progress(Clock::duration allowed);

  std::shared_ptr<Communicator> transport;
  double timeout;
  Clock::duration limit;
  std::exception_ptr failure;                                    // what a body has thrown, while the others are told
  std::list<std::shared_ptr<const std::vector<Message>>> queue;  // its first group is under way. A deque needs memory
                                                                 // to begin with, where nobody can be told yet
  UInt64 started = 0, complete = 0;                              // groups
  UInt64 plan_number = 0;
};

// Seals a message: its last 16 bytes say which message it is and what it held, so that a damaged or crossed one is
// noticed. `number` is the same at both ends.
void seal(Bytes& message, UInt64 number);
bool is_sealed(const Bytes& message, UInt64 number);
inline constexpr std::size_t seal_bytes = 16;

}  // namespace tessera::dist
