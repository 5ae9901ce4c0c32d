// SPDX-License-Identifier: Apache-2.0
// The end of the C ABI that turns exceptions into status codes, and this thread's last error sentence.
// Included by the files that define the C ABI. Implements tessera.h, "Rules of the ABI".
#pragma once

#include <exception>
#include <new>
#include <stdexcept>

#include "core/failure.hpp"
#include "tessera/tessera.h"

namespace tessera::api {

const char* last_sentence() noexcept;  // "" if no call of this thread has failed

tessera_status fail(tessera_status status, const char* message) noexcept;
tessera_status fail_with(tessera_status status, const char* literal) noexcept;  // of static lifetime: no allocation

// Runs the body of a call; no exception leaves it.
template <class Body>
tessera_status guarded(Body body) noexcept {
  try {
    body();
    return TESSERA_OK;
  } catch (const Failure& failure) {
    return fail(failure.status, failure.what());
  } catch (const std::bad_alloc&) {
    return fail_with(TESSERA_OUT_OF_MEMORY, "out of memory");
  } catch (const std::length_error&) {  // a request larger than any memory
    return fail_with(TESSERA_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& error) {
    return fail(TESSERA_INTERNAL, error.what());
  } catch (...) {
    return fail_with(TESSERA_INTERNAL, "unknown internal error");
  }
}

}  // namespace tessera::api
