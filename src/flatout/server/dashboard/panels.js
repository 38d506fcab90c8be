// The panels: what is drawn of which figures, and in which words. Each has a function of `f`: {model, points, span, url, name}, where model is what
// /ledger says of one model and points are its series' seconds, from old to new. Called by live.js.

const SPAN = 120; // seconds that plots over time show
const $ = (id) => document.getElementById(id);
const HOST = "host_";
const { parts: WORDS, always: ALWAYS } = JSON.parse($("words").textContent); // ledger/words.py
const PARTS = Object.entries(WORDS).map(([key, [name, what]]) => [key, name, what]); // from the bottom of the stack to its top
const partColour = (key) => `var(--${{ floor_bandwidth: "memory", floor_compute: "compute" }[key] || (key.startsWith(HOST) ? "host" : key)})`;
const STACK = PARTS.map(([key]) => key);
// parts of a request (ledger/account.py), in order
const REQUEST = {
  accept: ["residual", "accept"], tokenise: ["sample", "tokenise"], queue: ["kernels", "queue"], prefill: ["compute", "prefill"],
  decode: ["memory", "decode"], preempted: ["host", "preempted"], detokenise: ["communication", "detokenise"],
  client: ["launch", "client"], reply: ["padding", "reply"], awaited: ["underway", "first token awaited"],
};

const swatch = (parent, colour, kind = "") => add(parent, "i", { class: `swatch ${kind}`, style: `background: ${colour}`, "aria-hidden": "true" });

function legend(section, entries) {
  const list = add(section, "ul", { class: "legend" });
  for (const [colour, text, kind] of entries) swatch(add(list, "li", {}, text), colour, kind).parentNode.prepend(list.lastChild.lastChild);
  return list;
}

function headOf(section, note) { // its title's row, with a note beside it
  const row = document.createElement("div");
  row.className = "head";
  section.prepend(row);
  row.append(section.querySelector("h2"));
  if (note) add(row, "p", { class: "note" }, note);
  return row;
}

function choice(parent, label, options, chosen, change) { // buttons of which one is pressed
  const group = add(parent, "span", { class: "choice", role: "group", "aria-label": label });
  for (const [key, text] of options) {
    const button = add(group, "button", { type: "button", "aria-pressed": String(key === chosen) }, text);
    button.onclick = () => {
      for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
      change(key);
    };
  }
}

function rows(table, heads, lines) { // a table anew: lines are {cells, class}; a cell is a text or a function of its td
  table.replaceChildren();
  const head = add(add(table, "thead"), "tr");
  for (const text of heads) add(head, "th", { scope: "col" }, text);
  const body = add(table, "tbody");
  for (const line of lines) {
    const row = add(body, "tr", { class: line.class });
    for (const cell of line.cells) typeof cell === "function" ? cell(add(row, "td")) : add(row, "td", {}, cell);
  }
}

const shares = (point) => {
  const whole = Object.values(point.parts).reduce((a, b) => a + b, 0) || 1;
  return Object.fromEntries(Object.entries(point.parts).map(([key, s]) => [key, Math.max(0, s) / whole]));
};
const over = (f, values) => ({ rows: f.points.map((p) => ({ age: f.age(p), values: values(p) })), count: () => f.points.length });
const nearest = (figures, x, y, width) => {
  const age = ageAt(x, width, SPAN);
  let best = null;
  figures.rows.forEach((row, i) => { if (best === null || Math.abs(row.age - age) < Math.abs(figures.rows[best].age - age)) best = i; });
  return best;
};
const pointed = (svg, width, height, rows, cursor) =>
  cursor !== null && rows[cursor] && cursorLine(svg, timeX(width, SPAN)(rows[cursor].age), height);

function tell(parent, pieces) { // [name, value] pairs in a line
  pieces.forEach(([name, value], i) => {
    parent.append(i ? " · " : "", name ? `${name} ` : "");
    add(parent, "b", {}, value);
  });
}

// -- the verdict and the tiles -----------------------------------------------------------------------------------------------

