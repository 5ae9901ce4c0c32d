// SPDX-License-Identifier: Apache-2.0
// Messages over MPI; see communicator.hpp. Nothing here waits: MPI_Test is all that makes progress, and deadlines are
// the caller's.
#include "mpi/communicator.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

namespace tessera::dist {
namespace {

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

// Memory that MPI may still read or write when nobody waits for it any more: it is never freed.
template <class T>
void abandon(T&& memory) {
  new std::decay_t<T>(std::forward<T>(memory));
}

// A part of a message.
struct Part {
  MPI_Request request = MPI_REQUEST_NULL;
  std::size_t message = 0, bytes = 0;
};

class MpiCommunicator : public Communicator {
 public:
  MpiCommunicator(MPI_Comm comm, double timeout) {
    std::array<MPI_Request, 2> requests{};
    require("MPI_Comm_idup", MPI_Comm_idup(comm, &rows, &requests[0]));
    require("MPI_Comm_idup", MPI_Comm_idup(comm, &control, &requests[1]));
    const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(timeout));
    for (int done = 0; !done;) {
      require("MPI_Testall", MPI_Testall(2, requests.data(), &done, MPI_STATUSES_IGNORE));
      if (!done && Clock::now() > end) {
        std::ostringstream sentence;
        sentence << "no answer within " << timeout << " s from all ranks of the MPI communicator";
        throw Error(TESSERA_COMMUNICATION_ERROR, sentence.str());
      }
      if (!done) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    for (const MPI_Comm c : {rows, control})
      require("MPI_Comm_set_errhandler", MPI_Comm_set_errhandler(c, MPI_ERRORS_RETURN));
    MPI_Comm_rank(rows, &me);
    MPI_Comm_size(rows, &ranks);
    require("MPI_Irecv",
            MPI_Irecv(word.data(), int(word.size()), MPI_BYTE, MPI_ANY_SOURCE, notice_tag, control, &listening));
  }

  ~MpiCommunicator() override {
    int finished = 0;
    MPI_Finalized(&finished);
    if (finished || !broken.empty()) return;  // what is open stays open
    if (listening != MPI_REQUEST_NULL) {
      MPI_Cancel(&listening);
      MPI_Wait(&listening, MPI_STATUS_IGNORE);
    }
    MPI_Comm_free(&rows);
    MPI_Comm_free(&control);
  }

  int rank() const override { return me; }
  int size() const override { return ranks; }

  void start(std::span<const Message> messages) override {
    group.assign(messages.begin(), messages.end());
    parts.clear();
    for (std::size_t i = 0; i < group.size(); ++i) {
      const Message& m = group[i];
      for (std::size_t at = 0; at < m.bytes->size(); at += most_bytes) {
        Part part{.message = i, .bytes = std::min(most_bytes, m.bytes->size() - at)};
        void* data = m.bytes->data() + at;
        const int count = static_cast<int>(part.bytes);
        require(m.send ? "MPI_Isend" : "MPI_Irecv",
                m.send ? MPI_Isend(data, count, MPI_BYTE, m.peer, row_tag, rows, &part.request)
                       : MPI_Irecv(data, count, MPI_BYTE, m.peer, row_tag, rows, &part.request));
        parts.push_back(part);
      }
    }
  }

  std::vector<bool> test() override {
    std::vector<bool> done(group.size(), true);
    for (Part& part : parts) {
      if (part.request == MPI_REQUEST_NULL) continue;
      int complete = 0;
      MPI_Status status;
      const int code = MPI_Test(&part.request, &complete, &status);
      const Message& m = group[part.message];
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
        done[part.message] = false;
        continue;
      }
      int count = 0;
      if (!m.send && MPI_Get_count(&status, MPI_BYTE, &count) == MPI_SUCCESS && std::size_t(count) != part.bytes)
        throw Error(TESSERA_COMMUNICATION_ERROR, "a message from rank " + std::to_string(m.peer) + " has " +
                                                     std::to_string(count) + " bytes; " + std::to_string(part.bytes) +
                                                     " were expected");
    }
    return done;
  }

  std::optional<std::string> notice() override {
    int complete = 0;
    if (!heard && listening != MPI_REQUEST_NULL && MPI_Test(&listening, &complete, MPI_STATUS_IGNORE) == MPI_SUCCESS &&
        complete)
      heard = std::string(word.data(), strnlen(word.data(), word.size()));
    return heard;
  }

  void fail(const std::string& sentence) noexcept override {
    auto* text = new (std::nothrow) std::array<char, notice_bytes>{};  // MPI may read it after this object is gone
    if (!text) return;
    std::memcpy(text->data(), sentence.data(), std::min(sentence.size(), notice_bytes - 1));
    for (int r = 0; r < ranks; ++r) {
      MPI_Request request = MPI_REQUEST_NULL;
      if (r == me ||
          MPI_Isend(text->data(), int(notice_bytes), MPI_BYTE, r, notice_tag, control, &request) != MPI_SUCCESS)
        continue;
      int complete = 0;
      for (int tries = 0; tries < 100 && !complete; ++tries) MPI_Test(&request, &complete, MPI_STATUS_IGNORE);
      if (!complete) MPI_Request_free(&request);
    }
    for (Part& part : parts)
      if (part.request != MPI_REQUEST_NULL && !group[part.message].send) MPI_Cancel(&part.request);
    try {
      abandon(std::move(group));
    } catch (...) {
    }
    group.clear(), parts.clear();
  }

 private:
  MPI_Comm rows = MPI_COMM_NULL, control = MPI_COMM_NULL;
  int me = 0, ranks = 1;
  std::vector<Message> group;
  std::vector<Part> parts;
  MPI_Request listening = MPI_REQUEST_NULL;
  std::array<char, notice_bytes> word{};
  std::optional<std::string> heard;
};

}  // namespace

std::shared_ptr<Communicator> mpi_communicator(MPI_Comm comm, double timeout) {
  return std::make_shared<MpiCommunicator>(comm, timeout);
}

}  // namespace tessera::dist
