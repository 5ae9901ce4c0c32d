// SPDX-License-Identifier: Apache-2.0
// How the library's inside reports an error: one exception type with a status and a sentence.
// It never leaves the library: api/c_api.cpp turns it into a status code and a per-thread message.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

#include "tessera/tessera.h"

namespace tessera {

class Failure : public std::runtime_error {
 public:
  Failure(tessera_status status, const std::string& message) : std::runtime_error(message), status(status) {}
  tessera_status status;
};

// Text from pieces: text("k: head_dim is ", 96, " but q has ", 128).
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.exceptions(std::ios::badbit);  // or the text would end where memory ran out
  (out << ... << parts);
  return out.str();
}

// An argument breaks a rule of the contract. The sentence names the argument, its value and the rule.
template <class... Parts>
[[noreturn]] void invalid(const Parts&... parts) {
  throw Failure(TESSERA_INVALID_ARGUMENT, text(parts...));
}

}  // namespace tessera
