// SPDX-License-Identifier: Apache-2.0
// Implements cli/progress.hpp: a thread that redraws the line four times a second.
// The thread exists only on a terminal, so pipes and log files never see a control character.
#include "cli/progress.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "cli/report.hpp"

namespace tessera::cli {
namespace {

constexpr auto first_drawn_after = std::chrono::milliseconds(700);  // a quick command shows nothing
constexpr auto redrawn_every = std::chrono::milliseconds(250);

std::size_t terminal_width() {
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

double seconds(std::chrono::steady_clock::duration d) { return std::chrono::duration<double>(d).count(); }

std::string clock_text(double s) {
  const long whole = static_cast<long>(s + 0.5);
  return format("%ld:%02ld", whole / 60, whole % 60);
}

}  // namespace

Progress::Progress(double total) : total(total) {
  if (isatty(STDERR_FILENO)) painter = std::thread([this] { redraw_until_stopped(); });
}

Progress::~Progress() {
  if (!painter.joinable()) return;
  {
    const std::lock_guard lock(mutex);
    stop = true;
  }
  stopped.notify_one();
  painter.join();
  clear();
}

void Progress::step(const std::string& what) {
  const std::lock_guard lock(mutex);
  label = what;
}

void Progress::advance(double amount) {
  const std::lock_guard lock(mutex);
  done = std::min(total, done + amount);
  last_advance = Clock::now();
}

void Progress::hide() {
  const std::lock_guard lock(mutex);
  clear();
}

void Progress::redraw_until_stopped() {
  std::unique_lock lock(mutex);
  auto wait = first_drawn_after;
  while (!stopped.wait_for(lock, wait, [this] { return stop; })) {
    wait = redrawn_every;
    std::fprintf(stderr, "\r\033[K%s", line().c_str());
    std::fflush(stderr);
    visible = true;
  }
}

void Progress::clear() {
  if (!visible) return;
  std::fputs("\r\033[K", stderr);
  std::fflush(stderr);
  visible = false;
}

// "[########............]  40 %  0:12, about 0:18 left  bench f32 2048 x 64"
std::string Progress::line() const {
  constexpr int cells = 20;
  const double share = total > 0 ? done / total : 0;
  const int filled = static_cast<int>(share * cells);
  const double elapsed = seconds(Clock::now() - start);
  const std::string bar = std::string(filled, '#') + std::string(cells - filled, '.');
  std::string text = format("[%s] %3.0f %%  %s", bar.c_str(), 100 * share, clock_text(elapsed).c_str());
  if (share > 0) {
    // Remaining time, extrapolated from the pace up to the last report; it keeps counting down between reports.
    const double paced = seconds(last_advance - start);
    const double left = paced * (1 - share) / share - (elapsed - paced);
    if (left >= 0) text += ", about " + clock_text(left) + " left";
  }
  text += "  " + label;
  const std::size_t width = terminal_width();
  if (text.size() >= width) text.resize(width > 1 ? width - 1 : 0);
  return text;
}

}  // namespace tessera::cli
