// The last file of a target region: scratch sizes and the table that the instruction set exports.
// Included by cpu/isa/*.cpp; TESSERA_ISA is the set's name.
#pragma once

HWY_INLINE Int64 scratch_bytes(const Problem& p) {
  Scratch scratch(nullptr);
  if (p.pass == Pass::forward) {
    const ForwardScratch layout(p.D, p.Dv, scratch);
    (void)layout;
  } else {
    const BackwardScratch layout(p.D, p.Dv, scratch);
    (void)layout;
    scratch.take(block_k * block_q);  // bias_gradient's sums
  }
  return scratch.bytes();
}
