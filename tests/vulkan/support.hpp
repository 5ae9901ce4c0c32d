// SPDX-License-Identifier: Apache-2.0
// What the Vulkan tests share: the skip where there is no driver. Included by the tests in this folder.
// Implements docs/testing.md.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tessera/vulkan.h"
#include "tests/support/support.hpp"

namespace tessera::test {

inline constexpr Device vulkan_device{DeviceType::vulkan, 0};

// Why there is nothing to test here; empty: there is.
inline std::string no_vulkan() {
  std::int32_t count = 0;
  return tessera_vulkan_device_count(&count) == TESSERA_OK ? "" : tessera_last_error();
}

class Vulkan : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = no_vulkan(); !reason.empty()) GTEST_SKIP() << "no Vulkan device to test: " << reason;
  }
};

template <class Parameter>
class VulkanWith : public Vulkan, public testing::WithParamInterface<Parameter> {};

}  // namespace tessera::test
