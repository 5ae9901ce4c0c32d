// SPDX-License-Identifier: Apache-2.0
// A thread of a communicator's own, on which plans work: when a call of the transport never returns, that thread is
// left behind, and the caller goes on with a sentence. Included by the communicator. Implements docs/scale_out.md,
// "Failure".
#pragma once

#include <sys/types.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <thread>

namespace tessera::dist {

using Clock = std::chrono::steady_clock;

class Worker {
 public:
  // Thrown by run(): the body is inside a call that has not returned. If it ever does, the body still never goes on: it
  // touches nothing any more but what that call touches.
  struct Stuck {};

  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Runs the body on the worker's thread, and waits for it. Throws what it throws. Nothing is run after Stuck.
  void run(const std::function<void()>& body);

 private:
  struct State;

 public:
  // Around a call that a body makes and that should return within this time. Without a worker it does nothing.
  class Call {
   public:
    Call(const Worker* worker, Clock::duration allowed);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    State* state;
  };

 private:
  std::shared_ptr<State> state;
  std::thread thread;
  pid_t process;
};

}  // namespace tessera::dist
