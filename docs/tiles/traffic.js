// SPDX-License-Identifier: Apache-2.0
// Bytes moved so far, beside those of unfused attention at the same share of its way, and both at a real size.
// Adds `drawTraffic` and `drawRealSize` to `Tiles`; read by page.js. The counts are walk.js's.
"use strict";
((Tiles) => {
  const ORDER = ["Q", "K", "V", "O", "LSE", "dO", "delta", "dQ", "dK", "dV", "S", "P", "dP", "dS"];
  const hue = (name) => (["S", "P", "dP", "dS"].includes(name) ? "square" : name);
  const percent = (share) => `${(100 * share).toFixed(3)}%`;

  function bar(counts, whole, end) {
    const parts = ORDER.filter((name) => counts[name] > 0).map((name) =>
      `<span class="part ${hue(name)}" style="width:${percent(counts[name] / whole)}"
        title="${name}: ${Tiles.bytes(counts[name])}"></span>`).join("");
    return `<div class="bar"><span class="goal" style="width:${percent(end / whole)}"></span>${parts}</div>`;
  }

  function legend(counts) {
    return ORDER.filter((name) => counts[name] > 0).map((name) =>
      `<span class="entry"><span class="swatch ${hue(name)}"></span>${
        name === "delta" ? "δ" : name} ${Tiles.bytes(counts[name])}</span>`).join("");
  }

  // The matrices of unfused attention, filled as far as it has come.
  function squares(matrices, { filled, reads }) {
    return matrices.map((name) => `<figure class="matrixfill ${reads.includes(name) ? "reading" : ""}">
      <div><span style="height:${percent(filled[name])}"></span></div>
      <figcaption>${name}</figcaption></figure>`).join("");
  }

  function drawTraffic(panel, problem, step, count, model, final) {
    const plan = Tiles.unfused(problem, step.pass), share = (step.index + 1) / count;
    const other = Tiles.unfusedAt(plan, model, share), ours = step.traffic[model];
    const now = Tiles.total(ours), then = Tiles.total(other.counts), end = Tiles.total(final[model]);
    const largest = Math.max(other.whole, end);
    const ownExtra = step.pass === "forward" ? 0 : Tiles.BYTES * problem.n * problem.hq;
    panel.innerHTML = `
      <div class="contender"><h3>Tile by tile</h3><output data-bytes="${now}">${Tiles.bytes(now)}</output>
        ${bar(ours, largest, end)}<p class="legend">${legend(ours)}</p>
        <p class="extra">Extra memory: <b>${Tiles.bytes(ownExtra)}</b>${ownExtra ? ", delta" : ""}.
          Scores in memory: none.</p></div>
      <div class="contender"><h3>Unfused</h3><output data-bytes="${then}">${Tiles.bytes(then)}</output>
        ${bar(other.counts, largest, other.whole)}<p class="legend">${legend(other.counts)}</p>
        <p class="extra">Extra memory: <b>${Tiles.bytes(plan.extraBytes)}</b>, ${plan.matrices.join(", ")}. Now:
          ${other.phase}.</p></div>
      <div class="fills" aria-hidden="true">${squares(plan.matrices, other)}</div>`;
  }

  // The same counts for a head of a model: D = 128, tiles of 128 x 128, one sequence, causal or not, no window.
  function drawRealSize(panel, { causal }, pass, n) {
    const large = { n, d: 128, br: 128, bc: 128, hq: 1, hk: 1, group: 1, sequences: [{ index: 0, begin: 0, length: n }],
                    band: Tiles.bandOf({ causal, left: -1, right: -1 }) };
    const tiled = Tiles.countTraffic(large, pass), plan = Tiles.unfused(large, pass);
    const row = (model, words) => {
      const ours = Tiles.total(tiled[model]);
      const theirs = plan.phases.reduce((sum, phase) => sum + Tiles.total(phase[model]), 0);
      return `<tr><th scope="row">${words}</th><td>${Tiles.bytes(ours)}</td><td>${Tiles.bytes(theirs)}</td>
        <td class="ratio">${(theirs / ours).toFixed(1)}×</td></tr>`;
    };
    const extra = Tiles.bytes(pass === "forward" ? 0 : Tiles.BYTES * n);
    panel.innerHTML = `<table class="real"><thead><tr><td></td><th scope="col">tile by tile</th>
      <th scope="col">unfused</th><th scope="col">ratio</th></tr></thead><tbody>${
      row("every", "every load counts")}${row("cached", "caches hold Q, K, V")}<tr><th scope="row">extra memory</th>
      <td>${extra}</td><td>${Tiles.bytes(plan.extraBytes)}</td><td></td></tr></tbody></table>`;
  }

  Object.assign(Tiles, { drawTraffic, drawRealSize });
})((globalThis.Tiles ??= {}));
