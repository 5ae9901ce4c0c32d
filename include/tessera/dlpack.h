/* SPDX-License-Identifier: Apache-2.0 */
/* DLPack's tensors as Tessera's: a view of the same memory, from C99 and C++20. DLPack's own header is not needed:
 * what is passed is the address of a DLTensor, with which a DLManagedTensor begins (in a DLManagedTensorVersioned it is
 * the member dl_tensor). Who exported the tensor keeps it; the view is valid as long as it is. */
#ifndef TESSERA_DLPACK_H
#define TESSERA_DLPACK_H

#include "tessera/tessera.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Fills in *tensor, its size included. Refused, with nothing written: what a tessera_tensor has no place for (more than
 * 4 dimensions, vectors of several lanes, types that are not in tessera_type, devices other than CPU, CUDA and Vulkan,
 * an offset that is no whole number of elements). Pinned host memory counts as the CPU's, managed memory as CUDA's,
 * booleans as TESSERA_U8. A DLTensor without strides is contiguous. */
TESSERA_API tessera_status tessera_tensor_from_dlpack(const void* dl_tensor, tessera_tensor* tensor);

#ifdef __cplusplus
}

#include "tessera/tessera.hpp"

namespace tessera {

/* const void*: the address of a DLTensor, as above. */
inline Tensor from_dlpack(const void* dl_tensor) {
  tessera_tensor view;
  detail::check(tessera_tensor_from_dlpack(dl_tensor, &view));
  Tensor t;
  t.data = view.data, t.type = static_cast<Type>(view.type), t.ndim = view.ndim;
  t.device = {static_cast<DeviceType>(view.device_type), view.device_id};
  for (std::size_t i = 0; i < 4; ++i) t.shape[i] = view.shape[i], t.strides[i] = view.strides[i];
  return t;
}

}  // namespace tessera
#endif

#endif
