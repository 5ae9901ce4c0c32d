// SPDX-License-Identifier: Apache-2.0
// Fast memory as tables of numbers: each product with its left operand, its upper operand and the result in the corner.
// Adds `drawChip` to `Tiles`; read by page.js. Every cell keeps its full number in data-value, which tests/site reads.
"use strict";
((Tiles) => {
  const LABELS = {
    K: "Kᵀ", mOld: "m<sub>old</sub>", alpha: "α", delta: "δ", LSE: "LSE", o: "o", P: "P", S: "S",
  };

  const transposed = (matrix) =>
    Array.from({ length: matrix[0]?.length ?? 0 }, (_, e) => Float64Array.from(matrix, (row) => row[e]));

  // What each pass shows: blocks of a left and an upper operand, the result in the corner and columns beside it.
  // [name, rows, columns, transposed]: i queries of the tile, j keys, d dimensions.
  const BLOCKS = {
    forward: [
      { title: "Scores and maximum", left: ["Q", "i", "d"], top: ["K", "d", "j", true], corner: ["S", "i", "j"],
        beside: ["mOld", "m", "alpha"] },
      { title: "Weights and output", left: ["P", "i", "j"], top: ["V", "j", "d"], corner: ["o", "i", "d"],
        beside: ["lOld", "l", "LSE"], instead: { o: "O" } },
    ],
    backward: [
      { title: "Scores, again", left: ["Q", "i", "d"], top: ["K", "d", "j", true], corner: ["S", "i", "j"],
        beside: ["LSE"] },
      { title: "Gradient of the weights", left: ["dO", "i", "d"], top: ["V", "d", "j", true], corner: ["dP", "i", "j"],
        beside: ["delta"] },
      { title: "Weights, and gradient of the scores", row: [["P", "i", "j"], ["dS", "i", "j"]] },
      { title: "Sums", row: [["dV", "j", "d"], ["dK", "j", "d"], ["dQ", "i", "d"]] },
    ],
    delta: [{ title: "One number per row", row: [["dO", "i", "d"], ["O", "i", "d"]], beside: ["delta"] }],
  };
  const COLUMN_LABELS = { lOld: "l<sub>old</sub>", m: "m", l: "l" };
  const label = (name, flipped) =>
    LABELS[name] !== undefined && name !== "K" ? LABELS[name]
      : (COLUMN_LABELS[name] ?? name) + (flipped ? "ᵀ" : "");

  function cellOf(value, name, most, row) {
    const strength = Number.isFinite(value) ? Math.min(1, Math.abs(value) / most) : 0;
    const kind = value === -Infinity ? "unseen" : value < 0 ? "negative" : "";
    return `<td class="${kind}" data-row="${row}" data-value="${value}" title="${value}" style="--strength:${
      strength.toFixed(3)}">${Tiles.number(value)}</td>`;
  }

  // A table of numbers; a place without numbers yet is drawn empty, so that nothing jumps.
  function matrix(name, values, rows, columns, flipped, { changed, most, chosen, byRow }) {
    const shown = values && flipped ? transposed(values) : values;
    let body = "";
    for (let r = 0; r < rows; ++r) {
      body += `<tr class="${byRow && r === chosen ? "chosen" : ""}">`;
      for (let c = 0; c < columns; ++c) {
        body += shown ? cellOf(shown[r][c], name, most, byRow ? r : -1) : `<td class="blank"></td>`;
      }
      body += "</tr>";
    }
    const state = !values ? "absent" : changed ? "changed" : "held";
    return `<table class="matrix ${name} ${state}" data-name="${name}"><caption>${
      label(name, flipped)}</caption><tbody>${body}</tbody></table>`;
  }

  function column(name, values, rows, { changed, chosen }) {
    let body = "";
    for (let r = 0; r < rows; ++r) {
      body += `<tr class="${r === chosen ? "chosen" : ""}">${
        values ? cellOf(values[r], name, Infinity, r) : `<td class="blank"></td>`}</tr>`;
    }
    const state = !values ? "absent" : changed ? "changed" : "held";
    return `<table class="matrix column ${name} ${state}" data-name="${name}"><caption>${
      label(name)}</caption><tbody>${body}</tbody></table>`;
  }

  function drawChip(panel, problem, step, scales, chosen) {
    const { chip, changed } = step;
    const size = { i: step.I?.size ?? problem.br, j: step.J?.size ?? problem.bc, d: problem.d };
    const largest = (values) => Math.max(1e-9, ...values.flatMap((row) => Array.from(row, (v) =>
      Number.isFinite(v) ? Math.abs(v) : 0)));
    const most = (name, values) => (name === "P" ? 1 : ["S", "dP", "dS", "o"].includes(name) && values
      ? largest(values) : scales[name] ?? 1);
    const table = ([name, rows, columns, flipped], instead = {}) => {
      const given = instead[name] && chip[instead[name]] ? instead[name] : name, values = chip[given];
      return matrix(given, values, size[rows], size[columns], flipped,
                    { changed: changed.includes(given), most: most(given, values), chosen, byRow: rows === "i" });
    };
    const beside = (names = []) => names.map((name) =>
      column(name, chip[name], size.i, { changed: changed.includes(name), chosen })).join("");
    const blocks = BLOCKS[step.kind === "delta" ? "delta" : step.pass];
    panel.style.setProperty("--widest", Math.max(size.j, size.d));
    panel.innerHTML = blocks.map((block) => {
      const inside = block.row
        ? `<div class="row">${block.row.map((entry) => table(entry)).join("")}${beside(block.beside)}</div>`
        : `<div class="product"><div class="top">${table(block.top)}</div><div class="left">${table(block.left)}</div>
           <div class="corner">${table(block.corner, block.instead)}</div>
           <div class="beside">${beside(block.beside)}</div></div>`;
      return `<section class="block"><h3>${block.title}</h3>${inside}</section>`;
    }).join("");
  }

  Object.assign(Tiles, { drawChip });
})((globalThis.Tiles ??= {}));
