// SPDX-License-Identifier: Apache-2.0
// Slow memory as a drawing: the tensors around the matrix of scores, which is never stored, and the tile at work.
// Adds `makeMap` to `Tiles`; read by page.js. One SVG, built for a problem and a pass, then updated step by step.
"use strict";
((Tiles) => {
  const NS = "http://www.w3.org/2000/svg";
  const SIDE = 340;  // of the matrix of scores, in units of the drawing
  const GAP = 12, LABEL = 18, COLUMN = 13;

  function element(parent, name, attributes = {}) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return parent.appendChild(made);
  }

  // Where every tensor lies. Queries run down, keys to the right; strips are `thick` across.
  function layout({ n, d }, pass) {
    const thick = Math.max(26, Math.min(14 * d, 64)), forward = pass === "forward";
    const left = forward ? [["Q", thick]] : [["Q", thick], ["dO", thick], ["LSE", COLUMN], ["delta", COLUMN]];
    const right = forward ? [["O", thick], ["LSE", COLUMN]] : [["dQ", thick]];
    const top = ["K", "V"], bottom = forward ? [] : ["dK", "dV"];
    const places = {}, cell = SIDE / n;
    let x = 0, y = LABEL;
    const x0 = left.reduce((sum, [, width]) => sum + width + GAP, 0) + (forward ? LABEL : 0);
    const y0 = LABEL + top.length * (thick + GAP) + 4;
    x = forward ? LABEL : 0;
    for (const [name, width] of left) (places[name] = { x, y: y0, w: width, h: SIDE, down: true }), (x += width + GAP);
    for (const name of top) (places[name] = { x: x0, y, w: SIDE, h: thick }), (y += thick + GAP);
    x = x0 + SIDE + GAP;
    for (const [name, width] of right) (places[name] = { x, y: y0, w: width, h: SIDE, down: true }), (x += width + GAP);
    y = y0 + SIDE + GAP;
    for (const name of bottom) (places[name] = { x: x0, y, w: SIDE, h: thick }), (y += thick + GAP);
    places.S = { x: x0, y: y0, w: SIDE, h: SIDE };
    return { places, cell, width: x - GAP + 3, height: y - GAP + 3 };
  }

  function makeMap(svg, problem, pass, scales, onHover) {
    const { places, cell, width, height } = layout(problem, pass), S = places.S;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `-2 -2 ${width + 4} ${height + 4}`);
    const definitions = element(svg, "defs");
    const pattern = element(definitions, "pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse",
                                                      patternTransform: "rotate(45)" });
    element(pattern, "line", { x1: 0, y1: 0, x2: 0, y2: 5, class: "hatch" });

    // The score matrix: sequences, their tiles, and the pairs of partial tiles that are masked.
    const ghost = element(svg, "g", { class: "ghost" }), tiles = new Map();
    element(ghost, "rect", { x: S.x, y: S.y, width: S.w, height: S.h, class: "outside" });
    for (const sequence of problem.sequences) {
      const x = S.x + sequence.begin * cell, y = S.y + sequence.begin * cell;
      for (const I of Tiles.queryTiles(problem, sequence)) {
        for (const J of Tiles.keyTiles(problem, sequence)) {
          const kind = Tiles.tileClass(problem, I, J);
          if (kind === "empty") continue;
          const rect = element(ghost, "rect", { x: x + J.begin * cell, y: y + I.begin * cell, width: J.size * cell,
                                                height: I.size * cell, class: `tile ${kind}` });
          tiles.set(`${sequence.index} ${I.index} ${J.index}`, rect);
          for (let i = I.begin; kind === "partial" && i < I.end; ++i) {
            for (let j = J.begin; j < J.end; ++j) {
              if (Tiles.visible(problem, i, j)) continue;
              element(ghost, "rect", { x: x + j * cell, y: y + i * cell, width: cell, height: cell, class: "masked" });
            }
          }
        }
      }
      if (problem.sequences.length > 1 && sequence.length > 0) {
        const side = sequence.length * cell;
        element(ghost, "rect", { x, y, width: side, height: side, class: "sequence" });
      }
    }
    const current = element(svg, "g", { class: "current" });

    // Strips: one small rectangle per number.
    const cells = {};
    for (const [name, place] of Object.entries(places)) {
      if (name === "S") continue;
      const strip = element(svg, "g", { class: `strip ${name}`, "data-tensor": name });
      element(strip, "rect", { x: place.x, y: place.y, width: place.w, height: place.h, class: "ground" });
      const depth = name === "LSE" || name === "delta" ? 1 : problem.d;
      const across = (place.down ? place.w : place.h) / depth;
      cells[name] = [];
      for (let t = 0; t < problem.n; ++t) {
        for (let e = 0; e < depth; ++e) {
          const along = t * cell, sideways = e * across, space = Math.min(1, cell / 12);
          const box = place.down
            ? { x: place.x + sideways, y: place.y + along, width: across - space, height: cell - space }
            : { x: place.x + along, y: place.y + sideways, width: cell - space, height: across - space };
          const rect = element(strip, "rect", { ...box, class: "cell" });
          rect.tile = { name, t, e, depth };
          cells[name].push(rect);
        }
      }
      const label = element(svg, "text", place.down
        ? { x: place.x + place.w / 2, y: place.y - 5, class: `label ${name}`, "text-anchor": "middle" }
        : { x: place.x - 7, y: place.y + place.h / 2 + 4, class: `label ${name}`, "text-anchor": "end" });
      label.textContent = name === "delta" ? "δ" : name === "LSE" ? "L" : name;
      element(label, "title").textContent = name;
    }
    const frames = {};
    for (const name of Object.keys(places)) frames[name] = element(svg, "rect", { class: `frame ${name}`, rx: 2 });
    svg.onpointerover = (event) => onHover(event.target.tile ?? null);
    svg.onpointerleave = () => onHover(null);

    function paint(name, matrix) {
      for (const rect of cells[name] ?? []) {
        const { t, e, depth } = rect.tile, value = depth === 1 ? matrix[t] : matrix[t][e];
        rect.tile.value = value;
        const strength = Number.isNaN(value) ? 0 : Math.min(1, Math.abs(value) / scales[name]);
        rect.classList.toggle("negative", value < 0);
        rect.style.fillOpacity = Number.isNaN(value) ? 0 : (0.08 + 0.85 * strength).toFixed(3);
      }
    }

    function frame(name, sequence, tile, down, on = true) {
      const box = frames[name], place = places[name];
      if (!box) return;
      box.classList.toggle("shown", Boolean(tile) && on);
      if (!tile) return;
      const along = (sequence.begin + tile.begin) * cell, length = tile.size * cell;
      const [x, y] = down ? [place.x, place.y + along] : [place.x + along, place.y];
      const [w, h] = down ? [place.w, length] : [length, place.h];
      set(box, x, y, w, h);
    }
    function set(box, x, y, w, h) {
      box.style.transform = `translate(${x}px, ${y}px)`;
      box.setAttribute("width", w), box.setAttribute("height", h);
    }

    // The head of each tensor that is shown is the one at work.
    function update(step, inputs) {
      const { h, kv, sequence, I, J, chip, memory } = step;
      paint("Q", inputs.Q[h]), paint("K", inputs.K[kv]), paint("V", inputs.V[kv]), paint("dO", inputs.dO[h]);
      for (const name of ["O", "LSE", "delta", "dQ"]) paint(name, memory[name][h]);
      for (const name of ["dK", "dV"]) paint(name, memory[name][kv]);
      const done = new Set(step.visited);
      for (const [key, rect] of tiles) {
        const [b, i, j] = key.split(" ");
        rect.classList.toggle("done", done.has(`${b} ${h} ${i} ${j}`));
      }
      const held = (name) => chip[name] !== undefined;
      frame("Q", sequence, I, true, held("Q")), frame("dO", sequence, I, true, held("dO"));
      for (const name of ["LSE", "delta"]) frame(name, sequence, I, true, held(name));
      frame("K", sequence, J, false, held("K")), frame("V", sequence, J, false, held("V"));
      frame("O", sequence, I, true, held("O")), frame("dQ", sequence, I, true, held("dQ"));
      for (const name of ["dK", "dV"]) frame(name, sequence, J, false, step.kind === "write-kv");
      frames.S.classList.toggle("shown", Boolean(I && J));
      current.replaceChildren();
      if (!I || !J) return;
      const x = S.x + (sequence.begin + J.begin) * cell, y = S.y + (sequence.begin + I.begin) * cell;
      set(frames.S, x, y, J.size * cell, I.size * cell);
      const shown = ["dS", "P", "S"].find((name) => chip[name]);
      if (!shown) return;
      const most = shown === "P" ? 1 : Math.max(1e-9, ...chip[shown].flatMap((row) => Array.from(row, (v) =>
        Number.isFinite(v) ? Math.abs(v) : 0)));
      chip[shown].forEach((row, i) => row.forEach((value, j) => {
        if (chip.S[i][j] === -Infinity) return;
        const rect = element(current, "rect", { x: x + j * cell + 0.5, y: y + i * cell + 0.5, width: cell - 1,
                                                height: cell - 1, class: value < 0 ? "negative" : "" });
        rect.style.fillOpacity = (0.12 + 0.85 * Math.min(1, Math.abs(value) / most)).toFixed(3);
        rect.tile = { name: shown, t: sequence.begin + I.begin + i, e: sequence.begin + J.begin + j, value };
      }));
    }

    return { update, frameOf: (name) => frames[name] };
  }

  Object.assign(Tiles, { makeMap });
})((globalThis.Tiles ??= {}));
