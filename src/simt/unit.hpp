// The generated text of a kernel: which file, which function, which configuration. All there is to read of a compiled
// kernel besides the files it includes. Included by src/simt and the compile gate.
#pragma once

#include <string>

#include "simt/config.hpp"

namespace tessera::simt {

inline constexpr const char* kernel_symbol = "tessera_kernel";

// A device function template and its parameter struct.
struct Function {
  const char* file;        // "simt/kernel/naive_forward.cuh"
  const char* name;        // "naive_forward"
  const char* parameters;  // "ForwardParams"
};

std::string unit_text(const Function& function, const Config& config);

// As device text writes them.
std::string spelled(Element element);
const char* spelled(bool value);

}  // namespace tessera::simt
