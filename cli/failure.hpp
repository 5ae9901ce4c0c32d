// SPDX-License-Identifier: Apache-2.0
// The command line's own exception, for errors outside the library, such as an unreadable file. Included by everything
// in cli/ that can fail; cli/main.cpp prints it. The library's own errors are tessera::Error.
#pragma once

#include <stdexcept>

namespace tessera::cli {

// what() is one sentence for the user, with its full stop.
class Failure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace tessera::cli
