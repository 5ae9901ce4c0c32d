// Loading and launching of steps; see launches.hpp.
#include "simt/launches.hpp"

#include "core/failure.hpp"

namespace tessera::simt {

Launches::Launches(const std::vector<Step>& steps, int device) {
  for (const Step& step : steps) {
    const cuda::LoadedKernel* kernel = cuda::find_kernel(unit_text(step.function, step.config), kernel_symbol, device);
    if (step.shared_bytes > 0) kernel->allow_shared(static_cast<unsigned>(step.shared_bytes));
    list.push_back({kernel, step});
  }
}

void Launches::run(void* params, cuda::StreamHandle stream) const {
  void* arguments[] = {params};
  for (const auto& [kernel, step] : list)
    kernel->launch({.grid = {static_cast<unsigned>(step.blocks)},
                    .block = {static_cast<unsigned>(step.config.threads)},
                    .shared_bytes = static_cast<unsigned>(step.shared_bytes),
                    .stream = stream},
                   arguments);
}

std::string Launches::describe() const {
  std::string out;
  for (const auto& [kernel, step] : list)
    out += text("\n               ", step.function.name, ": ", step.blocks, " blocks x ", step.config.threads,
                " threads, ", kernel->registers(), " registers, ", step.shared_bytes, " bytes of shared memory");
  return out;
}

}  // namespace tessera::simt
