// Which units the GPU kernels' plans need, asked of the same planners as a real call, but without a GPU.
// Included by the compile gate, by `tessera pack` and by the program that packs at build time; not part of the library.
#pragma once

#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cuda/device.hpp"
#include "cuda/jit/pack.hpp"

namespace tessera::api {

// What one kernel of the library launches for a problem, or why it refuses it.
struct GpuPlan {
  std::string kernel, family;  // "hopper_one_pass", "hopper"
  std::vector<cuda::NamedUnit> units;
  std::string reason;
};

// One for each GPU kernel, best first: the first without a reason is what a call gets.
std::vector<GpuPlan> gpu_plans(const Problem& problem, const cuda::Target& target);

struct HeadDims {
  std::int64_t D, Dv;
};
std::string text_of(HeadDims dims);  // "64", "192/128"

// Aligned, full attention without options on a GPU, with everything in one type.
Problem plain_problem(Pass pass, Type type, HeadDims dims);

// What most calls need: plain problems, full and causal, forward and backward.
inline const std::vector<Type> common_types{Type::f32, Type::f16, Type::bf16};
inline const std::vector<HeadDims> common_dims{{64, 64}, {128, 128}};
inline const char* const common_architecture = "sm_90a";
std::vector<cuda::NamedUnit> plain_units(const cuda::Target& target, const std::vector<Type>& types,
                                         const std::vector<HeadDims>& dims);

}  // namespace tessera::api
