"use strict";
// Drawing: elements, numbers with units, and the plots as SVG. Knows nothing of what the figures mean; called by panels.js.

function add(parent, tag, attributes = {}, ...children) {
  const svg = tag === "svg" || parent instanceof SVGElement;
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children); // texts stay texts, whatever a model or a client is called
  parent.append(made);
  return made;
}

// -- numbers, with honest units ------------------------------------------------------------------------------------------

const digits = (value) => (Math.abs(value) >= 100 || value === 0 ? 0 : Math.abs(value) >= 10 ? 1 : 2);
const number = (value, places = digits(value)) =>
  value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
const whole = (value) => number(value, 0);
const rate = (value) => number(value, value >= 100 || value === 0 ? 0 : 1);
const percent = (share) => (share > 0 && share < 0.001 ? "< 0.1 %" : `${number(100 * share, share >= 0.0995 || share === 0 ? 0 : 1)} %`);

function split(ms) { // [number, unit]: where both stand apart
  if (ms === null || ms === undefined) return ["–", ""];
  return ms >= 1000 ? [number(ms / 1000), "s"] : ms >= 1 ? [number(ms), "ms"] : [number(1000 * ms), "µs"];
}
const time = (ms) => split(ms).join(" ").trim();
function short(ms, before = null) { // without the unit where it stands before one that has it, too
  const [value, unit] = split(ms);
  const shown = unit === "ms" && ms >= 10 ? whole(ms) : value;
  return before !== null && split(before)[1] === unit ? shown : `${shown} ${unit}`;
}

function si(value, unit, places) {
  const step = Math.max(0, Math.min(5, Math.floor(Math.log10(Math.max(value, 1)) / 3)));
  return `${number(value / 1000 ** step, places)} ${["", "k", "M", "G", "T", "P"][step]}${unit}`;
}

function ago(seconds) {
  return seconds < 1.5 ? "now" : seconds < 120 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

// -- scales ----------------------------------------------------------------------------------------------------------------

function ticks(most, count = 4) { // from 0 to at least `most`, at round steps
  const raw = Math.max(most, 1e-9) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.9999);
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, i) => i * step);
}

function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power++) found.push(10 ** power);
  return found;
}

// -- a plot's place ----------------------------------------------------------------------------------------------------------

// A place for a plot in `section`: draw(figures) calls drawing(svg, width, height, figures, cursor), again when its width changes or somebody points
// at it. pick(figures, x, width) says at what (an index) a pointer at x is; arrow keys move from there; read(figures, index) tells it in words.
function makePlot(section, height, label, drawing, pick, read) {
  const host = add(section, "div", { class: "plot", tabindex: pick ? 0 : null, role: "img" });
  const readout = pick ? add(section, "p", { class: "readout", "aria-live": "polite" }) : null;
  let shown = null, cursor = null, width = 0;

  function draw(figures = shown) {
    shown = figures;
    if (figures === null || !width) return;
    const tall = typeof height === "function" ? height(figures, width) : height;
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    svg.setAttribute("height", tall);
    svg.setAttribute("aria-hidden", "true");
    drawing(svg, width, tall, figures, cursor);
    host.replaceChildren(svg);
    host.setAttribute("aria-label", label(figures));
    if (readout) {
      readout.replaceChildren();
      read(readout, figures, cursor);
    }
  }
  function point(index) {
    cursor = index;
    draw();
  }
  if (pick) {
    host.addEventListener("pointermove", (event) => shown && point(pick(shown, event.offsetX, event.offsetY, width)));
    host.addEventListener("pointerleave", () => point(null));
    host.addEventListener("blur", () => point(null));
    host.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
      if (event.key === "Escape") point(null);
      if (!step || !shown) return;
      event.preventDefault();
      const count = shown.count();
      point(cursor === null ? (step < 0 ? count - 1 : 0) : Math.max(0, Math.min(count - 1, cursor + step)));
    });
  }
  new ResizeObserver(([entry]) => {
    width = Math.floor(entry.contentRect.width);
    draw();
  }).observe(host);
  return draw;
}

