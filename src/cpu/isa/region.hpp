// Opens one instruction set's target region and namespace, and compiles the kernels inside. Included by cpu/isa/*.cpp,
// once each, after they have named the set. Headers that are shared with the rest of the program come first: what they
// define must not be compiled for this set, or the linker could pick that copy for everyone.
#include "cpu/job.hpp"
#include "hwy/highway.h"
#include "math/softmax.hpp"
//
#include "hwy/contrib/math/math-inl.h"

#if defined(__clang__)
#define TESSERA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TESSERA_UNROLL _Pragma("GCC unroll 8")
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::HWY_NAMESPACE {

#include "cpu/kernel/simd.hpp"
//
#include "cpu/kernel/product.hpp"
//
#include "cpu/kernel/tile.hpp"
//
#include "cpu/kernel/scores.hpp"
//
#include "cpu/kernel/forward.hpp"
//
#include "cpu/kernel/backward.hpp"
//
#include "cpu/kernel/bias_gradient.hpp"
//
#include "cpu/kernel/table.hpp"

}  // namespace tessera::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

namespace tessera::cpu {

#define TESSERA_TEXT_OF(x) #x
#define TESSERA_TEXT(x) TESSERA_TEXT_OF(x)
const Isa TESSERA_ISA{.name = TESSERA_TEXT(TESSERA_ISA),
                      .lanes = HWY_NAMESPACE::lanes,
                      .scratch_bytes = HWY_NAMESPACE::scratch_bytes,
                      .forward = HWY_NAMESPACE::forward,
                      .prepare = HWY_NAMESPACE::prepare_block,
                      .key_group = HWY_NAMESPACE::backward_key_group,
                      .finish_dq = HWY_NAMESPACE::finish_dq_block,
                      .bias_gradient = HWY_NAMESPACE::bias_gradient};

}  // namespace tessera::cpu
