// SPDX-License-Identifier: Apache-2.0
// Messages over MPI; see transport.hpp. Nothing here waits, but for 150 ms after a failure:
// MPI_Test is all that makes progress, and deadlines are the caller's. So are calls of MPI that never return.
#include "mpi/transport.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <sstream>
#include <system_error>
#include <thread>
#include <utility>

namespace tessera::mpi {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int row_tag = 1, notice_tag = 2;
constexpr std::size_t notice_bytes = 512;
// Messages travel in slices. A long one is asked for by its receiver, and that word of MPI's queues behind what the
// receiver itself has handed to MPI for this peer: of two long messages that cross, one waits for the whole other,
// unless somebody asks MPI at the right moment. Slices are below the length from which MPI's TCP asks (64 KiB); the
// first one alone is asked for, so that nothing is sent to a rank that is not there yet. See docs/scale_out.md,
// "Overlap".
constexpr std::size_t slice_bytes = 60 << 10;
constexpr std::size_t first_window = 16;  // slices of a message that MPI is handed at once, until it proves faster

// For how long a rank that fails sees to it that its sentence leaves.
constexpr std::chrono::milliseconds longest_farewell{150};

// Whether MPI takes calls of any thread, one at a time: then calls that never return can be left behind.
bool any_thread_may_call() {
  int level = MPI_THREAD_SINGLE;
  MPI_Query_thread(&level);
  return level >= MPI_THREAD_SERIALIZED;
}

[[noreturn]] void report(const char* call, int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(TESSERA_COMMUNICATION_ERROR, std::string(call) + ": " + text);
}

Error no_answer(double timeout) {
  std::ostringstream sentence;
  sentence << "no answer within " << timeout << " s from all ranks of the MPI communicator";
  return Error(TESSERA_COMMUNICATION_ERROR, sentence.str());
}

// For how long one has looked. A process that was stopped, perhaps with the whole job, finds that much time has passed
// when it goes on: it looks again before it complains.
class Looking {
 public:
  explicit Looking(double limit) : limit(limit) {}
  bool is_over() {
    const auto now = Clock::now();
    looked += std::min<Clock::duration>(now - last, longest_pause), last = now;
    return looked > limit;
  }

 private:
  static constexpr std::chrono::milliseconds longest_pause{100};
  std::chrono::duration<double> limit, looked{};  // perhaps longer than the clock counts
  Clock::time_point last = Clock::now();
};

void require(const char* call, int code) {
  if (code != MPI_SUCCESS) report(call, code);
}

// MPI over TCP writes to a rank that has just died, and SIGPIPE would end this process too, without a word. While this
// lives, such a signal of this thread is held back, and then dropped. Who blocks it anyway keeps what is pending.
class WithoutBrokenPipes {
 public:
  WithoutBrokenPipes() {
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, &before);
  }
  ~WithoutBrokenPipes() {
    if (sigismember(&before, SIGPIPE)) return;
    const timespec now{};
    sigtimedwait(&pipe, nullptr, &now);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  WithoutBrokenPipes(const WithoutBrokenPipes&) = delete;
  WithoutBrokenPipes& operator=(const WithoutBrokenPipes&) = delete;

 private:
  sigset_t pipe{}, before{};
};

// A message under way. Requests are complete in front of `done`, and open or not begun behind.
struct Flow {
  tessera_message message{};
  std::vector<MPI_Request> slices;
  std::size_t done = 0, begun = 0, window = first_window;

