// SPDX-License-Identifier: Apache-2.0
// Messages through callbacks; see transport.hpp.
#include "dist/transport.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

namespace tessera::dist {
namespace {

struct Group {
  std::vector<Message> messages;
  Group* next = nullptr;
};

// Groups that failures left incomplete. The transport may still read and write them, and nobody will know when it has
// ended: their memory is never freed, and stays in reach of leak checkers.
constinit std::atomic<Group*> abandoned = nullptr;

class CallbackCommunicator : public Communicator {
 public:
  explicit CallbackCommunicator(const tessera_transport& transport) : t(transport) {
    if (t.own_thread) thread.emplace();
  }
  ~CallbackCommunicator() override {
    abandon_incomplete();
    if (t.destroy) t.destroy(t.context);
  }

  int rank() const override { return t.rank; }
  int size() const override { return t.ranks; }
  Worker* worker() override { return thread ? &*thread : nullptr; }

  void start(std::span<const Message> messages) override {
    group->messages.assign(messages.begin(), messages.end());
    done.assign(messages.size(), 0);
    std::vector<tessera_message> views;
    for (const Message& m : group->messages) views.push_back({m.bytes->data(), m.bytes->size(), m.peer, m.send});
    char sentence[TESSERA_SENTENCE_BYTES] = "";
    require(t.start(t.context, views.data(), static_cast<std::int64_t>(views.size()), sentence), sentence);
  }

  std::vector<bool> test() override {
    char sentence[TESSERA_SENTENCE_BYTES] = "";
    require(t.test(t.context, done.data(), static_cast<std::int64_t>(done.size()), sentence), sentence);
    return std::vector<bool>(done.begin(), done.end());
  }

  std::optional<std::string> notice() override {
    char sentence[TESSERA_SENTENCE_BYTES] = "";
    if (!t.notice || !t.notice(t.context, sentence)) return {};
    return text(sentence);
  }

  void fail(const std::string& sentence) noexcept override {
    if (t.fail) t.fail(t.context, sentence.c_str());
    abandon_incomplete();
  }

 private:
  // After a failure, here or on another rank. Needs no memory.
  void abandon_incomplete() noexcept {
    if (group && std::find(done.begin(), done.end(), 0) != done.end()) {
      Group* last = group.release();
      last->next = abandoned.load();
      while (!abandoned.compare_exchange_weak(last->next, last)) {
      }
    }
    done.clear();
  }

  static std::string text(char* sentence) {
    sentence[TESSERA_SENTENCE_BYTES - 1] = 0;
    return sentence;
  }

  static void require(tessera_status status, char* sentence) {
    if (status == TESSERA_OK) return;
    if (status == TESSERA_OUT_OF_MEMORY) throw std::bad_alloc();
    const std::string said = text(sentence);
    throw Error(TESSERA_COMMUNICATION_ERROR, said.empty() ? "the transport has failed, and did not say why" : said);
  }

  tessera_transport t;
  std::unique_ptr<Group> group = std::make_unique<Group>();
  std::vector<std::uint8_t> done;
  std::optional<Worker> thread;
};

}  // namespace

std::shared_ptr<Communicator> communicator_over(const tessera_transport& transport) {
  return std::make_shared<CallbackCommunicator>(transport);
}

}  // namespace tessera::dist
