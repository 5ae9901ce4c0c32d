// The only file that names the backends; see kernels.hpp.
#include "api/kernels.hpp"

#include <vector>

#include "core/once.hpp"
#include "cpu/kernels.hpp"
#include "reference/kernel.hpp"
#include "simt/kernels.hpp"
#include "sm90/kernels.hpp"

namespace tessera::api {

std::span<const Kernel* const> kernels() {
  static constinit Once<const std::vector<const Kernel*>> list;
  return list.get([] {
    std::vector<const Kernel*> all = sm90::kernels();
    for (const Kernel* kernel : simt::kernels()) all.push_back(kernel);
    for (const Kernel* kernel : cpu::kernels()) all.push_back(kernel);
    all.push_back(&reference::kernel());
    return all;
  });
}

}  // namespace tessera::api