let toldVerdict = "";
function verdictPanel(f) {
  const section = $("verdict"), found = f.model.verdict || [];
  section.hidden = !found.length;
  const text = JSON.stringify(found);
  if (!found.length || text === toldVerdict) return; // what is open stays open
  toldVerdict = text;
  const { open, firstChild: summary } = section.querySelector("details") || {}, focused = summary && summary === document.activeElement;
  section.replaceChildren();
  const [first, ...others] = found;
  section.classList.toggle("healthy", first.healthy);
  add(section, "h2", { id: "h-verdict" }, `Verdict: ${first.constraint}`);
  add(section, "p", { class: "sentence" }, first.sentence);
  if (first.evidence.length) {
    const list = add(section, "ul", { class: "evidence" });
    for (const e of first.evidence) add(list, "li", {}, "").append(spanOf(e.what), e.shown || `${number(e.value)} ${e.unit}`.trim());
  }
  const list = document.createElement("dl");
  for (const [name, text] of [["do", first.remedy], ["gain", first.gain], ["unless", first.unless]]) {
    if (text) add(list, "dt", {}, name), add(list, "dd", {}, text);
  }
  if (list.children.length) section.append(list);
  if (others.length || first.unseen.length) {
    const more = add(section, "details", { open });
    const head = add(more, "summary", {}, others.length ? `${others.length} more` : "Not seen");
    if (focused) head.focus();
    for (const other of others) {
      const line = add(more, "p");
      add(line, "b", {}, `${other.constraint}. `);
      line.append([other.sentence, other.remedy && `Do: ${other.remedy}.`, other.gain && `Gain: ${other.gain}.`].filter(Boolean).join(" "));
    }
    if (first.unseen.length) add(more, "p", { class: "note" }, `Not seen: ${first.unseen.join("; ")}.`);
  }
}
function spanOf(text) {
  const made = document.createElement("span");
  made.append(text);
  return made;
}

const tiles = {};
function tile(key, title) {
  const host = add($("now"), "div", { class: "tile", id: `tile-${key}` });
  add(host, "h2", {}, title);
  const value = add(host, "div", { class: "value" }), note = add(host, "p", { class: "note" });
  let meter = null;
  tiles[key] = (shown, unit, says, share = null) => {
    value.replaceChildren(shown);
    if (unit) add(value, "small", {}, unit);
    note.textContent = says;
    if (share !== null) (meter = meter || add(add(host, "div", { class: "meter", "aria-hidden": "true" }), "i")).style.width = `${100 * Math.min(1, share)}%`;
  };
}

function tilesPanel(f) {
  const { state, latency, windows } = f.model;
  const last = f.points.slice(-3);
  const mean = (key) => last.reduce((sum, p) => sum + p[key], 0) / Math.max(1, last.length);
  tiles.speed(rate(mean("sampled")), "tok/s", `prompt ${rate(mean("prefill"))} tok/s`);
  const waiting = Object.values(state.waiting).reduce((a, b) => a + b, 0);
  tiles.load(whole(state.running), "running", `${whole(waiting)} waiting · ${whole(state.in_flight)} in flight`);
  for (const [key, each] of [["ttft", latency.ttft], ["tpot", latency.tpot]]) {
    tiles[key](...split(each.p50), each.count ? `p90 ${short(each.p90, each.p99)} · p99 ${short(each.p99)}` : `nothing in ${latency.seconds} s`);
  }
  tiles.blocks(number(100 * state.blocks, 0), "%", `${whole(state.blocks_used)} of ${whole(state.blocks_total)} blocks`, state.blocks);
  const w = windows["10s"], loaded = w.seconds - w.parts.idle - w.parts.underway;
  const roof = loaded > 0 ? w.of_floor : 0;
  const says = f.table === null ? "no ceilings are known here" : !roof ? "no load in 10 s" : roof > 1 ? "over it: measured too low" : "floor / loaded time";
  tiles.roof(roof ? number(100 * roof, 0) : "–", roof ? "%" : "", says, roof);
}

