// SPDX-License-Identifier: Apache-2.0
// The order in which tiles are visited and what each visit moves between slow and fast memory, without any numbers; and
// the same count for unfused attention. Adds `walk`, `meter`, `countTraffic` and `unfused` to `Tiles`; read by
// steps.js, the views and tests/site. Implements docs/algorithm.md, "Cost" and "Backward, tile by tile".
//
// Bytes are those of f32 and are counted in two ways. `every`: nothing stays in a cache, so each load of a tile counts.
// `cached`: caches hold Q, K, V and the gradients of a head, so each of their tiles counts once; what is as large as
// the scores counts every time. Real machines lie between the two. Unfused attention is counted with the same tiles.
"use strict";
((Tiles) => {
  const BYTES = 4;

  // A move of a tile: `rows` of the tensor `name` of head `head`, `width` numbers each.
  const move = (name, head, sequence, rows, width) => ({ name, head, sequence, rows, width });

  function* walkForward(problem) {
    const { d, hq, sequences } = problem;
    for (const sequence of sequences) {
      for (let h = 0; h < hq; ++h) {
        const kv = Tiles.kvHead(problem, h), keys = Tiles.keyTiles(problem, sequence);
        const at = (name, rows, width = d, head = h) => move(name, head, sequence, rows, width);
        for (const I of Tiles.queryTiles(problem, sequence)) {
          const classes = keys.map((J) => Tiles.tileClass(problem, I, J));
          const base = { pass: "forward", sequence, h, kv, I, J: null, tile: null, classes, loads: [], stores: [] };
          yield { ...base, kind: "load-q", loads: [at("Q", I)] };
          for (const J of keys) {
            const tile = classes[J.index];
            if (tile === "empty") continue;
            const here = { ...base, J, tile };
            yield { ...here, kind: "load-k", loads: [at("K", J, d, kv)] };
            yield { ...here, kind: "scores" };
            yield { ...here, kind: "maximum" };
            yield { ...here, kind: "probabilities" };
            yield { ...here, kind: "output", loads: [at("V", J, d, kv)] };
          }
          yield { ...base, kind: "write-o", stores: [at("O", I), at("LSE", I, 1)] };
        }
      }
    }
  }

  function* walkBackward(problem) {
    const { d, hq, hk, group, sequences } = problem;
    for (const sequence of sequences) {
      const rows = Tiles.queryTiles(problem, sequence);
      const at = (name, range, head, width = d) => move(name, head, sequence, range, width);
      const base = { pass: "backward", sequence, h: 0, kv: 0, I: null, J: null, tile: null, loads: [], stores: [] };
      for (let h = 0; h < hq; ++h) {
        for (const I of rows) {
          yield { ...base, kind: "delta", h, kv: Tiles.kvHead(problem, h), I,
                  loads: [at("O", I, h), at("dO", I, h)], stores: [at("delta", I, h, 1)] };
        }
      }
      for (let kv = 0; kv < hk; ++kv) {
        for (const J of Tiles.keyTiles(problem, sequence)) {
          const classes = rows.map((I) => Tiles.tileClass(problem, I, J));
          const block = { ...base, kv, h: kv * group, J, classes };
          yield { ...block, kind: "load-kv", loads: [at("K", J, kv), at("V", J, kv)] };
          for (let h = kv * group; h < (kv + 1) * group; ++h) {
            for (const I of rows) {
              const tile = classes[I.index];
              if (tile === "empty") continue;
              const here = { ...block, h, I, tile };
              yield { ...here, kind: "load-rows",
                      loads: [at("Q", I, h), at("dO", I, h), at("LSE", I, h, 1), at("delta", I, h, 1)] };
              yield { ...here, kind: "recompute" };
              yield { ...here, kind: "dv" };
              yield { ...here, kind: "ds" };
              yield { ...here, kind: "dk" };
              yield { ...here, kind: "dq", loads: [at("dQ", I, h)], stores: [at("dQ", I, h)] };
            }
          }
          yield { ...block, h: (kv + 1) * group - 1, kind: "write-kv", stores: [at("dK", J, kv), at("dV", J, kv)] };
        }
      }
    }
  }

  const walk = (problem, pass) => (pass === "forward" ? walkForward(problem) : walkBackward(problem));

  // Counts moves as they come. counts() is {every: {name: bytes}, cached: {name: bytes}}.
  function meter() {
    const every = {}, cached = {}, seen = new Set();
    const add = (counts, name, bytes) => (counts[name] = (counts[name] ?? 0) + bytes);
    return {
      count({ loads, stores }) {
        for (const { name, head, sequence, rows, width } of [...loads, ...stores]) {
          const bytes = BYTES * rows.size * width, key = `${name} ${head} ${sequence.index} ${rows.begin}`;
          add(every, name, bytes);
          if (!seen.has(key)) add(cached, name, bytes);
          seen.add(key);
        }
      },
      counts: () => ({ every: { ...every }, cached: { ...cached } }),
    };
  }

  function countTraffic(problem, pass) {
    const count = meter();
    for (const visit of walk(problem, pass)) count.count(visit);
    return count.counts();
  }

  const total = (counts) => Object.values(counts).reduce((sum, bytes) => sum + bytes, 0);

  // Unfused attention as a list of its steps: what each moves, which matrix as large as the scores it writes and which
  // it reads. Each sequence and head has its own scores, of which none are skipped.
  function unfused(problem, pass) {
    const steps = pass === "forward"
      ? [["S = Q Kᵀ", "S", []], ["P = softmax(S)", "P", ["S"]], ["O = P V", null, ["P"]]]
      : [["dV = Pᵀ dO", null, ["P"]], ["dP = dO Vᵀ", "dP", []], ["dS = P ∘ (dP − delta)", "dS", ["P", "dP"]],
         ["dQ = dS K", null, ["dS"]], ["dK = dSᵀ Q", null, ["dS"]]];
    const phases = steps.map(([name, writes, reads]) => ({ name, writes, reads, every: {}, cached: {} }));
    const { d, hq, group, sequences } = problem;
    const add = (counts, name, numbers) => (counts[name] = (counts[name] ?? 0) + BYTES * numbers);
    let squares = 0;
    for (const sequence of sequences) {
      const n = sequence.length, rows = Tiles.queryTiles(problem, sequence).length;
      const columns = Tiles.keyTiles(problem, sequence).length;
      squares += hq * n * n;
      // [step, tensor, times read or written where nothing is cached]; a group shares K, V and their gradients.
      const moves = pass === "forward"
        ? [[0, "Q", 1], [0, "K", rows], [2, "V", rows], [2, "O", 1]]
        : [[0, "dO", columns], [0, "dV", 1], [1, "dO", 1], [1, "V", rows], [3, "K", rows], [3, "dQ", 1],
           [4, "Q", columns], [4, "dK", 1]];
      const first = new Set();
      for (const [step, name, times] of moves) {
        const shared = /[KV]$/.test(name) ? hq / group : hq;
        add(phases[step].every, name, (name === "dK" || name === "dV" ? shared : hq) * times * n * d);
        if (!first.has(name)) add(phases[step].cached, name, shared * n * d);
        first.add(name);
      }
      for (const phase of phases) {
        for (const name of [...(phase.writes ? [phase.writes] : []), ...phase.reads]) {
          add(phase.every, name, hq * n * n);
          add(phase.cached, name, hq * n * n);
        }
      }
    }
    const matrices = pass === "forward" ? ["S", "P"] : ["P", "dP", "dS"];
    return { phases, matrices, extraBytes: BYTES * squares * matrices.length };
  }

  // What unfused attention has moved, and which matrices it has filled, after a share of its way (in bytes).
  function unfusedAt({ phases, matrices }, model, share) {
    const whole = phases.reduce((sum, phase) => sum + total(phase[model]), 0), filled = {};
    for (const name of matrices) filled[name] = 0;
    if (phases[0].reads.includes("P")) filled.P = 1;  // the forward pass left it there
    const counts = {};
    let left = share * whole, current = phases.at(-1);
    for (const phase of phases) {
      const bytes = total(phase[model]), part = bytes > 0 ? Math.min(1, left / bytes) : 1;
      for (const [name, moved] of Object.entries(phase[model])) counts[name] = (counts[name] ?? 0) + moved * part;
      if (phase.writes) filled[phase.writes] = part;
      left -= bytes * part;
      if (part < 1) {
        current = phase;
        break;
      }
    }
    return { counts, filled, phase: current.name, reads: current.reads, whole };
  }

  Object.assign(Tiles, { walk, meter, countTraffic, total, unfused, unfusedAt, BYTES });
})((globalThis.Tiles ??= {}));
