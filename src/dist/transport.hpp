// SPDX-License-Identifier: Apache-2.0
// A communicator over the five functions of the C ABI's tessera_transport. Included by the C ABI and by tests of
// transports. Implements docs/scale_out.md, "Communicators".
#pragma once

#include "dist/communicator.hpp"
#include "tessera/dist.h"

namespace tessera::dist {

// Takes the transport's context over.
std::shared_ptr<Communicator> communicator_over(const tessera_transport& transport);

}  // namespace tessera::dist
