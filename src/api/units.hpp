// SPDX-License-Identifier: Apache-2.0
// Enumerates the translation units that GPU plans need, for ahead-of-time compilation. It asks the same planners as a
// real call, but needs no GPU. Included by the compile gate, by `tessera pack` and by the program that packs at build
// time; not part of the library.
#pragma once

#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/pack.hpp"

namespace tessera::api {

// The units that one GPU kernel launches for a problem, or why it refuses the problem.
struct GpuPlan {
  std::string kernel, family;  // "hopper_one_pass", "hopper"
  std::vector<cuda::NamedUnit> units;
  std::string reason;
  bool by_name = false;  // only calls that ask for it get it
};

// One per GPU kernel, best first: dispatch takes the first without a reason that is not by name.
std::vector<GpuPlan> gpu_plans(const Problem& problem, const cuda::Target& target);

struct HeadDims {
  std::int64_t D, Dv;
};
std::string text_of(HeadDims dims);  // "64", "192/128"

// A GPU problem without mask or other options: aligned pointers, all tensors of one type.
Problem plain_problem(Pass pass, Type type, HeadDims dims);

// The common kernels, which are packed into the library: plain problems, full and causal, forward and backward.
inline const std::vector<Type> common_types{Type::f32, Type::f16, Type::bf16};
inline const std::vector<HeadDims> common_dims{{64, 64}, {128, 128}};
inline const char* const common_architecture = "sm_90a";
std::vector<cuda::NamedUnit> plain_units(const cuda::Target& target, const std::vector<Type>& types,
                                         const std::vector<HeadDims>& dims);

}  // namespace tessera::api
