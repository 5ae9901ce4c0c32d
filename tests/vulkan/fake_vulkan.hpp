// SPDX-License-Identifier: Apache-2.0
// A Vulkan that is not there: a libvulkan.so.1 that computes nothing, counts what is made and freed, and fails on
// demand. Included by fake_vulkan.cpp, which is that library, and by vulkan_faults_test.cpp, which links it, so that
// the library's dlopen finds it. docs/testing.md.
#pragma once

namespace tessera::test {

// What the fake does. A test changes it between calls.
struct FakeVulkan {
  bool starts = true;  // vkCreateInstance succeeds
  int devices = 1;
  const char* missing = "";  // a feature that the device lacks
  bool computes = true;      // its queue family takes compute work
  bool matrices = false;     // it has cooperative matrices, of f16 alone
  unsigned lanes = 32;       // of a subgroup
  unsigned widest = 1024;    // workgroup, along its first dimension
  int driver = 0;            // its VkDriverId
  unsigned driver_version = 0;
  unsigned shape[3] = {16, 16, 16};
  bool pending = false;  // what was submitted is under way
  long fail_at = 0;      // the call, counted from 1, that fails; 0: none
  int fail_with = 0;     // with this VkResult
  long calls = 0;        // that can fail
  long alive = 0;        // objects made and not freed, the library's devices left out
  long devices_alive = 0;
  long submissions = 0;
  unsigned long parameters = 0;  // the address that the last dispatch was given
  unsigned memory_type = 0;      // of the last memory: see memories() there
  long wrong_copies = 0;         // of nothing, or without a buffer: not allowed
  unsigned family = 0;           // of the queues that the last submission's commands were recorded for
  unsigned long cached = 0;      // bytes of pipelines that the last cache began with
};
extern "C" FakeVulkan* tessera_fake_vulkan();

}  // namespace tessera::test
