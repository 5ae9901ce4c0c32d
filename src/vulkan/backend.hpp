// SPDX-License-Identifier: Apache-2.0
// The Vulkan backend as the rest of the library sees it: kernels, devices, memory. No header of Vulkan's is needed
// here. Implemented by src/vulkan, or by absent.cpp where the tools to build it were missing. Included by src/api only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "core/kernel.hpp"
#include "tessera/vulkan.h"

namespace tessera::vulkan {

std::span<const Kernel* const> kernels();  // best first

// "vulkan:0 llvmpipe (LLVM 15.0.6, 256 bits), Vulkan 1.3.230", or "none: " and why.
std::string devices_text();

// The library's own devices, and memory there. They throw Failure.
int device_count();
void* allocate(int device, std::size_t bytes);
void free_memory(int device, void* data);
void upload(int device, void* data, const void* host, std::size_t bytes);
void download(int device, void* host, const void* data, std::size_t bytes);

// Frees what was made on a caller's device.
void release(const tessera_vulkan_queue& queue);

}  // namespace tessera::vulkan
