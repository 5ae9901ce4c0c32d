// SPDX-License-Identifier: Apache-2.0
// The page: settings, player, keys, the address, and tiles that fly between slow and fast memory. Reads what the other
// scripts add to `Tiles`; nothing reads this one. `Tiles.page` lets tests/site look at the step that is shown.
"use strict";
((Tiles) => {
  const $ = (id) => document.getElementById(id);
  const state = { settings: { ...Tiles.DEFAULTS }, pass: "forward", step: 0, row: 0, model: "every", playing: null };
  const SLIDERS = ["n", "d", "br", "bc"];
  let problem, inputs, answers, steps, map, scales;

  // Built once: the choices of the selects.
  function fillChoices() {
    const option = (value, words) => new Option(words, value);
    for (const side of ["left", "right"]) {
      $(side).append(option(-1, "no bound"),
                     ...Array.from({ length: Tiles.LIMITS.window[1] + 1 }, (_, x) => option(x, x)));
    }
    $("heads").append(...Tiles.HEADS.map((heads) => option(heads, heads.replace("/", " / "))));
    $("seed").append(...Array.from({ length: 8 }, (_, x) => option(x + 1, `seed ${x + 1}`)),
                     option("identity", "identity"));
  }

  const largest = (tensor) => Math.max(1e-9, ...tensor.flatMap((x) => (typeof x === "number" ? [Math.abs(x)]
    : Array.from(x.length && typeof x[0] === "number" ? x : x.flatMap((row) => Array.from(row)), Math.abs))));

  function rebuild() {
    problem = Tiles.makeProblem(state.settings);
    inputs = Tiles.makeInputs(problem);
    answers = Tiles.direct(problem, inputs);
    steps = Tiles.makeSteps(problem, inputs, state.pass);
    scales = { Q: 2, K: 2, V: 2, dO: 2, O: 2 };
    for (const name of ["LSE", "delta", "dQ", "dK", "dV"]) scales[name] = largest(Array.from(answers[name]));
    state.step = Math.min(state.step, steps.length - 1);
    map = Tiles.makeMap($("map"), problem, state.pass, scales, showHover);
    $("step").max = steps.length - 1;
    const last = steps.at(-1).memory, names = state.pass === "forward" ? ["O", "LSE"] : ["dQ", "dK", "dV"];
    const most = Math.max(...names.map((name) => Tiles.difference(last[name], answers[name])));
    $("exact").textContent = `Summed over all tiles, ${names.join(", ").replace(/, (\w+)$/, " and $1")} differ from the
      same formulas without tiles by ${most === 0 ? "nothing" : `at most ${most.toExponential(1)}`}, in float64.`;
    showSettings();
    drawReal();
    show();
  }

  function showSettings() {
    for (const id of SLIDERS) {
      $(id).value = problem[id];
      document.querySelector(`output[for=${id}]`).textContent = problem[id];
      $(id).disabled = problem.identity && (id === "n" || id === "d");
    }
    $("causal").checked = problem.causal;
    $("left").value = problem.left, $("right").value = problem.right;
    if (document.activeElement !== $("lengths")) $("lengths").value = state.settings.lengths;
    $("lengths").disabled = $("heads").disabled = problem.identity;
    $("heads").value = `${problem.hq}/${problem.hk}`;
    const seed = problem.identity ? "identity" : String(problem.seed);
    if (!Array.from($("seed").options).some((option) => option.value === seed)) {  // an address may have any
      $("seed").append(new Option(`seed ${seed}`, seed));
    }
    $("seed").value = seed;
    document.querySelector(`input[name=pass][value=${state.pass}]`).checked = true;
    document.body.dataset.pass = state.pass;
    const bounds = [problem.left, problem.right], bounded = Math.max(...bounds) >= 0;
    const options = [problem.causal && "causal",
                     bounded && `window ${bounds.map((bound) => (bound < 0 ? "∞" : bound)).join("/")}`,
                     problem.sequences.length > 1 && `${problem.sequences.length} sequences`,
                     problem.hq > 1 && `heads ${problem.hq}/${problem.hk}`].filter(Boolean);
    $("summary").textContent = [`${state.pass === "forward" ? "Forward" : "Backward"}, ${problem.n} tokens`,
                                `tiles ${problem.br} × ${problem.bc}`, ...options].join(", ");
  }

  function show() {
    const step = steps[state.step], words = Tiles.wordsOf(problem, step);
    const rows = step.I?.size ?? 0;
    state.row = Math.min(state.row, Math.max(0, rows - 1));
    $("title").textContent = words.title;
    $("formula").innerHTML = words.formula;
    $("text").textContent = words.text.replace(/\s+/g, " ");
    map.update(step, inputs);
    Tiles.drawChip($("chip"), problem, step, scales, state.row);
    Tiles.drawTraffic($("traffic"), problem, step, steps.length, state.model, steps.at(-1).traffic);
    const lens = rows ? Tiles.rowInNumbers(problem, step, state.row) : "";
    $("lens").classList.toggle("idle", !lens);
    $("next-row").textContent = rows ? `Query ${step.sequence.begin + step.I.begin + state.row}` : "Query";
    $("lens-text").innerHTML = lens || "nothing is computed in this step";
    const many = problem.hq > 1 ? `query head ${step.h}, KV head ${step.kv}` : "";
    const packed = problem.sequences.length > 1 ? `sequence ${step.sequence.index}` : "";
    $("heads-shown").textContent = [packed, many].filter(Boolean).join(" · ");
    const tile = [["queries", step.I], ["keys", step.J]].filter(([, range]) => range);
    $("tile-shown").textContent =
      tile.map(([what, range]) => `${what} ${Tiles.rangeText(range, step.sequence)}`).join(" × ");
    $("step").value = state.step;
    $("step").setAttribute("aria-valuetext", `${state.step + 1} of ${steps.length}: ${words.title}`);
    $("step").style.setProperty("--share", `${(100 * state.step) / Math.max(1, steps.length - 1)}%`);
    $("count").textContent = `${state.step + 1} / ${steps.length}`;
    keepAddress();
  }

  function showHover(tile) {
    $("hover").textContent = "";
    if (!tile || tile.value === undefined || Number.isNaN(tile.value)) return;
    const place = ["S", "P", "dS"].includes(tile.name) ? `query ${tile.t}, key ${tile.e}`
      : tile.depth > 1 ? `token ${tile.t}, dimension ${tile.e}` : `token ${tile.t}`;
    $("hover").textContent = `${tile.name}: ${place} = ${Tiles.number(tile.value, 6)}`;
  }

  function drawReal() {
    const n = 2 ** Number($("real").value);
    document.querySelector("output[for=real]").textContent = `N = ${n.toLocaleString("en")}`;
    $("real-mask").textContent = problem.causal ? "causal" : "no mask";
    Tiles.drawRealSize($("real-size"), problem, state.pass, n);
  }

  // A coloured sheet from where a tile lies to where it is going. Only for single steps, and only if motion is welcome.
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  function fly(step) {
    if (calm.matches || !Element.prototype.animate) return;
    const cards = (name) => document.querySelector(`#chip table[data-name="${name}"] tbody`);
    for (const [moves, incoming] of [[step.loads, true], [step.stores, false]]) {
      for (const { name } of moves) {
        const frame = map.frameOf(name), card = cards(name);
        if (!frame || !card) continue;
        const ends = [frame.getBoundingClientRect(), card.getBoundingClientRect()];
        const [from, to] = incoming ? ends : ends.reverse();
        const sheet = document.createElement("div");
        sheet.className = `sheet ${name}`;
        document.body.append(sheet);
        const at = (box, opacity) => ({ opacity, transform: `translate(${box.left}px, ${box.top}px)`,
                                        width: `${box.width}px`, height: `${box.height}px` });
        const time = Math.min(520, Number($("speed").value) * 0.7);
        sheet.animate([at(from, 0.75), at(to, 0.15)], { duration: time, easing: "cubic-bezier(.4,0,.2,1)" })
          .finished.finally(() => sheet.remove());
      }
    }
  }

  function go(step, moving = false) {
    const target = Math.max(0, Math.min(steps.length - 1, step));
    if (target === state.step) return false;
    const single = moving && target === state.step + 1;
    state.step = target;
    show();
    if (single) fly(steps[target]);
    return true;
  }

  // The first step of the next tile, or of the one before.
  function goTile(direction) {
    const begins = (k) => /^(load-k|load-kv|load-rows|write-o|write-kv)$/.test(steps[k].kind);
    let k = state.step + direction;
    while (k > 0 && k < steps.length - 1 && !begins(k)) k += direction;
    go(k);
  }

  function play(on) {
    clearInterval(state.playing);
    if (on && state.step === steps.length - 1) go(0);
    state.playing = on ? setInterval(() => go(state.step + 1, true) || play(false), Number($("speed").value)) : null;
    document.body.classList.toggle("playing", on);
    $("play").setAttribute("aria-label", on ? "Pause" : "Play");
  }

  function setPass(pass) {
    if (pass === state.pass) return;
    Object.assign(state, { pass, step: 0 });
    rebuild();
  }

  function setTheme(dark) {
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    try {
      localStorage.setItem("tessera-theme", dark ? "dark" : "light");
    } catch { /* a browser that keeps nothing for this page */ }
  }
  const isDark = () => (document.documentElement.dataset.theme
    ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

  // The address: #n=16&causal=1&pass=backward&step=7. What is missing has its default.
  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    const settings = { ...Tiles.DEFAULTS };
    for (const name of [...SLIDERS, "left", "right"]) {
      if (given.has(name) && Number.isFinite(Number(given.get(name)))) settings[name] = Number(given.get(name));
    }
    if (given.has("causal")) settings.causal = given.get("causal") !== "0";
    if (given.has("lengths")) settings.lengths = given.get("lengths");
    if (given.has("heads")) settings.heads = given.get("heads");
    const seed = given.get("seed");
    if (seed !== null) settings.seed = seed === "identity" ? seed : Number(seed) || 1;
    state.settings = settings;
    state.pass = given.get("pass") === "backward" ? "backward" : "forward";
    state.step = Math.max(0, Number(given.get("step")) - 1 || 0);
    state.row = Math.max(0, Number(given.get("row")) || 0);
  }

  function keepAddress() {
    const kept = new URLSearchParams();
    for (const [name, value] of Object.entries(state.settings)) {
      if (value !== Tiles.DEFAULTS[name]) kept.set(name, name === "causal" ? Number(value) : value);
    }
    if (state.pass === "backward") kept.set("pass", "backward");
    if (state.step > 0) kept.set("step", state.step + 1);
    if (state.row > 0) kept.set("row", state.row);
    try {
      history.replaceState(null, "", `#${kept}`);
    } catch { /* too many changes a second for some browsers: the address follows with the next one */ }
  }

  function listen() {
    const change = (name, value) => {
      state.settings = { ...state.settings, [name]: value };
      state.step = 0;
      play(false);
      rebuild();
    };
    for (const id of SLIDERS) $(id).oninput = () => change(id, Number($(id).value));
    for (const id of ["left", "right"]) $(id).onchange = () => change(id, Number($(id).value));
    $("causal").onchange = () => change("causal", $("causal").checked);
    $("heads").onchange = () => change("heads", $("heads").value);
    $("seed").onchange = () => change("seed", $("seed").value === "identity" ? "identity" : Number($("seed").value));
    $("lengths").oninput = () => change("lengths", $("lengths").value);
    $("lengths").onblur = () => {
      const used = problem.sequences.map((sequence) => sequence.length).join(", ");
      if (state.settings.lengths.trim()) change("lengths", used);
    };
    for (const input of document.querySelectorAll("input[name=pass]")) {
      input.onchange = () => (play(false), setPass(input.value));
    }
    for (const input of document.querySelectorAll("input[name=model]")) {
      input.onchange = () => ((state.model = input.value), show());
    }
    $("real").oninput = drawReal;
    $("step").oninput = () => (play(false), go(Number($("step").value)));
    $("first").onclick = () => (play(false), go(0));
    $("back").onclick = () => (play(false), go(state.step - 1));
    $("next").onclick = () => (play(false), go(state.step + 1, true));
    $("last").onclick = () => (play(false), go(steps.length - 1));
    $("play").onclick = () => play(!state.playing);
    $("speed").onchange = () => state.playing && play(true);
    $("theme").onclick = () => setTheme(!isDark());
    const nextRow = () => {
      const rows = steps[state.step].I?.size ?? 1;
      state.row = (state.row + 1) % rows;
      show();
    };
    $("next-row").onclick = nextRow;
    $("chip").onclick = (event) => {
      const row = Number(event.target.dataset?.row ?? -1);
      if (row >= 0) (state.row = row), show();
    };
    $("settings").onsubmit = (event) => event.preventDefault();
    addEventListener("hashchange", () => (readAddress(), rebuild()));
    const keys = {
      ArrowRight: (e) => (e.shiftKey ? goTile(1) : go(state.step + 1, true)),
      ArrowLeft: (e) => (e.shiftKey ? goTile(-1) : go(state.step - 1)),
      Home: () => go(0), End: () => go(steps.length - 1),
      f: () => setPass("forward"), b: () => setPass("backward"), r: nextRow, d: () => setTheme(!isDark()),
    };
    addEventListener("keydown", (event) => {
      const { target } = event, typing = target.matches("input[type=text], select");
      if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
      if (event.key === " " && !target.matches("button, input, a")) {
        event.preventDefault();
        play(!state.playing);
      } else if (keys[event.key] && !(target.matches("input") && target.id !== "step" && event.key.length > 1)) {
        event.preventDefault();
        play(false);
        keys[event.key](event);
      }
    });
  }

  try {
    const theme = localStorage.getItem("tessera-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch { /* as in setTheme */ }
  fillChoices();
  if (matchMedia("(max-width: 640px)").matches) $("problem").open = false;
  readAddress();
  listen();
  rebuild();
  Tiles.page = { state, current: () => ({ problem, inputs, step: steps[state.step], steps: steps.length }) };
})(globalThis.Tiles);
