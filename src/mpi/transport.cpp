// SPDX-License-Identifier: Apache-2.0
// Messages over MPI; see transport.hpp. Nothing here waits, but for a quarter of a second
// after a failure: MPI_Test is all that makes progress, and deadlines are the caller's.
#include "mpi/transport.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

namespace tessera::mpi {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int row_tag = 1, notice_tag = 2;
constexpr std::size_t notice_bytes = 512;
constexpr std::size_t most_bytes = std::size_t(1) << 30;  // of one MPI message, whose counts are ints

[[noreturn]] void report(const char* call, int code) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(code, text, &length);
  throw Error(TESSERA_COMMUNICATION_ERROR, std::string(call) + ": " + text);
}

void require(const char* call, int code) {
  if (code != MPI_SUCCESS) report(call, code);
}

// For how long a rank that fails sees to it that its sentence leaves.
constexpr std::chrono::milliseconds longest_farewell{250};

// A part of a message.
struct Part {
  MPI_Request request = MPI_REQUEST_NULL;
  std::size_t message = 0, bytes = 0;
};

class MpiTransport : public Transport {
 public:
  MpiTransport(MPI_Comm comm, double timeout) {
    std::array<MPI_Request, 2> requests{};
    auto made = std::make_unique<std::array<MPI_Comm, 2>>();
    require("MPI_Comm_idup", MPI_Comm_idup(comm, &(*made)[0], &requests[0]));
    require("MPI_Comm_idup", MPI_Comm_idup(comm, &(*made)[1], &requests[1]));
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
    for (int done = 0; !done;) {
      require("MPI_Testall", MPI_Testall(2, requests.data(), &done, MPI_STATUSES_IGNORE));
      if (!done && Clock::now() > end) {
        static_cast<void>(made.release());  // MPI may write to it later
        std::ostringstream sentence;
        sentence << "no answer within " << timeout << " s from all ranks of the MPI communicator";
        throw Error(TESSERA_COMMUNICATION_ERROR, sentence.str());
      }
      if (!done) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    rows = (*made)[0], control = (*made)[1];
    for (const MPI_Comm c : {rows, control})
      require("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(c, MPI_ERRORS_RETURN));
    MPI_Comm_rank(rows, &me);
    MPI_Comm_size(rows, &size);
    telling.assign(std::size_t(size), MPI_REQUEST_NULL);
    require("MPI_Irecv",
            MPI_Irecv(word->data(), int(word->size()), MPI_BYTE, MPI_ANY_SOURCE, notice_tag, control, &listening));
  }

  ~MpiTransport() override {
    int finished = 0;
    MPI_Finalized(&finished);
    if (finished || failed || heard) {  // what is open stays open, and MPI may write to it
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

  void start(std::span<const tessera_message> messages) override {
    group.assign(messages.begin(), messages.end());
    parts.clear();
    for (std::size_t i = 0; i < group.size(); ++i) {
      const tessera_message& m = group[i];
      for (std::size_t at = 0; at < m.bytes; at += most_bytes) {
        Part part{.message = i, .bytes = std::min(most_bytes, m.bytes - at)};
        void* data = static_cast<char*>(m.data) + at;
        const int count = static_cast<int>(part.bytes);
        require(m.send ? "MPI_Isend" : "MPI_Irecv",
                m.send ? MPI_Isend(data, count, MPI_BYTE, m.peer, row_tag, rows, &part.request)
                       : MPI_Irecv(data, count, MPI_BYTE, m.peer, row_tag, rows, &part.request));
        parts.push_back(part);
      }
    }
  }

  void test(std::span<std::uint8_t> done) override {
    std::fill(done.begin(), done.end(), std::uint8_t(1));
    for (Part& part : parts) {
      if (part.request == MPI_REQUEST_NULL) continue;
      int complete = 0;
      MPI_Status status;
      const int code = MPI_Test(&part.request, &complete, &status);
      const tessera_message& m = group[part.message];
      if (code != MPI_SUCCESS) {
        int kind = 0;
        MPI_Error_class(code, &kind);
        if (kind == MPI_ERR_TRUNCATE)
          throw Error(TESSERA_COMMUNICATION_ERROR, "a message from rank " + std::to_string(m.peer) +
                                                       " has more than the " + std::to_string(part.bytes) +
                                                       " bytes that were expected");
        report("MPI_Test", code);
      }
      if (!complete) {
        done[part.message] = 0;
        continue;
      }
      int count = 0;
      if (!m.send && MPI_Get_count(&status, MPI_BYTE, &count) == MPI_SUCCESS && std::size_t(count) != part.bytes)
        throw Error(TESSERA_COMMUNICATION_ERROR, "a message from rank " + std::to_string(m.peer) + " has " +
                                                     std::to_string(count) + " bytes; " + std::to_string(part.bytes) +
                                                     " were expected");
    }
  }

  std::optional<std::string> notice() override {
    int complete = 0;
    if (!heard && listening != MPI_REQUEST_NULL && MPI_Test(&listening, &complete, MPI_STATUS_IGNORE) == MPI_SUCCESS &&
        complete)
      heard = std::string(word->data(), strnlen(word->data(), word->size()));
    return heard;
  }

  void fail(const char* sentence) noexcept override {
    failed = true;
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
    for (Part& part : parts)
      if (part.request != MPI_REQUEST_NULL && !group[part.message].send) MPI_Cancel(&part.request);
    group.clear(), parts.clear();
  }

 private:
  MPI_Comm rows = MPI_COMM_NULL, control = MPI_COMM_NULL;
  int me = 0, size = 1;
  bool failed = false;
  std::vector<tessera_message> group;
  std::vector<Part> parts;
  MPI_Request listening = MPI_REQUEST_NULL;
  std::vector<MPI_Request> telling;  // by rank: word of a failure here, which must not need memory then
  std::unique_ptr<std::array<char, notice_bytes>> word = std::make_unique<std::array<char, notice_bytes>>();
  std::optional<std::string> heard;
};

}  // namespace

std::unique_ptr<Transport> transport_over(MPI_Comm comm, double timeout) {
  int initialised = 0, finished = 0;
  MPI_Initialized(&initialised);
  if (initialised) MPI_Finalized(&finished);
  if (!initialised || finished)
    throw Error(TESSERA_INVALID_ARGUMENT, "comm: MPI must be initialised, and not finalised yet");
  if (comm == MPI_COMM_NULL) throw Error(TESSERA_INVALID_ARGUMENT, "comm: is MPI_COMM_NULL");
  if (!(timeout > 0))
    throw Error(TESSERA_INVALID_ARGUMENT,
                "timeout: is " + std::to_string(timeout) + "; must be a positive number of seconds");
  return std::make_unique<MpiTransport>(comm, timeout);
}

}  // namespace tessera::mpi
