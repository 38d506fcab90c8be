// The waterfall of requests, the ops of deep steps, and how the server was started. As panels.js, whose words it uses. Called by live.js.

const ROW = 19;
let drawRequests, requestsBy = "clock", requestsLegend, requestsEmpty;

function partsOf(request) { // [name, ms], in order; what a running request waits for is known with its first token
  const found = {};
  for (const [name, ms] of Object.entries(request.parts_ms)) {
    const awaited = !request.end && request.ttft_ms === null && !["accept", "tokenise"].includes(name);
    const key = awaited ? "awaited" : name.split(" ")[0];
    found[key] = (found[key] || 0) + ms;
  }
  return Object.entries(found).filter(([, ms]) => ms > 0);
}

function makeRequests() {
  const section = $("requests"), head = headOf(section, "The newest on top; each bar's parts sum to the request's time.");
  choice(head, "bars by", [["clock", "by the clock"], ["start", "from each start"]], requestsBy, (key) => {
    requestsBy = key;
    if (latest) requestsPanel(latest);
  });
  requestsEmpty = add(section, "p", { class: "empty" }, "No request yet.");
  drawRequests = makePlot(section, (d) => EDGE.top + d.requests.length * ROW + EDGE.bottom,
    (d) => `Waterfall of the last ${d.requests.length} requests. Arrow keys move from one to the next.`,
    waterfall,
    (d, x, y) => Math.max(0, Math.min(d.requests.length - 1, Math.floor((y - EDGE.top) / ROW))),
    (readout, d, cursor) => {
      const r = d.requests[cursor];
      if (!r) return readout.append("Point at a request, or move with the arrow keys.");
      const queue = Object.entries(r.parts_ms).filter(([name, ms]) => name.startsWith("queue") && ms > 0);
      tell(readout, [
        [r.id, r.end || "running"], ["whole", time(r.total_ms)],
        ...partsOf(r).filter(([name, ms]) => ms >= 0.0005 * r.total_ms && name !== "queue").map(([name, ms]) => [REQUEST[name][1], time(ms)]),
        ...queue.map(([name, ms]) => [name, time(ms)]),
        ["TTFT", time(r.ttft_ms)], ["TPOT", time(r.tpot_ms)],
        ["prompt", `${whole(r.prompt_tokens)} tok, ${whole(r.cached_tokens)} cached${r.cache_miss ? ` (${r.cache_miss})` : ""}`],
        ["written", `${whole(r.completion_tokens)} tok`],
        ...(r.preemptions ? [["preemptions", whole(r.preemptions)]] : []),
      ]);
    });
  requestsLegend = legend(section, Object.values(REQUEST).map(([colour, name]) => [`var(--${colour})`, name]));
}

function waterfall(svg, width, height, { requests, by }, cursor) {
  const narrow = width < 560, left = narrow ? 8 : 96, right = narrow ? 74 : 150;
  const starts = requests.map((r) => (by === "clock" ? -r.age_ms : 0));
  const first = Math.min(...starts), last = by === "clock" ? 0 : Math.max(...requests.map((r) => r.total_ms));
  const x = (ms) => left + ((ms - first) / (last - first || 1)) * (width - left - right);
  const marks = ticks((last - first) / 1000, narrow ? 3 : 5).filter((s) => 1000 * s <= last - first);
  marks.forEach((s, i) => {
    const at = by === "clock" ? x(-1000 * s) : x(1000 * s);
    const text = by === "clock" ? (s ? `${number(s, s % 1 ? 1 : 0)} s ago` : "now") : `${number(s, s % 1 ? 2 : 0)} s`;
    add(svg, "line", { class: "grid", x1: at, x2: at, y1: EDGE.top - 4, y2: height - EDGE.bottom });
    add(svg, "text", { x: at, y: height - 6, "text-anchor": at < left + 20 ? "start" : "middle" }, text);
  });
  requests.forEach((r, i) => {
    const y = EDGE.top + i * ROW;
    if (i === cursor) add(svg, "rect", { x: 0, y: y - 1, width, height: ROW, fill: "var(--grid)" });
    if (!narrow) add(svg, "text", { x: 2, y: y + 13 }, `…${r.id.slice(-9)}`);
    let at = starts[i];
    for (const [name, ms] of partsOf(r)) {
      const wide = Math.max(x(at + ms) - x(at), 0.4);
      add(svg, "rect", { x: x(at).toFixed(2), y: y + 3, width: wide.toFixed(2), height: ROW - 7, fill: `var(--${REQUEST[name][0]})`, "data-part": name });
      at += ms;
    }
    const says = r.tpot_ms === null ? (r.end || "…") : narrow ? time(r.total_ms) : `${time(r.total_ms)} · ${whole(r.completion_tokens)} tok${r.end ? "" : " …"}`;
    add(svg, "text", { x: width - 2, y: y + 13, "text-anchor": "end" }, says);
  });
}

function requestsPanel(f) {
  const requests = f.model.requests, d = { requests, by: requestsBy, count: () => requests.length };
  requestsEmpty.hidden = requests.length > 0;
  if (requests.length) drawRequests(d);
  const there = new Set(requests.flatMap((r) => partsOf(r).map(([name]) => name)));
  Object.keys(REQUEST).forEach((name, i) => { requestsLegend.children[i].hidden = !there.has(name); });
}

let opsTable, opsEmpty, toldOps = "";
const DEEP = 50;
function makeOps(ask) {
  const section = $("ops"), head = headOf(section, "Time of each op beside its floor, from steps that told their ops apart.");
  if (ask) add(head, "button", { type: "button", id: "time-ops", title: "they run op by op meanwhile, a little slower" }, `Time ${DEEP} steps`).onclick = () => ask(DEEP);
  opsEmpty = add(section, "p", { class: "empty" }, `No step of the last 60 s told its ops apart.`);
  opsTable = add(section, "table");
}
function opsPanel(f) {
  const w = f.model.windows["60s"], ops = w.ops.slice(0, 12), text = JSON.stringify(ops);
  opsEmpty.hidden = ops.length > 0;
  opsTable.hidden = !ops.length;
  if (!ops.length || text === toldOps) return;
  toldOps = text;
  const whole = ops.reduce((sum, op) => sum + op.seconds, 0);
  rows(opsTable, ["op", "of ops' time", "of its floor", "over the floor, a step"], ops.map((op) => ({
    cells: [op.label, percent(op.seconds / whole), op.floor ? percent(op.floor / op.seconds) : "–", time((1000 * Math.max(0, op.seconds - op.floor)) / w.steps)],
  })));
}

let toldStart = "";
function startPanel(f) {
  const lines = f.start_lines || [];
  $("start").hidden = !lines.length;
  if (!lines.length || lines.join() === toldStart) return;
  toldStart = lines.join();
  $("start").querySelector("pre")?.remove();
  add($("start"), "pre", {}, lines.join("\n"));
}

function welcomePanel(f) {
  const section = $("welcome"), asked = f.model.totals.requests > 0 || f.model.state.steps > 0;
  section.hidden = asked || Boolean(f.model.trouble);
  if (section.hidden || section.children.length) return;
  add(section, "h2", { id: "h-welcome" }, "Ready, and no request yet");
  add(section, "p", { class: "note" }, "Everything below comes to life with the first one:");
  const body = JSON.stringify({ model: f.name, messages: [{ role: "user", content: "hi" }] });
  add(section, "pre", {}, `curl ${f.url}v1/chat/completions -H 'content-type: application/json' \\\n  -d '${body.replaceAll("'", "'\\''")}'`);
}
