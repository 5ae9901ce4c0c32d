// The CPU backend's kernels; see kernels.hpp.
#include "cpu/kernels.hpp"

namespace tessera::cpu {
std::vector<const Kernel*> kernels() { return {}; }
std::string processor() { return "unknown"; }
std::string instruction_sets() { return "none"; }
}  // namespace tessera::cpu
