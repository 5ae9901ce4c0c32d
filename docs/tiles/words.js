// SPDX-License-Identifier: Apache-2.0
// What each step is called, which equation of docs/algorithm.md it is, what it means, and what it does to one row, in
// numbers. Adds `wordsOf`, `rowInNumbers` and the formatting of numbers to `Tiles`; read by the views.
"use strict";
((Tiles) => {
  // Two or more decimals, a real minus sign, nothing for what has not been written yet.
  function number(x, decimals = 2) {
    if (Number.isNaN(x)) return "";
    if (!Number.isFinite(x)) return x < 0 ? "−∞" : "∞";
    const text = Math.abs(x).toFixed(decimals);
    return (x < 0 && Number(text) !== 0 ? "−" : "") + text;
  }

  function bytes(count) {
    if (count < 1024) return `${Math.round(count)} B`;
    const units = ["KiB", "MiB", "GiB", "TiB"];
    let size = count, unit = -1;
    while (size >= 1024 && unit < units.length - 1) (size /= 1024), ++unit;
    return `${size.toFixed(size < 10 ? 2 : size < 100 ? 1 : 0)} ${units[unit]}`;
  }

  const range = ({ begin, size }, sequence) =>
    size === 1 ? `${sequence.begin + begin}` : `${sequence.begin + begin}–${sequence.begin + begin + size - 1}`;
  const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

  const TILE_TEXT = {
    full: "Every query of the tile sees every key, so nothing is masked.",
    partial: "Some queries of the tile do not see some of the keys: those scores become −∞.",
  };

  function skipped({ classes }, what) {
    const count = classes.filter((tile) => tile === "empty").length;
    if (count === 0) return "";
    return ` ${plural(count, `of ${classes.length} ${what} tiles is`, `of ${classes.length} ${what} tiles are`)} empty
      and will never be loaded.`;
  }

  // [title, formula, text]. Formulas are HTML; numbers in brackets are those of docs/algorithm.md.
  const WORDS = {
    "load-q": (s) => [`Load queries ${range(s.I, s.sequence)}`, "m = −∞, &ensp; l = 0, &ensp; o = 0",
      `The tile of Q comes into fast memory and stays. Each row starts with the state of the empty set.${
        skipped(s, "key")}`],
    "load-k": (s) => [`Load keys ${range(s.J, s.sequence)}`, "",
      `The next tile of K comes in. ${TILE_TEXT[s.tile]}`],
    scores: () => ["Scores of the tile", "S = scale · Q Kᵀ <i>(1)</i>",
      "Only this tile of the score matrix exists, and only until the next one takes its place."],
    maximum: (s) => {
      const rose = s.chip.m.filter((m, i) => m > s.chip.mOld[i]).length;
      return ["The maximum may rise", "m ← max(m, row maximum of S), &ensp; α = exp(m<sub>old</sub> − m)",
        `It rises in ${rose} of ${plural(s.I.size, "row")}. What was summed before is relative to the old maximum;
         α brings it to the new one.`];
    },
    probabilities: () => ["Exponentials and their sum", "P = exp(S − m), &ensp; l ← α l + row sum of P",
      "No exponent is above 0, so nothing overflows. P is not yet divided by l."],
    output: (s) => ["Load values, add to the output", "o ← α o + P V",
      `The tile of V for keys ${range(s.J, s.sequence)} comes in. The old o is rescaled by α, row by row, and P V is
       added.`],
    "write-o": (s) => [`Write queries ${range(s.I, s.sequence)}`,
      "O = o / l <i>(6)</i>, &ensp; LSE = m + log l <i>(4)</i>",
      "The only division, once per row. O and one number per row go back to slow memory; S and P never did."],
    delta: (s) => [`delta of queries ${range(s.I, s.sequence)}`,
      "delta<sub>i</sub> = dO<sub>i</sub> · O<sub>i</sub> <i>(7)</i>",
      "One number per row stands for the sum over the whole row that the softmax's derivative needs."],
    "load-kv": (s) => [`Load keys and values ${range(s.J, s.sequence)}`, "dK = 0, &ensp; dV = 0",
      `In the backward pass a tile of keys stays and queries come and go. dK and dV are summed in fast memory.${
        skipped(s, "query")}`],
    "load-rows": (s) => [`Load queries ${range(s.I, s.sequence)}`, "",
      `Q, dO, and two numbers per row: LSE and delta. ${TILE_TEXT[s.tile]}`],
    recompute: () => ["Recompute S and P", "S = scale · Q Kᵀ <i>(1)</i>, &ensp; P = exp(S − LSE) <i>(5)</i>",
      "P was never stored. LSE is known, so P comes out normalised: no maximum, no rescaling."],
    dv: (s) => ["Gradient of the values", "dV ← dV + Pᵀ dO <i>(8)</i>",
      `Every query that looked at a value gives back its share${
        s.shared ? "; the query heads of the group add to the same dV" : ""}.`],
    ds: () => ["Gradient of the scores", "dP = dO Vᵀ <i>(9)</i>, &ensp; dS = P ∘ (dP − delta) <i>(10)</i>",
      "The derivative of the softmax, one element at a time. Over all keys, each row of dS sums to 0."],
    dk: () => ["Gradient of the keys", "dK ← dK + scale · dSᵀ Q <i>(13)</i>",
      "The transposed tile of dS meets the queries."],
    dq: (s) => ["Gradient of the queries", "dQ ← dQ + scale · dS K <i>(13)</i>",
      `dQ of queries ${range(s.I, s.sequence)} gets a share from every tile of keys, so it is read, added to and
       written back, always in the same order: the same bits in every run.`],
    "write-kv": (s) => [`Write gradients of keys ${range(s.J, s.sequence)}`, "",
      "dK and dV of the tile are complete: no other tile adds to them."],
  };

  function wordsOf(problem, step) {
    const [title, formula, text] = WORDS[step.kind]({ ...step, shared: problem.group > 1 });
    return { title, formula, text };
  }

  const factor = (x) => (x < 0 ? `(${number(x)})` : number(x));
  const terms = (a, b) => Array.from(a, (x, e) => `${number(x)}·${factor(b[e])}`).join(" + ");

  // One row of the tile, as one would compute it by hand. Row r, key column c, the first that the row sees.
  function rowInNumbers(problem, { kind, chip }, r) {
    const n4 = (x) => number(x, 4);
    const c = chip.S ? Math.max(0, Array.from(chip.S[r]).findIndex((s) => s > -Infinity)) : 0;
    switch (kind) {
      case "scores": case "recompute": {
        if (!(chip.S[r][c] > -Infinity)) return "This row sees no key of the tile: all its scores are −∞.";
        const score = `s = ${n4(problem.scale)} · (${terms(chip.Q[r], chip.K[c])}) = ${n4(chip.S[r][c])}`;
        if (kind === "scores") return score;
        return `${score}; &ensp; p = exp(${n4(chip.S[r][c])} − ${n4(chip.LSE[r])}) = ${n4(chip.P[r][c])}`;
      }
      case "maximum":
        return `m = max(${n4(chip.mOld[r])}, ${Array.from(chip.S[r], (s) => number(s)).join(", ")}) = ${n4(chip.m[r])};
          &ensp; α = exp(${n4(chip.mOld[r])} − ${n4(chip.m[r])}) = ${n4(chip.alpha[r])}`;
      case "probabilities":
        return `l = ${n4(chip.alpha[r])} · ${n4(chip.lOld[r])} + ${
          Array.from(chip.P[r], (p) => number(p)).join(" + ")} = ${n4(chip.l[r])}`;
      case "output":
        return `o<sub>0</sub> = ${n4(chip.alpha[r])} · ${n4(chip.oOld[r][0])} + ${
          terms(chip.P[r], chip.V.map((v) => v[0]))} = ${n4(chip.o[r][0])}`;
      case "write-o":
        return `O<sub>0</sub> = ${n4(chip.o[r][0])} / ${n4(chip.l[r])} = ${n4(chip.O[r][0])}; &ensp;
          LSE = ${n4(chip.m[r])} + log ${n4(chip.l[r])} = ${n4(chip.LSE[r])}`;
      case "delta":
        return `delta = ${terms(chip.dO[r], chip.O[r])} = ${n4(chip.delta[r])}`;
      case "dv":
        return `Key ${c} of the tile gets ${n4(chip.P[r][c])} · dO = (${
          Array.from(chip.dO[r], (x) => number(chip.P[r][c] * x)).join(", ")}) from this row`;
      case "ds":
        return `dp = ${terms(chip.dO[r], chip.V[c])} = ${n4(chip.dP[r][c])}; &ensp;
          ds = ${n4(chip.P[r][c])} · (${n4(chip.dP[r][c])} − ${n4(chip.delta[r])}) = ${n4(chip.dS[r][c])}`;
      case "dk":
        return `Key ${c} of the tile gets ${n4(problem.scale)} · ${n4(chip.dS[r][c])} · q = (${
          Array.from(chip.Q[r], (x) => number(problem.scale * chip.dS[r][c] * x)).join(", ")}) from this row`;
      case "dq":
        return `dq<sub>0</sub> = ${n4(chip.dQOld[r][0])} + ${n4(problem.scale)} · (${
          terms(chip.dS[r], chip.K.map((k) => k[0]))}) = ${n4(chip.dQ[r][0])}`;
    }
    return "";
  }

  Object.assign(Tiles, { number, bytes, wordsOf, rowInNumbers, rangeText: range });
})((globalThis.Tiles ??= {}));
