// Where the figures come from: polling /ledger while somebody looks, or, in a report, the page itself. Also the theme, the key and what goes wrong.

const EVERY_MS = 500, RETRY_MS = 2000, PATIENCE_MS = 8000;
const embedded = JSON.parse($("data").textContent);
let key = "", chosen = null, whole_ = null, since = null, points = new Map(), failedAt = null, lastNow = 0, timer = null, asking = false;

// -- themes: the system's, unless somebody chose ------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];
const remembered = (store, name) => { try { return store.getItem(name); } catch { return null; } }; // storage may be forbidden: then nothing is kept
const remember = (store, name, value) => { try { store.setItem(name, value); } catch { /* as above */ } };
function theme(name) {
  document.documentElement.dataset.theme = name;
  $("theme").textContent = `${name} theme`;
  remember(localStorage, "flatout-theme", name);
}
theme(THEMES.includes(remembered(localStorage, "flatout-theme")) ? remembered(localStorage, "flatout-theme") : "auto");
$("theme").onclick = () => theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);

// -- asking --------------------------------------------------------------------------------------------------------------------------

const ask = (query) =>
  fetch(`ledger${query}`, { headers: key ? { authorization: `Bearer ${key}` } : {}, signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });

async function poll() {
  if (asking || document.hidden) return; // a hidden page asks nothing; it goes on when it is looked at
  asking = true;
  clearTimeout(timer);
  let again = EVERY_MS;
  try {
    const reply = await ask(whole_ && whole_.facts && since ? `?since=${since}` : "");
    if (reply.status === 401) return door();
    const told = await reply.json();
    if (!reply.ok) throw new Error((told.error && told.error.message) || `status ${reply.status}`);
    failedAt = null;
    take(told);
  } catch (error) {
    gone(error);
    again = RETRY_MS;
  } finally {
    asking = false;
  }
  timer = setTimeout(poll, again);
}
document.addEventListener("visibilitychange", poll);

function door() { // the key is the server's to judge
  $("figures").hidden = true;
  $("door").hidden = false;
  status("gone", key ? "that key is not the server's" : "asks for its key");
}
$("door").onsubmit = (event) => {
  event.preventDefault();
  key = $("key").value;
  remember(sessionStorage, "flatout-key", key);
  poll();
};

function gone(error) {
  failedAt = failedAt || new Date();
  const why = error instanceof TypeError ? "it can't be reached" : error.name === "TimeoutError" ? `no answer in ${PATIENCE_MS / 1000} s` : error.message;
  alert_(`The server does not answer since ${failedAt.toLocaleTimeString()} (${why}). ${whole_ ? "The figures are from before." : ""} Trying again every ${RETRY_MS / 1000} s.`);
  status("gone", "not answering");
  $("figures").classList.toggle("stale", Boolean(whole_));
  $("figures").hidden = !whole_;
}

function alert_(text) {
  $("alert").hidden = !text;
  if ($("alert").textContent !== text) $("alert").textContent = text;
}
function status(is, text) {
  $("status").dataset.is = is;
  if ($("status").textContent !== text) $("status").textContent = text; // readers are told of changes alone
}

// -- taking in -------------------------------------------------------------------------------------------------------------------------

function take(told) {
  const names = Object.keys(told.models);
  if (!names.includes(chosen)) choose(names[0]);
  if (names.length > 1 && $("models").hidden) {
    $("models").hidden = false;
    const list = $("models").querySelector("select");
    for (const name of names) add(list, "option", {}, name);
    list.onchange = () => { choose(list.value); poll(); };
  }
  const model = told.models[chosen];
  if (model.now < lastNow || (model.table === undefined && !whole_)) { // another server, or another model: from the beginning
    choose(chosen);
    lastNow = 0;
    return;
  }
  lastNow = model.now;
  if (model.table !== undefined) whole_ = model;
  since = model.series.settled || null;
  for (const point of model.series.points) points.set(point.second, point);
  for (const second of points.keys()) if (second < model.now - SPAN - 1) points.delete(second);
  $("version").textContent = `flatout ${told.version}`;
  show(model);
}

function choose(name) {
  chosen = name;
  whole_ = since = null;
  points = new Map();
}

function show(model) {
  const f = {
    model, name: chosen, facts: whole_.facts, table: whole_.table, start_lines: whole_.start_lines,
    url: embedded ? `${embedded.url}/` : document.baseURI.replace(/[?#].*/, ""),
    points: [...points.values()].sort((a, b) => a.second - b.second),
    age: (point) => Math.max(0, Math.floor(model.now) - 1 - point.second),
  };
  document.title = `${chosen} · flatout`;
  $("name").textContent = chosen;
  $("door").hidden = true;
  $("figures").hidden = false;
  $("figures").classList.remove("stale");
  const loading = model.trouble && whole_.facts === null;
  alert_(model.trouble && !loading ? `The engine can't be used: ${model.trouble}` : "");
  if (embedded) status("", `report of ${embedded.taken}, ${embedded.url}`);
  else status(model.trouble ? (loading ? "loading" : "gone") : "live", model.trouble ? (loading ? "loading the model" : "engine down") : model.state.in_flight ? "live" : "live, idle");
  for (const panel of [welcomePanel, verdictPanel, tilesPanel, ledgerPanel, speedPanel, latencyPanel, roofPanel, blocksPanel, waitingPanel, requestsPanel, opsPanel, startPanel]) panel(f);
}

for (const [name, title] of [["speed", "Output"], ["load", "Requests"], ["ttft", "TTFT, p50"], ["tpot", "TPOT, p50"], ["blocks", "Block pool"], ["roof", "Of the roof"]]) tile(name, title);
makeLedger(Boolean(embedded));
for (const make of [makeSpeed, makeLatency, makeRoof, makeBlocks, makeWaiting, makeRequests]) make();
makeOps(embedded ? null : (steps) => ask(`?deep=${steps}`).catch(gone));
if (embedded) {
  document.querySelector("footer").hidden = true;
  take(embedded);
} else {
  key = remembered(sessionStorage, "flatout-key") || "";
  status("loading", "asking the server");
  poll();
}
