// SPDX-License-Identifier: Apache-2.0
// The passes in numbers: every visit of walk.js with what fast memory holds after it, what slow memory holds, and the
// bytes that were moved until then. Adds `makeSteps` and `answers` to `Tiles`; read by the views and tests/site.
// Float64 throughout. Arrays in a step are never changed afterwards, so any step can be shown at any time.
// Implements docs/algorithm.md, "Online softmax" and "Backward, tile by tile".
"use strict";
((Tiles) => {
  const { dot, zeros } = Tiles;
  const slice = (matrix, { begin }, { begin: first, size }) => matrix.slice(begin + first, begin + first + size);

  // A copy of `matrix` in which the rows of a tile are replaced.
  function withRows(matrix, sequence, tile, rows) {
    const copy = [...matrix];
    rows.forEach((row, i) => (copy[sequence.begin + tile.begin + i] = row));
    return copy;
  }
  const withHead = (heads, h, matrix) => heads.map((old, index) => (index === h ? matrix : old));

  // S of a tile, (1) and (3): -Infinity where a query does not see the key.
  function scores(problem, Q, K, I, J) {
    return Q.map((q, i) => Float64Array.from(K, (k, j) =>
      Tiles.visible(problem, I.begin + i, J.begin + j) ? problem.scale * dot(q, k) : -Infinity));
  }

  // sum_j A[i][j] B[j], rows of A times B; and the same with A transposed.
  function times(A, B, width) {
    return A.map((row) => row.reduce((sum, a, j) => sum.map((x, e) => x + a * B[j][e]), new Float64Array(width)));
  }
  const transpose = (A, columns) => Array.from({ length: columns }, (_, j) => Float64Array.from(A, (row) => row[j]));
  const sum = (A, B, factor = 1) => A.map((row, i) => row.map((x, e) => x + factor * B[i][e]));

  // Exponents are taken relative to 0 while a row has seen nothing.
  const relative = (x, m) => (x === -Infinity ? 0 : Math.exp(x - m));

  // What a visit of the forward pass does to fast memory (chip) and to slow memory. Returns the names that changed.
  function forwardStep(problem, inputs, visit, chip, memory) {
    const { sequence, h, kv, I, J } = visit, rows = I.size;
    switch (visit.kind) {
      case "load-q":
        for (const name of Object.keys(chip)) delete chip[name];
        Object.assign(chip, {
          Q: slice(inputs.Q[h], sequence, I), m: new Float64Array(rows).fill(-Infinity), l: new Float64Array(rows),
          o: zeros(rows, problem.d),
        });
        return ["Q", "m", "l", "o"];
      case "load-k":
        for (const name of ["S", "P", "V", "alpha", "mOld", "lOld", "oOld"]) delete chip[name];
        chip.K = slice(inputs.K[kv], sequence, J);
        return ["K"];
      case "scores":
        chip.S = scores(problem, chip.Q, chip.K, I, J);
        return ["S"];
      case "maximum":
        chip.mOld = chip.m;
        chip.m = chip.m.map((m, i) => Math.max(m, ...chip.S[i]));
        chip.alpha = chip.m.map((m, i) => relative(chip.mOld[i], m));
        return ["m", "alpha"];
      case "probabilities":
        chip.P = chip.S.map((row, i) => row.map((s) => relative(s, chip.m[i])));
        chip.lOld = chip.l;
        chip.l = chip.l.map((l, i) => chip.alpha[i] * l + chip.P[i].reduce((a, b) => a + b, 0));
        return ["P", "l"];
      case "output":
        chip.V = slice(inputs.V[kv], sequence, J);
        chip.oOld = chip.o;
        chip.o = sum(times(chip.P, chip.V, problem.d), chip.o.map((row, i) => row.map((x) => x * chip.alpha[i])));
        return ["V", "o"];
      case "write-o": {
        for (const name of ["K", "S", "P", "V", "alpha", "mOld", "lOld", "oOld"]) delete chip[name];
        chip.O = chip.o.map((row, i) => row.map((x) => x / chip.l[i]));
        chip.LSE = chip.m.map((m, i) => m + Math.log(chip.l[i]));
        memory.O = withHead(memory.O, h, withRows(memory.O[h], sequence, I, chip.O));
        memory.LSE = withHead(memory.LSE, h, withRows(memory.LSE[h], sequence, I, chip.LSE));
        return ["O", "LSE"];
      }
    }
    throw new Error(`forwardStep: no step is called ${visit.kind}`);
  }

  function backwardStep(problem, inputs, visit, chip, memory) {
    const { sequence, h, kv, I, J } = visit, { d, scale } = problem;
    switch (visit.kind) {
      case "delta":
        chip.O = slice(memory.O[h], sequence, I);
        chip.dO = slice(inputs.dO[h], sequence, I);
        chip.delta = Float64Array.from(chip.O, (o, i) => dot(o, chip.dO[i]));
        memory.delta = withHead(memory.delta, h, withRows(memory.delta[h], sequence, I, chip.delta));
        return ["O", "dO", "delta"];
      case "load-kv":
        for (const name of Object.keys(chip)) delete chip[name];
        Object.assign(chip, {
          K: slice(inputs.K[kv], sequence, J), V: slice(inputs.V[kv], sequence, J),
          dK: zeros(J.size, d), dV: zeros(J.size, d),
        });
        return ["K", "V", "dK", "dV"];
      case "load-rows":
        for (const name of ["S", "P", "dP", "dS", "dQ", "dQOld"]) delete chip[name];
        chip.Q = slice(inputs.Q[h], sequence, I);
        chip.dO = slice(inputs.dO[h], sequence, I);
        chip.LSE = slice(memory.LSE[h], sequence, I);
        chip.delta = slice(memory.delta[h], sequence, I);
        return ["Q", "dO", "LSE", "delta"];
      case "recompute":
        chip.S = scores(problem, chip.Q, chip.K, I, J);
        chip.P = chip.S.map((row, i) => row.map((s) => relative(s, chip.LSE[i])));
        return ["S", "P"];
      case "dv":
        chip.dV = sum(chip.dV, times(transpose(chip.P, J.size), chip.dO, d));
        return ["dV"];
      case "ds":
        chip.dP = chip.dO.map((row) => Float64Array.from(chip.V, (v) => dot(row, v)));
        chip.dS = chip.P.map((row, i) => row.map((p, j) => p * (chip.dP[i][j] - chip.delta[i])));
        return ["dP", "dS"];
      case "dk":
        chip.dK = sum(chip.dK, times(transpose(chip.dS, J.size), chip.Q, d), scale);
        return ["dK"];
      case "dq":
        chip.dQOld = slice(memory.dQ[h], sequence, I);
        chip.dQ = sum(chip.dQOld, times(chip.dS, chip.K, d), scale);
        memory.dQ = withHead(memory.dQ, h, withRows(memory.dQ[h], sequence, I, chip.dQ));
        return ["dQ"];
      case "write-kv":
        for (const name of ["Q", "dO", "LSE", "delta", "S", "P", "dP", "dS", "dQ", "dQOld"]) delete chip[name];
        memory.dK = withHead(memory.dK, kv, withRows(memory.dK[kv], sequence, J, chip.dK));
        memory.dV = withHead(memory.dV, kv, withRows(memory.dV[kv], sequence, J, chip.dV));
        return ["dK", "dV"];
    }
    throw new Error(`backwardStep: no step is called ${visit.kind}`);
  }

  // Nothing written yet: NaN, which the views leave blank. dQ is added to, so it begins with zeros.
  function blankMemory({ n, d, hq, hk }) {
    const blank = (heads) => Array.from({ length: heads }, () => zeros(n, d).map((row) => row.fill(NaN)));
    const numbers = () => Array.from({ length: hq }, () => new Array(n).fill(NaN));
    return {
      O: blank(hq), LSE: numbers(), delta: numbers(), dK: blank(hk), dV: blank(hk),
      dQ: Array.from({ length: hq }, () => zeros(n, d)),
    };
  }

  // All steps of a pass. The backward pass begins with what the forward pass left in memory.
  function makeSteps(problem, inputs, pass) {
    const memory = blankMemory(problem), count = Tiles.meter(), chip = {}, steps = [];
    if (pass === "backward") {
      const { O, LSE } = makeSteps(problem, inputs, "forward").at(-1)?.memory ?? memory;
      Object.assign(memory, { O, LSE });
    }
    const run = pass === "forward" ? forwardStep : backwardStep;
    let visited = [];  // tiles of this head and pass that are done, as "b h I J"
    for (const visit of Tiles.walk(problem, pass)) {
      count.count(visit);
      const changed = run(problem, inputs, visit, chip, memory);
      const { sequence, h, I, J } = visit;
      if (["output", "dq"].includes(visit.kind)) visited = [...visited, `${sequence.index} ${h} ${I.index} ${J.index}`];
      steps.push({ ...visit, index: steps.length, changed, chip: { ...chip }, memory: { ...memory }, visited,
                   traffic: count.counts() });
    }
    return steps;
  }

  // Everything that both passes leave in memory.
  function answers(problem, inputs) {
    const last = (pass) => makeSteps(problem, inputs, pass).at(-1)?.memory ?? blankMemory(problem);
    const { O, LSE } = last("forward"), { delta, dQ, dK, dV } = last("backward");
    return { O, LSE, delta, dQ, dK, dV };
  }

  // The largest difference between two tensors of the same shape.
  function difference(a, b) {
    if (typeof a === "number") return Math.abs(a - b);
    return Array.from(a).reduce((most, x, i) => Math.max(most, difference(x, b[i])), 0);
  }

  Object.assign(Tiles, { makeSteps, answers, difference });
})((globalThis.Tiles ??= {}));