const EDGE = { left: 44, right: 8, top: 10, bottom: 22 };

function frame(svg, width, height, marks, most, show) { // grid of a plot over time; returns y(value)
  const y = (value) => height - EDGE.bottom - (value / most) * (height - EDGE.bottom - EDGE.top);
  for (const mark of marks) {
    add(svg, "line", { class: mark ? "grid" : "axis", x1: EDGE.left, x2: width - EDGE.right, y1: y(mark), y2: y(mark) });
    add(svg, "text", { x: EDGE.left - 7, y: y(mark) + 4, "text-anchor": "end" }, show(mark));
  }
  return y;
}

const timeX = (width, span) => (age) => width - EDGE.right - (age / span) * (width - EDGE.left - EDGE.right);
const ageAt = (x, width, span) => ((width - EDGE.right - x) / (width - EDGE.left - EDGE.right)) * span;

function timeAxis(svg, width, height, span) {
  const x = timeX(width, span);
  const count = width < 420 ? 2 : 4;
  for (let i = 0; i <= count; i++) {
    const age = (span * i) / count;
    const anchor = i === 0 ? "end" : i === count ? "start" : "middle";
    add(svg, "text", { x: x(age), y: height - 5, "text-anchor": anchor }, i ? `${number(age, age % 1 ? 1 : 0)} s ago` : "now");
  }
}

// rows: [{age, values by name}], from old to new; names from the bottom to the top; values sum to 1. Rows apart by more than a second leave a gap.
function stack(svg, width, height, rows, names, colour, span) {
  const y = frame(svg, width, height, [0, 0.25, 0.5, 0.75, 1], 1, (v) => `${100 * v} %`);
  const x = timeX(width, span);
  for (const run of runs(rows)) {
    let below = run.map(() => 0);
    for (const name of names) {
      const above = run.map((row, i) => below[i] + (row.values[name] || 0));
      if (above.some((value, i) => value - below[i] > 0.0005)) {
        const top = run.map((row, i) => `${x(row.age).toFixed(1)},${y(above[i]).toFixed(1)}`);
        const bottom = run.map((row, i) => `${x(row.age).toFixed(1)},${y(below[i]).toFixed(1)}`).reverse();
        add(svg, "polygon", { points: [...top, ...bottom].join(" "), fill: colour(name), "data-part": name });
      }
      below = above;
    }
  }
  timeAxis(svg, width, height, span);
}

function runs(rows) {
  const found = [];
  for (const row of rows) {
    const run = found.at(-1);
    if (run && run.at(-1).age - row.age < 1.6) run.push(row);
    else found.push([row]);
  }
  // a second by itself is as wide as a second
  return found.map((run) => (run.length > 1 ? run : [{ ...run[0], age: run[0].age + 0.5 }, { ...run[0], age: run[0].age - 0.5 }]));
}

function lines(svg, width, height, rows, names, colour, span, show = rate) {
  const marks = ticks(Math.max(4, ...rows.flatMap((row) => names.map((name) => row.values[name] || 0))));
  const y = frame(svg, width, height, marks, marks.at(-1), show);
  const x = timeX(width, span);
  for (const name of [...names].reverse()) {
    for (const run of runs(rows)) {
      const along = run.map((row) => `${x(row.age).toFixed(1)},${y(row.values[name] || 0).toFixed(1)}`);
      const base = [`${x(run.at(-1).age).toFixed(1)},${y(0)}`, `${x(run[0].age).toFixed(1)},${y(0)}`];
      add(svg, "polygon", { points: [...along, ...base].join(" "), fill: colour(name), opacity: 0.13 });
      add(svg, "polyline", { points: along.join(" "), fill: "none", stroke: colour(name), "stroke-width": 1.8, "stroke-linejoin": "round" });
    }
  }
  timeAxis(svg, width, height, span);
}

function cursorLine(svg, x, height) {
  add(svg, "line", { class: "cursor", x1: x, x2: x, y1: EDGE.top, y2: height - EDGE.bottom });
}