  std::size_t bytes(std::size_t slice) const { return std::min(slice_bytes, message.bytes - slice * slice_bytes); }
};

class MpiTransport : public Transport {
 public:
  MpiTransport(MPI_Comm comm, double timeout) {
    const WithoutBrokenPipes guard;
    std::array<MPI_Request, 2> requests{};
    auto* const made = new std::array<MPI_Comm, 2>();  // it stays if something goes wrong: MPI may write to it later
    require("MPI_Comm_idup", MPI_Comm_idup(comm, &(*made)[0], &requests[0]));
    require("MPI_Comm_idup", MPI_Comm_idup(comm, &(*made)[1], &requests[1]));
    Looking looking(timeout);
    for (int done = 0; !done;) {
      require("MPI_Testall", MPI_Testall(2, requests.data(), &done, MPI_STATUSES_IGNORE));
      if (!done && looking.is_over()) throw no_answer(timeout);
      if (!done) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    rows = (*made)[0], control = (*made)[1];
    delete made;
    for (const MPI_Comm c : {rows, control})
      require("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(c, MPI_ERRORS_RETURN));
    MPI_Comm_rank(rows, &me);
    MPI_Comm_size(rows, &size);
    telling.assign(std::size_t(size), MPI_REQUEST_NULL);
    require("MPI_Irecv",
            MPI_Irecv(word->data(), int(word->size()), MPI_BYTE, MPI_ANY_SOURCE, notice_tag, control, &listening));
  }

  ~MpiTransport() override {
    const WithoutBrokenPipes guard;
    if (gone() || failed || heard) {  // what is open stays open, and MPI may write to it
      static_cast<void>(word.release());
      return;
    }
    if (listening != MPI_REQUEST_NULL) {
      MPI_Cancel(&listening);
      MPI_Wait(&listening, MPI_STATUS_IGNORE);
    }
    MPI_Comm_free(&rows);
    MPI_Comm_free(&control);
  }

  int rank() const override { return me; }
  int ranks() const override { return size; }
  bool own_thread() const override { return any_thread_may_call(); }

  void start(std::span<const tessera_message> messages) override {
    const WithoutBrokenPipes guard;
    if (const char* why = gone()) throw Error(TESSERA_COMMUNICATION_ERROR, why);
    flows.clear();
    for (const tessera_message& m : messages) {
      flows.push_back({.message = m, .slices = {}});
      flows.back().slices.assign((m.bytes + slice_bytes - 1) / slice_bytes, MPI_REQUEST_NULL);
    }
    for (const bool send : {false, true})
      for (Flow& flow : flows)
        if ((flow.message.send != 0) == send) begin(flow);
  }

  void test(std::span<std::uint8_t> done) override {
    const WithoutBrokenPipes guard;
    for (std::size_t i = 0; i < flows.size(); ++i) {
      Flow& flow = flows[i];
      while (flow.done < flow.begun && complete(flow, flow.done)) ++flow.done;
      const bool idle = flow.done == flow.begun, all = flow.done == flow.slices.size();
      if (idle && !all) flow.window *= 2;  // the network is faster than we ask
      if (!all) begin(flow);
      done[i] = all;
    }
  }

  std::optional<std::string> notice() override {
    const WithoutBrokenPipes guard;
    int complete = 0;
    if (gone()) return {};  // which the next group says
    if (!heard && listening != MPI_REQUEST_NULL && MPI_Test(&listening, &complete, MPI_STATUS_IGNORE) == MPI_SUCCESS &&
        complete)
      heard = std::string(word->data(), strnlen(word->data(), word->size()));
    return heard;
  }

  void fail(const char* sentence) noexcept override {
    const WithoutBrokenPipes guard;
    failed = true;
    if (gone()) return;
    auto* text = new (std::nothrow) std::array<char, notice_bytes>{};  // MPI may read it after this object is gone
    if (!text) return;
    std::memcpy(text->data(), sentence, strnlen(sentence, notice_bytes - 1));
    for (int r = 0; r < size; ++r)
      if (r != me && MPI_Isend(text->data(), int(notice_bytes), MPI_BYTE, r, notice_tag, control,
                               &telling[std::size_t(r)]) != MPI_SUCCESS)
        telling[std::size_t(r)] = MPI_REQUEST_NULL;
    // It may have to queue behind rows, and after this call nobody may ask MPI for progress any more.
    const auto end = Clock::now() + longest_farewell;
    for (int told = 0; !told;) {
      if (MPI_Testall(size, telling.data(), &told, MPI_STATUSES_IGNORE) != MPI_SUCCESS || Clock::now() > end) break;
      if (!told) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    for (MPI_Request& request : telling)
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    for (Flow& flow : flows)
      for (std::size_t i = flow.done; i < flow.begun && !flow.message.send; ++i)
        if (flow.slices[i] != MPI_REQUEST_NULL) MPI_Cancel(&flow.slices[i]);
    flows.clear();
  }

 private:
  // Why there is no MPI here any more, which ends a process that calls it after MPI_Finalize, and in a forked child
  // would take the parent's messages. Null: there is.
  const char* gone() const {
    int finished = 0;
    MPI_Finalized(&finished);
    if (finished) return "communicator: MPI has been finalised since it was made";
    if (process != getpid()) return "communicator: was made before this process was forked, and MPI is the parent's";
    return nullptr;
  }

  // Hands MPI as many slices as it may have: all to receive, some to send.
  void begin(Flow& flow) {
    const tessera_message& m = flow.message;
    const std::size_t end = m.send ? (flow.done == 0 ? 1 : flow.done + flow.window) : flow.slices.size();
    for (; flow.begun < std::min(end, flow.slices.size()); ++flow.begun) {
      void* data = static_cast<char*>(m.data) + flow.begun * slice_bytes;
      const int count = static_cast<int>(flow.bytes(flow.begun));
      MPI_Request* const request = &flow.slices[flow.begun];
      const bool asked_for = flow.begun == 0 && flow.slices.size() > 1;
      if (m.send)
        require("MPI_Isend",
                (asked_for ? MPI_Issend : MPI_Isend)(data, count, MPI_BYTE, m.peer, row_tag, rows, request));
      else
        require("MPI_Irecv", MPI_Irecv(data, count, MPI_BYTE, m.peer, row_tag, rows, request));
    }
  }

  // Asks MPI, which makes progress only then.
  static bool complete(Flow& flow, std::size_t slice) {
    const tessera_message& m = flow.message;
    const auto wrong = [&](const std::string& size) {
      return Error(TESSERA_COMMUNICATION_ERROR,
                   "a message from rank " + std::to_string(m.peer) + " has " + size + " were expected");
    };
    const std::size_t bytes = flow.bytes(slice);
    int done = 0;
    MPI_Status status;
    if (const int code = MPI_Test(&flow.slices[slice], &done, &status); code != MPI_SUCCESS) {
      int kind = 0;
      MPI_Error_class(code, &kind);
      if (kind == MPI_ERR_TRUNCATE) throw wrong("more than the " + std::to_string(m.bytes) + " bytes that");
      report("MPI_Test", code);
    }
    int count = 0;
    if (done && !m.send && MPI_Get_count(&status, MPI_BYTE, &count) == MPI_SUCCESS && std::size_t(count) != bytes)
      throw wrong(std::to_string(slice * slice_bytes + std::size_t(count)) + " bytes; " + std::to_string(m.bytes));
    return done != 0;
  }

  MPI_Comm rows = MPI_COMM_NULL, control = MPI_COMM_NULL;
  int me = 0, size = 1;
  const pid_t process = getpid();
  bool failed = false;
  std::vector<Flow> flows;
  MPI_Request listening = MPI_REQUEST_NULL;
  std::vector<MPI_Request> telling;  // by rank: word of a failure here, which must not need memory then
  std::unique_ptr<std::array<char, notice_bytes>> word = std::make_unique<std::array<char, notice_bytes>>();
  std::optional<std::string> heard;
};

// A transport in the making, owned by the thread that makes it and by the one that waits.
struct Making {
  std::mutex mutex;
  std::condition_variable made_or_not;
  std::unique_ptr<MpiTransport> made;
  std::exception_ptr error;
  bool done = false, left_behind = false;
};

// How long a call of MPI may take beyond the limit of time, and how often one looks.
constexpr std::chrono::milliseconds grace{400}, look{50};

// Duplicates are made on another thread: a call of MPI that never returns is left behind there.
std::unique_ptr<Transport> made_aside(MPI_Comm comm, double timeout) {
  const auto making = std::make_shared<Making>();
  const auto make = [making, comm, timeout] {
    std::unique_ptr<MpiTransport> made;
    std::exception_ptr error;
    try {
      made = std::make_unique<MpiTransport>(comm, timeout);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(making->mutex);
    if (making->left_behind) static_cast<void>(made.release());  // MPI is nobody's any more
    making->made = std::move(made), making->error = std::move(error), making->done = true;
    making->made_or_not.notify_one();
  };
  try {
    std::thread(make).detach();
  } catch (const std::system_error&) {
    throw std::bad_alloc();
  }
  std::unique_lock lock(making->mutex);
  Looking looking(timeout + std::chrono::duration<double>(grace).count());
  while (!making->made_or_not.wait_for(lock, look, [&] { return making->done; })) {
    if (!looking.is_over()) continue;
    making->left_behind = true;
    throw no_answer(timeout);
  }
  if (making->error) std::rethrow_exception(making->error);
  return std::move(making->made);
}

}  // namespace

std::unique_ptr<Transport> transport_over(MPI_Comm comm, double timeout) {
  int initialised = 0, finished = 0;
  MPI_Initialized(&initialised);
  if (initialised) MPI_Finalized(&finished);
  if (!initialised || finished)
    throw Error(TESSERA_INVALID_ARGUMENT, "comm: MPI must be initialised, and not finalised yet");
  if (comm == MPI_COMM_NULL) throw Error(TESSERA_INVALID_ARGUMENT, "comm: is MPI_COMM_NULL");
  int between_groups = 0;
  MPI_Comm_test_inter(comm, &between_groups);
  if (between_groups)
    throw Error(TESSERA_INVALID_ARGUMENT, "comm: is an intercommunicator; must be of one group (MPI_Intercomm_merge)");
  if (!(timeout > 0))
    throw Error(TESSERA_INVALID_ARGUMENT,
                "timeout: is " + std::to_string(timeout) + "; must be a positive number of seconds");
  if (!any_thread_may_call()) return std::make_unique<MpiTransport>(comm, timeout);
  return made_aside(comm, timeout);
}

}  // namespace tessera::mpi
