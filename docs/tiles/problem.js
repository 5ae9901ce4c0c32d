// SPDX-License-Identifier: Apache-2.0
// The question that the page asks: sizes, sequences, heads, mask and inputs, and its answer without tiles.
// A classic script, because browsers load no modules from file:// addresses: it adds its functions to `Tiles`. Read by
// steps.js, by the views and, in node, by tests/site. Numbers are float64; inputs are multiples of 1/4, so that every
// floating-point type of the library holds them exactly. Implements docs/algorithm.md, "Mask", "Scores", "Backward".
"use strict";
((Tiles) => {
  const LIMITS = { n: [1, 32], d: [1, 8], br: [1, 8], bc: [1, 8], window: [0, 31], seed: [1, 99] };
  const HEADS = ["1/1", "2/2", "2/1", "4/2", "4/1"];
  const DEFAULTS = {
    n: 16, d: 4, br: 4, bc: 4, causal: true, left: -1, right: -1, lengths: "", heads: "1/1", seed: 1,
  };

  const clamp = (x, [low, high]) => Math.min(high, Math.max(low, Math.round(x)));

  // "5, 0, 7" as numbers; whatever is left of n tokens becomes a last sequence, whatever is too much is cut off.
  function lengthsOf(text, n) {
    const lengths = [];
    let left = n;
    for (const word of text.split(/[\s,+]+/).filter(Boolean)) {
      const length = Math.min(left, Math.max(0, Math.floor(Number(word)) || 0));
      lengths.push(length);
      left -= length;
    }
    if (left > 0 || lengths.length === 0) lengths.push(left);
    return lengths;
  }

  // From the settings of the page to a problem; whatever is out of range is brought into it.
  function makeProblem(settings) {
    const s = { ...DEFAULTS, ...settings };
    const identity = s.seed === "identity";
    const n = identity ? 4 : clamp(s.n, LIMITS.n), d = identity ? 4 : clamp(s.d, LIMITS.d);
    const heads = HEADS.includes(s.heads) ? s.heads : "1/1";
    const [hq, hk] = identity ? [1, 1] : heads.split("/").map(Number);
    const bound = (x) => (x < 0 ? -1 : clamp(x, LIMITS.window));
    const sequences = [];
    let begin = 0;
    for (const length of identity ? [4] : lengthsOf(s.lengths, n)) {
      sequences.push({ index: sequences.length, begin, length });
      begin += length;
    }
    const problem = {
      n, d, hq, hk, sequences, identity, group: hq / hk, scale: 1 / Math.sqrt(d),
      br: clamp(s.br, LIMITS.br), bc: clamp(s.bc, LIMITS.bc),
      causal: Boolean(s.causal), left: bound(s.left), right: bound(s.right),
      seed: identity ? 0 : clamp(s.seed, LIMITS.seed),
    };
    return Object.assign(problem, { band: bandOf(problem) });
  }

  // The band low <= j - i <= high of src/math/mask.hpp. Queries and keys of a sequence have one length: off = 0.
  function bandOf({ causal, left, right }) {
    const high = right >= 0 ? right : Infinity;
    return { low: left >= 0 ? -left : -Infinity, high: causal ? Math.min(high, 0) : high };
  }

  const visible = ({ band }, i, j) => band.low <= j - i && j - i <= band.high;

  // Ranges are [begin, end) inside a sequence.
  function tileClass({ band }, rows, keys) {
    const smallest = keys.begin - (rows.end - 1), largest = keys.end - 1 - rows.begin;
    if (largest < band.low || smallest > band.high) return "empty";
    return band.low <= smallest && largest <= band.high ? "full" : "partial";
  }

  function cut(length, size) {
    const ranges = [];
    for (let begin = 0; begin < length; begin += size) {
      ranges.push({ index: ranges.length, begin, end: Math.min(length, begin + size), size: 0 });
      ranges.at(-1).size = ranges.at(-1).end - begin;
    }
    return ranges;
  }
  const queryTiles = (problem, sequence) => cut(sequence.length, problem.br);
  const keyTiles = (problem, sequence) => cut(sequence.length, problem.bc);

  // mulberry32: a small generator whose integers are the same in every browser.
  function generator(seed) {
    let state = (seed * 0x9e3779b9) >>> 0;
    return () => {
      state = (state + 0x6d2b79f5) >>> 0;
      let t = Math.imul(state ^ (state >>> 15), 1 | state);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return (t ^ (t >>> 14)) >>> 0;
    };
  }

  const zeros = (rows, width) => Array.from({ length: rows }, () => new Float64Array(width));

  // [head][token][d]. The identity is the 4 x 4 case of docs/algorithm.md.
  function makeInputs(problem) {
    const { n, d, hq, hk, seed, identity } = problem;
    const next = generator(seed);
    const matrix = () => zeros(n, d).map((row, i) =>
      row.map((_, e) => (identity ? Number(i === e) : ((next() >>> 8) % 17 - 8) / 4)));
    const heads = (count) => Array.from({ length: count }, matrix);
    return { Q: heads(hq), K: heads(hk), V: heads(hk), dO: heads(hq) };
  }

  const dot = (x, y) => x.reduce((sum, value, e) => sum + value * y[e], 0);
  const kvHead = (problem, h) => Math.floor(h / problem.group);

  // Attention and its gradients, row by row and without tiles, equations (1) to (13): what the tiles must come to.
  function direct(problem, { Q, K, V, dO }) {
    const { n, d, hq, hk, scale, sequences } = problem;
    const make = (heads) => Array.from({ length: heads }, () => zeros(n, d));
    const out = { O: make(hq), LSE: zeros(hq, n), delta: zeros(hq, n), dQ: make(hq), dK: make(hk), dV: make(hk) };
    for (let h = 0; h < hq; ++h) {
      const kv = kvHead(problem, h);
      for (const { begin, length } of sequences) {
        for (let i = 0; i < length; ++i) {
          const t = begin + i, keys = [];
          for (let j = 0; j < length; ++j) if (visible(problem, i, j)) keys.push(begin + j);
          const s = keys.map((j) => scale * dot(Q[h][t], K[kv][j])), m = Math.max(...s);
          const lse = m + Math.log(s.reduce((sum, x) => sum + Math.exp(x - m), 0));
          const p = s.map((x) => Math.exp(x - lse));
          out.LSE[h][t] = lse;
          keys.forEach((j, at) => V[kv][j].forEach((v, e) => (out.O[h][t][e] += p[at] * v)));
          const delta = (out.delta[h][t] = dot(dO[h][t], out.O[h][t]));
          keys.forEach((j, at) => {
            const ds = p[at] * (dot(dO[h][t], V[kv][j]) - delta);
            for (let e = 0; e < d; ++e) {
              out.dV[kv][j][e] += p[at] * dO[h][t][e];
              out.dQ[h][t][e] += scale * ds * K[kv][j][e];
              out.dK[kv][j][e] += scale * ds * Q[h][t][e];
            }
          });
        }
      }
    }
    return out;
  }

  Object.assign(Tiles, {
    LIMITS, HEADS, DEFAULTS, makeProblem, lengthsOf, bandOf, visible, tileClass, queryTiles, keyTiles, makeInputs,
    direct, zeros, dot, kvHead,
  });
})((globalThis.Tiles ??= {}));
