// SPDX-License-Identifier: Apache-2.0
// Opens one instruction set's target region and namespace, and compiles the kernels inside. Included by cpu/isa/*.cpp,
// once each, after they have named the set. Headers that are shared with the rest of the program come first: what they
// define must not be compiled for this set, or the linker could pick that copy for everyone.
#include "cpu/kernel_jobs.hpp"
#include "hwy/highway.h"
#include "math/softmax.hpp"
//
#include "hwy/contrib/math/math-inl.h"

#if defined(__clang__)
#define TESSERA_UNROLL _Pragma("clang loop unroll(full)")
#define TESSERA_UNROLL_LANES TESSERA_UNROLL
#else
#define TESSERA_UNROLL _Pragma("GCC unroll 8")
#define TESSERA_UNROLL_LANES _Pragma("GCC unroll 16")  // a turn for each lane of the widest vectors
#endif

#ifndef TESSERA_NAMESPACE
#define TESSERA_NAMESPACE HWY_NAMESPACE
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::cpu::TESSERA_NAMESPACE {

#include "cpu/kernel/simd.hpp"
//
#include "math/score_rule.hpp"
//
#include "cpu/kernel/product.hpp"

// What the width of a product is a multiple of.
#if defined(TESSERA_MATRIX_UNIT)
inline constexpr Int64 width_step = 32;
#else
inline constexpr Int64 width_step = lanes;
#endif

#include "cpu/kernel/tile.hpp"
//
#include "cpu/kernel/scores.hpp"
//
#include "cpu/kernel/vector_products.hpp"
//
#include "cpu/kernel/forward.hpp"
//
#if defined(TESSERA_MATRIX_UNIT)
#include "cpu/kernel/matrix_unit.hpp"
#endif
//
#include "cpu/kernel/decode_numbers.hpp"
#if defined(TESSERA_DOT_PRODUCTS)
#include "cpu/kernel/dot_unit.hpp"
//
#include "cpu/kernel/decode_pairs.hpp"
#endif
#include "cpu/kernel/decode_ahead.hpp"
//
#include "cpu/kernel/decode_products.hpp"
//
#include "cpu/kernel/decode_scores.hpp"
//
#include "cpu/kernel/decode.hpp"
//
#include "cpu/kernel/backward.hpp"
//
#include "cpu/kernel/bias_gradient.hpp"
//
#if defined(TESSERA_MATRIX_UNIT)
#include "cpu/kernel/matrix_operands.hpp"
//
#if defined(TESSERA_DOT_PRODUCTS)
#include "cpu/kernel/dot_multiply.hpp"
#else
#include "cpu/kernel/matrix_multiply.hpp"
#endif
//
#include "cpu/kernel/matrix_forward.hpp"
//
#include "cpu/kernel/matrix_backward.hpp"
//
#if defined(TESSERA_DOT_PRODUCTS)
#include "cpu/kernel/dot_table.hpp"
#else
#include "cpu/kernel/matrix_table.hpp"
#endif
#else
#include "cpu/kernel/table.hpp"
#endif

}  // namespace tessera::cpu::TESSERA_NAMESPACE
HWY_AFTER_NAMESPACE();

namespace tessera::cpu {

#define TESSERA_TEXT_OF(x) #x
#define TESSERA_TEXT(x) TESSERA_TEXT_OF(x)
const Isa TESSERA_ISA{.name = TESSERA_TEXT(TESSERA_ISA),
                      .lanes = TESSERA_NAMESPACE::lanes,
                      .unit = TESSERA_NAMESPACE::unit,
                      .pieces = TESSERA_NAMESPACE::pieces,
                      .panel_bytes = TESSERA_NAMESPACE::panel_bytes,
                      .pack_panel = TESSERA_NAMESPACE::pack_panel,
                      .scratch_bytes = TESSERA_NAMESPACE::scratch_bytes,
                      .forward = TESSERA_NAMESPACE::forward,
                      .decode = TESSERA_NAMESPACE::decode,
                      .finish_decode = TESSERA_NAMESPACE::finish_decode,
                      .image_rows = TESSERA_NAMESPACE::image_rows,
                      .prepare = TESSERA_NAMESPACE::prepare_block,
                      .key_span = TESSERA_NAMESPACE::key_span,
                      .finish_dq = TESSERA_NAMESPACE::finish_dq_block,
                      .bias_gradient = TESSERA_NAMESPACE::bias_gradient};

}  // namespace tessera::cpu
