// What the compiler must know to specialise a kernel of the ladder: one structural value, written into the generated
// unit. Lengths, strides, scale and window widths are Params: they never compile a new kernel. Shared by host and
// device text.
#pragma once

#include "math/types.hpp"

namespace tessera::simt {

enum class Element { f32, f16, bf16 };

struct Config {
  int threads = 128;
  int D = 64, Dv = 64;
  Element element = Element::f32;  // q, k, v
  Element o = Element::f32, d_o = Element::f32;
  Element dq = Element::f32, dk = Element::f32, dv = Element::f32;

  constexpr bool operator==(const Config&) const = default;
};

}  // namespace tessera::simt
