// SPDX-License-Identifier: Apache-2.0
// The last error sentence of each thread; see last_error.hpp.
#include "api/last_error.hpp"

#include <string>

#include "core/per_thread.hpp"

namespace tessera::api {
namespace {

// This thread's last error sentence: a literal, or its Message. The TLS model is initial-exec. With the default model,
// in a library loaded by dlopen, a thread's first access allocates its TLS block lazily, and glibc ends the process
// when that fails. One initial-exec variable makes the whole block static, also the variables of the C++ runtime in it,
// which every exception needs.
[[gnu::tls_model("initial-exec")]] constinit thread_local const char* sentence = "";

struct Message {
  std::string text;
  ~Message() { sentence = ""; }  // at thread exit
};

}  // namespace

const char* last_sentence() noexcept { return sentence; }

tessera_status fail_with(tessera_status status, const char* literal) noexcept {
  sentence = literal;
  return status;
}

tessera_status fail(tessera_status status, const char* message) noexcept {
  static constinit PerThread<Message> messages;
  try {
    Message* kept = messages.get();
    if (!kept) throw std::bad_alloc();
    kept->text = message;
    return fail_with(status, kept->text.c_str());
  } catch (...) {
    return fail_with(status, "there was no memory for the sentence that says what is wrong");
  }
}

}  // namespace tessera::api
