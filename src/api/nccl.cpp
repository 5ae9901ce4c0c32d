// SPDX-License-Identifier: Apache-2.0
// The C ABI of messages over NCCL. See tessera/nccl.h.
#include "tessera/nccl.h"

#include <cstring>
#include <utility>

#include "api/last_error.hpp"
#include "api/structs.hpp"
#include "nccl/transport.hpp"

using namespace tessera;
using namespace tessera::api;

extern "C" {

void tessera_nccl_args_init(tessera_nccl_args* s) {
  zero(s);
  s->ranks = 1;
  s->timeout = 300;
}

tessera_status tessera_nccl_unique_id(void* id) {
  return guarded([&] {
    if (!id) invalid("id: is NULL; it is required");
    nccl::UniqueId made{};
    nccl::check(nccl::library().get_unique_id(&made), "ncclGetUniqueId");
    std::memcpy(id, made.bytes, TESSERA_NCCL_ID_BYTES);
  });
}

tessera_status tessera_nccl_communicator(const tessera_nccl_args* given, tessera_communicator** communicator) {
  tessera_status status = TESSERA_OK;
  const tessera_status made = guarded([&] {
    if (!communicator) invalid("communicator: is NULL; it is required");
    const tessera_nccl_args args = require_struct("nccl_args", given, tessera_nccl_args_init);
    if (!args.unique_id == !args.comm) invalid("unique_id and comm: exactly one of them must be given");
    if (args.unique_id && args.ranks < 1) invalid("ranks: is ", args.ranks, "; must be positive");
    if (args.unique_id && (args.rank < 0 || args.rank >= args.ranks))
      invalid("rank: is ", args.rank, "; must be from 0 to ", args.ranks - 1);
    if (!(args.timeout > 0)) invalid("timeout: is ", args.timeout, "; must be a positive number of seconds");
    std::unique_ptr<Transport> transport;
    if (args.unique_id) {
      nccl::UniqueId id;
      std::memcpy(id.bytes, args.unique_id, TESSERA_NCCL_ID_BYTES);
      transport = nccl::transport_of(id, args.rank, args.ranks, args.device, args.timeout);
    } else {
      transport = nccl::transport_over(static_cast<nccl::Comm>(args.comm));
    }
    const tessera_transport t = detail::to_c(std::move(transport));
    status = tessera_communicator_make(&t, communicator);
    if (status != TESSERA_OK) t.destroy(t.context);
  });
  return made == TESSERA_OK ? status : made;
}

}  // extern "C"
