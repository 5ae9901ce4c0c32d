// SPDX-License-Identifier: Apache-2.0
// Implements cli/placement.hpp.
// Copies run on the default stream of the device, as the calls do.
#include "cli/placement.hpp"

#include "cli/gpu.hpp"

namespace tessera::cli {

Tensor Placement::planned(Tensor view) const {
  if (!on_host()) view.device = device;
  return view;
}

Tensor Placement::view(const Array& array) const {
  Tensor t = planned(array.view());
  if (on_host() || !array) return t;
  const auto copy = copies.find(&array);
  t.data = copy == copies.end() ? nullptr : copy->second->data();
  return t;
}

void Placement::copy_in(const Array& array) {
  if (on_host() || !array) return;
  auto& copy = copies[&array] = std::make_unique<cases::DeviceMemory>(device, array.bytes());
  copy->write(array.data<std::byte>(), array.bytes());
}

void Placement::copy_out(Array& array) const {
  if (const auto copy = copies.find(&array); copy != copies.end())
    copy->second->read(array.data<std::byte>(), array.bytes());
}

Execution Placement::with_workspace(Execution execution, std::size_t bytes) {
  if (on_host() || bytes == 0) return execution;
  workspace.reset();  // the earlier one first: they need not fit beside each other
  workspace = std::make_unique<cases::DeviceMemory>(device, bytes);
  execution.workspace = workspace->data(), execution.workspace_bytes = workspace->size();
  return execution;
}

void Placement::wait() const {
  if (device.type == DeviceType::cuda) wait_for_gpu();
}

}  // namespace tessera::cli
