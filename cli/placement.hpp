// SPDX-License-Identifier: Apache-2.0
// Arrays of a command on the device where it runs: copied in before, copied out after, with the workspace that a GPU's
// caller has to bring. On the CPU nothing is copied. Included by cli/run.cpp.
// Implements the command `run` of docs/tour.md.
#pragma once

#include <map>
#include <memory>

#include "cases/device.hpp"
#include "cli/array.hpp"
#include "tessera/types.hpp"

namespace tessera::cli {

class Placement {
 public:
  explicit Placement(Device where) : device(where) {}

  // A view for the library; without data while the array has no copy on its device, which is enough to plan with.
  Tensor view(const Array& array) const;
  // The device's own tag on a view that has no array yet.
  Tensor planned(Tensor view) const;

  void copy_in(const Array& array);  // arrays stay where they are as long as this lives
  void copy_out(Array& array) const;

  // The execution with a workspace of so many bytes on the device.
  Execution with_workspace(Execution execution, std::size_t bytes);
  // Until what was enqueued is done.
  void wait() const;

 private:
  bool on_host() const { return device.type == DeviceType::cpu; }

  Device device;
  std::map<const Array*, std::unique_ptr<cases::DeviceMemory>> copies;
  std::unique_ptr<cases::DeviceMemory> workspace;
};

}  // namespace tessera::cli