// -- the ledger ----------------------------------------------------------------------------------------------------------------

let ledgerWindow, latest = null;
let drawLedger, ledgerTable, ledgerNote;
function makeLedger(report) {
  const section = $("ledger"), head = headOf(section, "Each second of wall time by what it went into.");
  const windows = [["10s", "10 s"], ["60s", "60 s"]]; // a report's window is all that there was
  choice(head, "window of the table", report ? [...windows, ["start", "since the start"]] : windows, ledgerWindow = report ? "start" : "10s", (key) => {
    ledgerWindow = key;
    if (latest) ledgerPanel(latest);
  });
  const halves = add(section, "div", { class: "split" });
  drawLedger = makePlot(add(halves, "div"), (_, width) => (width < 500 ? 210 : 290),
    (d) => `Step ledger of the last ${SPAN} seconds, stacked shares of wall time. Arrow keys move along it.`,
    (svg, width, height, d, cursor) => {
      stack(svg, width, height, d.rows, STACK, partColour, SPAN);
      pointed(svg, width, height, d.rows, cursor);
    },
    nearest,
    (readout, d, cursor) => {
      const row = d.rows[cursor];
      if (!row) return readout.append("Point at the plot, or move along it with the arrow keys.");
      tell(readout, [[`${ago(row.age)}:`, ""], ...PARTS.filter(([key]) => row.values[key] >= 0.005).map(([key, name]) => [name, percent(row.values[key])])]);
    });
  const side = add(halves, "div");
  ledgerTable = add(side, "table");
  ledgerNote = add(side, "p", { class: "note" });
}

function ledgerPanel(f) {
  latest = f;
  drawLedger(over(f, shares));
  const w = f.model.windows[ledgerWindow];
  const shown = PARTS.filter(([key]) => w.parts[key] / w.seconds >= 0.0005 || ALWAYS.includes(key));
  rows(ledgerTable, ["part", "share", "a step"], shown.map(([key, name, what]) => ({
    class: w.parts[key] > 0 ? "" : "nothing",
    cells: [
      (cell) => { swatch(cell, partColour(key)); cell.append(name); cell.title = what; },
      percent(Math.max(0, w.parts[key]) / (w.seconds || 1)),
      w.steps && !["idle", "underway"].includes(key) ? time((1000 * w.parts[key]) / w.steps) : "",
    ],
  })));
  const since = ledgerWindow === "start" ? "Since the start" : `Last ${number(w.seconds, 0)} s`;
  ledgerNote.textContent = `${since}: ${whole(w.steps)} steps` + (w.steps ? `, ${number(w.rows, 1)} rows in a step's mean.` : ".");
}

// -- speed and latency -----------------------------------------------------------------------------------------------------------

let drawSpeed, drawLatency, latencyTable;
const SPEED = { sampled: ["var(--memory)", "written"], prefill: ["var(--compute)", "prompt"] };
const speedColour = (key) => SPEED[key][0];
function makeSpeed() {
  const section = $("speed");
  headOf(section, "By the second.");
  drawSpeed = makePlot(section, 190, () => `Tokens written and prompt tokens read in each of the last ${SPAN} seconds.`,
    (svg, width, height, d, cursor) => {
      lines(svg, width, height, d.rows, Object.keys(SPEED), speedColour, SPAN);
      pointed(svg, width, height, d.rows, cursor);
    },
    nearest,
    (readout, d, cursor) => {
      const row = d.rows[cursor];
      if (row) return tell(readout, [[`${ago(row.age)}:`, ""], ["written", `${rate(row.values.sampled)} tok/s`], ["prompt", `${rate(row.values.prefill)} tok/s`]]);
      for (const [colour, name] of Object.values(SPEED)) { swatch(readout, colour); readout.append(`${name}\u2003`); }
    });
}
const speedPanel = (f) => drawSpeed(over(f, (p) => ({ sampled: p.sampled, prefill: p.prefill })));

