// SPDX-License-Identifier: Apache-2.0
// Runs the numbers of docs/tiles without a browser: `node engine.js SETTINGS.json` prints inputs, results, mask and
// traffic of each of a list of settings, as JSON. Called by tests/site/numbers_test.py.
"use strict";
const fs = require("node:fs"), path = require("node:path");
const folder = path.join(__dirname, "../../docs/tiles");
for (const name of ["problem", "walk", "steps", "words"]) require(path.join(folder, `${name}.js`));
const { Tiles } = globalThis;

const plain = (x) => (typeof x === "number" ? x : Array.from(x, plain));
const values = (tensors) => Object.fromEntries(Object.entries(tensors).map(([name, x]) => [name, plain(x)]));

// Every answer of tileClass must be what visible() says of the pairs of the tile.
function wrongTiles(problem) {
  const wrong = [];
  for (const sequence of problem.sequences) {
    for (const I of Tiles.queryTiles(problem, sequence)) {
      for (const J of Tiles.keyTiles(problem, sequence)) {
        let seen = 0;
        for (let i = I.begin; i < I.end; ++i) {
          for (let j = J.begin; j < J.end; ++j) seen += Tiles.visible(problem, i, j);
        }
        const expected = seen === 0 ? "empty" : seen === I.size * J.size ? "full" : "partial";
        if (Tiles.tileClass(problem, I, J) !== expected) wrong.push({ sequence: sequence.index, I, J, expected });
      }
    }
  }
  return wrong;
}

function run(settings) {
  const problem = Tiles.makeProblem(settings), inputs = Tiles.makeInputs(problem);
  const mask = Array.from({ length: problem.n }, () => new Array(problem.n).fill(0));
  for (const { begin, length } of problem.sequences) {
    for (let i = 0; i < length; ++i) {
      for (let j = 0; j < length; ++j) mask[begin + i][begin + j] = Number(Tiles.visible(problem, i, j));
    }
  }
  const passes = {};
  for (const pass of ["forward", "backward"]) {
    const steps = Tiles.makeSteps(problem, inputs, pass), plan = Tiles.unfused(problem, pass);
    for (const step of steps) {
      const { title, text } = Tiles.wordsOf(problem, step);
      if (!title || !text) throw new Error(`${step.kind} has no words`);
      for (let row = 0; row < (step.I?.size ?? 0); ++row) {
        const words = Tiles.rowInNumbers(problem, step, row);
        if (/NaN|undefined/.test(words)) throw new Error(`${step.kind}, row ${row}: ${words}`);
      }
    }
    passes[pass] = {
      steps: steps.length, traffic: steps.at(-1).traffic, counted: Tiles.countTraffic(problem, pass),
      unfused: Object.fromEntries(["every", "cached"].map((model) => [model, Tiles.unfusedAt(plan, model, 1).counts])),
      extra: plan.extraBytes,
    };
  }
  return { problem, inputs: values(inputs), answers: values(Tiles.answers(problem, inputs)),
           direct: values(Tiles.direct(problem, inputs)), mask, wrong: wrongTiles(problem), passes };
}

const list = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
process.stdout.write(JSON.stringify(list.map(run)));
