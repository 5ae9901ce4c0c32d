// SPDX-License-Identifier: Apache-2.0
// P and dS of a tile of scores. Included by the backward kernels of vk_tiled. Implements docs/algorithm.md, "Backward,
// tile by tile".
#include "pair.glsl"

// From products S = rows . columns^T of Q and K, and dP of dO and V, to P times the dropout factor in `weights` and to
// dS in `gradients`. Everybody must be done with both. A loop, not 16 copies of it: scores have many options.
void pair_gradients(BackwardParams p, DeviceSequence s, HeadScores head, int64_t i0, int64_t j0, bool rows_are_keys,
                    float S[16], float dP[16], bool before_softcap) {
  const TileBand band = band_of(s, i0, j0);
  [[unroll]] for (int n = 0; n < 16; ++n) weights[own_place(n)] = S[n], gradients[own_place(n)] = dP[n];
  [[dont_unroll]] for (int n = 0; n < 16; ++n) {
    const int row = own_row(n / 4), column = own_column(n % 4), at = own_place(n);
    const int query = rows_are_keys ? column : row, key = rows_are_keys ? row : column;
    float P, dS;
    pair_gradient(p, s, head, band, i0, j0, query, key, weights[at], gradients[at], before_softcap, P, dS);
    weights[at] = P, gradients[at] = dS;
  }
}