const LATENCY = { ttft: ["var(--kernels)", "TTFT"], tpot: ["var(--memory)", "TPOT"] };
function makeLatency() {
  const section = $("latency");
  headOf(section, "Each request of the last 60 s: to its first token, and for each further one.");
  drawLatency = makePlot(section, 134, () => "Time to first token and time per output token of recent requests; the table has their percentiles.",
    (svg, width, height, { latency }) => {
      const values = Object.keys(LATENCY).flatMap((key) => latency[key].points.map(([, ms]) => ms));
      const low = 10 ** Math.floor(Math.log10(Math.max(0.01, Math.min(...values, 10)))), high = 10 ** Math.ceil(Math.log10(Math.max(...values, 100)));
      const y = (ms) => height - EDGE.bottom - (Math.log10(Math.max(ms, low) / low) / Math.log10(high / low)) * (height - EDGE.bottom - EDGE.top);
      for (const mark of decades(low, high)) {
        add(svg, "line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(mark), y2: y(mark) });
        add(svg, "text", { x: EDGE.left - 7, y: y(mark) + 4, "text-anchor": "end" }, mark >= 1000 ? `${mark / 1000} s` : mark >= 1 ? `${mark} ms` : `${1000 * mark} µs`);
      }
      const x = timeX(width, latency.seconds);
      for (const [key, [colour]] of Object.entries(LATENCY)) {
        for (const [age, ms] of latency[key].points) add(svg, "circle", { cx: x(age).toFixed(1), cy: y(ms).toFixed(1), r: 3, fill: colour, opacity: 0.75 });
      }
      timeAxis(svg, width, height, latency.seconds);
    });
  latencyTable = add(section, "table");
}
function latencyPanel(f) {
  const { latency } = f.model;
  drawLatency({ latency });
  rows(latencyTable, ["", "p50", "p90", "p99", "of"], Object.entries(LATENCY).map(([key, [colour, name]]) => ({
    class: latency[key].count ? "" : "nothing",
    cells: [(cell) => { swatch(cell, colour, "round"); cell.append(name); }, ...["p50", "p90", "p99"].map((p) => time(latency[key][p])), whole(latency[key].count)],
  })));
}

// -- roofline, blocks, waiting ---------------------------------------------------------------------------------------------------

let drawRoof, roofNote, roofTable;
const KINDS = { decode: ["var(--memory)", "decode steps"], prefill: ["var(--compute)", "steps with prompts"] };
function makeRoof() {
  const section = $("roof");
  headOf(section);
  drawRoof = makePlot(section, 232, (d) => `Roofline: ${Object.entries(d.points).map(([k, p]) => `${KINDS[k][1]} reach ${percent(p.of_roof)} of the roof`).join(", ") || "no steps in the last 10 s"}.`, roofPlot);
  roofTable = add(section, "table");
  roofNote = add(section, "p", { class: "note" });
}
function roofPlot(svg, width, height, d) {
  const peak = Math.max(...Object.values(d.flops), 0), ridge = peak / d.bandwidth || 100, at = Object.values(d.points);
  const xs = [10 ** Math.floor(Math.log10(Math.min(0.5, ridge / 10, ...at.map((p) => p.intensity / 2)))), 10 ** Math.ceil(Math.log10(Math.max(ridge * 8, ...at.map((p) => p.intensity * 2))))];
  const top = peak ? peak * 2 : d.bandwidth * xs[1];
  const ys = [Math.min(d.bandwidth * xs[0], ...at.map((p) => p.flops_per_s / 2)), top];
  const x = (v) => EDGE.left + (Math.log10(v / xs[0]) / Math.log10(xs[1] / xs[0])) * (width - EDGE.left - EDGE.right);
  const y = (v) => height - 34 - (Math.log10(v / ys[0]) / Math.log10(ys[1] / ys[0])) * (height - 34 - EDGE.top);
  for (const mark of decades(ys[0], ys[1])) {
    add(svg, "line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(mark), y2: y(mark) });
    add(svg, "text", { x: EDGE.left - 7, y: y(mark) + 4, "text-anchor": "end" }, si(mark, "", 0));
  }
  const steps = decades(xs[0], xs[1]);
  for (const mark of steps.filter((_, i) => steps.length < 7 || i % 2 === 0)) {
    add(svg, "line", { class: "grid", x1: x(mark), x2: x(mark), y1: EDGE.top, y2: height - 34 });
    add(svg, "text", { x: x(mark), y: height - 19, "text-anchor": mark === xs[0] ? "start" : mark === xs[1] ? "end" : "middle" }, number(mark, mark < 1 ? -Math.log10(mark) : 0));
  }
  add(svg, "text", { x: width - EDGE.right, y: height - 4, "text-anchor": "end" }, "FLOP / byte");
  add(svg, "text", { x: EDGE.left + 5, y: EDGE.top + 10 }, "FLOP/s");
  const roof = (v) => Math.min(d.bandwidth * v, peak || Infinity);
  const corners = peak ? [xs[0], ridge, xs[1]] : xs;
  add(svg, "polyline", { class: "roofline", points: corners.map((v) => `${x(v)},${y(roof(v))}`).join(" ") });
  for (const [dtype, flops] of Object.entries(d.flops)) {
    if (flops !== peak) add(svg, "line", { class: "ceiling", x1: x(flops / d.bandwidth), x2: x(xs[1]), y1: y(flops), y2: y(flops) });
    add(svg, "text", { x: x(xs[1]) - 2, y: y(flops) - 5, "text-anchor": "end" }, dtype);
  }
  for (const [kind, p] of Object.entries(d.points)) {
    add(svg, "line", { class: "gap", x1: x(p.intensity), x2: x(p.intensity), y1: y(p.flops_per_s), y2: y(roof(p.intensity)) });
    add(svg, "circle", { cx: x(p.intensity), cy: y(p.flops_per_s), r: 5.5, fill: KINDS[kind][0], stroke: "var(--card)", "stroke-width": 2, "data-kind": kind });
  }
}
function roofPanel(f) {
  const d = f.model.roofline;
  roofNote.textContent = d === null ? "No ceilings are known here: flatout doctor hardware measures them." :
    `${d.machine}: ${si(d.bandwidth, "B/s")} read, ${d.measured ? "measured" : "by its data sheet"}. Steps of the last 10 s.`;
  if (d === null) return;
  drawRoof(d);
  const found = Object.entries(KINDS).map(([kind, [colour, name]]) => [colour, name, d.points[kind]]);
  rows(roofTable, ["", "reached", "of the roof"], found.map(([colour, name, p]) => ({
    class: p ? "" : "nothing",
    cells: [(cell) => { swatch(cell, colour, "round"); cell.append(name); }, p ? si(p.flops_per_s, "FLOP/s") : "–", p ? percent(p.of_roof) : "–"],
  })));
}

const CELLS = 240;
let map, mapLegend, cacheNote;
function makeBlocks() {
  const section = $("blocks");
  headOf(section);
  map = add(section, "div", { class: "map", role: "img" });
  mapLegend = add(section, "table");
  cacheNote = add(section, "div");
}
function blocksPanel(f) {
  const s = f.model.state, total = s.blocks_total, size = f.facts ? f.facts.block_size : 0;
  const cells = Math.min(CELLS, total), each = total / (cells || 1);
  const used = Math.ceil(s.blocks_used / each), cached = Math.min(cells - used, Math.ceil(s.blocks_cached / each));
  if (map.children.length !== cells) map.replaceChildren(...Array.from({ length: cells }, () => document.createElement("i")));
  map.style.gridTemplateColumns = `repeat(${Math.min(24, Math.max(8, cells))}, 1fr)`;
  [...map.children].forEach((cell, i) => { cell.className = i < used ? "used" : i < used + cached ? "cached" : ""; });
  map.setAttribute("aria-label", `Block pool: ${s.blocks_used} of ${total} blocks used by requests, ${s.blocks_cached} cached`);
  const free = total - s.blocks_used - s.blocks_cached, tokens = (blocks) => (size ? `${whole(blocks * size)} tok` : "");
  const kinds = [["used by requests", "var(--memory)", "", s.blocks_used], ["cached, free to take", "color-mix(in srgb, var(--memory) 34%, var(--card))", "", s.blocks_cached], ["free", "", "hollow", free]];
  rows(mapLegend, [each > 1 ? `a square: ${number(each, each % 1 ? 1 : 0)} blocks` : "a square: a block", "blocks", "room"], kinds.map(([name, colour, kind, count]) => ({
    cells: [(cell) => { swatch(cell, colour, kind); cell.append(name); }, whole(count), tokens(count)],
  })));
  cacheNote.replaceChildren();
  add(cacheNote, "h3", {}, "Prefix cache, since the start");
  const list = add(cacheNote, "table");
  const misses = {};
  for (const r of f.model.requests) {
    const why = r.end && r.cache_miss ? r.cache_miss.replace(/ \d+$/, " N") : null;
    if (why) misses[why] = (misses[why] || 0) + 1;
  }
  const most = Object.entries(misses).sort((a, b) => b[1] - a[1]).slice(0, 3);
  rows(list, ["", ""], [
    ["prompt tokens found", s.prefix_queries ? `${percent(s.prefix_hits / s.prefix_queries)} of ${whole(s.prefix_queries)}` : "no prompt yet"],
    ["cached blocks reused for others", whole(s.evictions)],
    ["preemptions", whole(s.preemptions)],
    ...most.map(([why, count]) => [`no more found: ${why}`, `${count} of the last ${f.model.requests.filter((r) => r.end).length}`]),
  ].map((cells) => ({ cells })));
  list.tHead.remove();
}

let waitingHost, drawQueue;
const QUEUE = { waiting: ["var(--kernels)", "waiting"], rows: ["var(--memory)", "running"] };
function makeWaiting() {
  const section = $("waiting");
  headOf(section, "Who is in the queue, and for what.");
  drawQueue = makePlot(section, 160, () => `Requests running and waiting in each of the last ${SPAN} seconds.`,
    (svg, width, height, d, cursor) => {
      lines(svg, width, height, d.rows, Object.keys(QUEUE), (key) => QUEUE[key][0], SPAN, (v) => (v % 1 ? "" : whole(v)));
      pointed(svg, width, height, d.rows, cursor);
    },
    nearest,
    (readout, d, cursor) => {
      const row = d.rows[cursor];
      if (row) return tell(readout, [[`${ago(row.age)}:`, ""], ...Object.entries(QUEUE).map(([key, [, name]]) => [name, number(row.values[key], 1)])]);
      for (const [colour, name] of Object.values(QUEUE)) { swatch(readout, colour); readout.append(`${name}\u2003`); }
    });
  waitingHost = add(section, "div");
}
function waitingPanel(f) {
  drawQueue(over(f, (p) => ({ rows: p.rows, waiting: Object.values(p.waiting).reduce((a, b) => a + b, 0) })));
  const now = f.model.state.waiting, before = f.model.windows["10s"].waiting;
  const reasons = [...new Set([...Object.keys(now), ...Object.keys(before)])].filter((r) => now[r] || before[r] >= 0.05);
  waitingHost.replaceChildren();
  if (!reasons.length) return add(waitingHost, "p", { class: "empty" }, "Nobody waits.");
  const most = Math.max(1, ...reasons.flatMap((r) => [now[r] || 0, before[r] || 0]));
  rows(add(waitingHost, "table", { class: "bars" }), ["for", "", "now", "10 s mean"], reasons.map((reason) => ({
    cells: [
      reason,
      (cell) => { cell.className = "bar"; if (now[reason]) add(cell, "i", { style: `width: ${(100 * now[reason]) / most}%` }); },
      whole(now[reason] || 0), number(before[reason] || 0, 1),
    ],
  })));
}
