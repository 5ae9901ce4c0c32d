// SPDX-License-Identifier: Apache-2.0
// One line on the terminal, rewritten in place, that says how far a long command is.
// Included by the commands that can take more than two seconds.
// Never writes anything unless stderr is a terminal.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace tessera::cli {

class Progress {
 public:
  // `total` is in any unit of work; advance() counts in the same unit.
  explicit Progress(double total);
  ~Progress();  // clears the line
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const std::string& what);  // what is being done now
  void advance(double amount);
  void hide();  // clears the line until the next redraw: call it before printing to the terminal

 private:
  using Clock = std::chrono::steady_clock;
  void redraw_until_stopped();
  std::string line() const;
  void clear();

  const double total;
  const Clock::time_point start = Clock::now();
  std::mutex mutex;
  std::condition_variable stopped;
  bool stop = false, visible = false;
  double done = 0;
  Clock::time_point last_advance = start;
  std::string label;
  std::thread painter;
};

}  // namespace tessera::cli
