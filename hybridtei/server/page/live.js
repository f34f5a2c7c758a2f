// What the server does right now, from /metrics: read every second, while somebody looks.

import { ask } from "./api.js";
import { byId, drawing, element, tell } from "./dom.js";
import { growth, meanBetween, parse, quantileBetween } from "./prometheus.js";

const EVERY_MS = 1000;
const KEPT = 60; // readings that a line shows
const WINDOW = 10; // readings that latency and fill are taken over: one second holds too few requests
const [WIDTH, HEIGHT] = [120, 30];

const perSecond = (name) => ({ last, now }) => {
  const grown = growth(last, now, name);
  return grown === null ? null : (1000 * grown) / (now.at - last.at);
};
const latency = (share) => ({ first, now }) => {
  const seconds = quantileBetween(first, now, "te_request_duration", share);
  return seconds === null ? null : 1000 * seconds;
};
const percent = ({ first, now }) => {
  const fill = meanBetween(first, now, "hybridtei_batch_fill");
  return fill === null ? null : 100 * fill;
};

// Each reads a number off {first, last, now}: the readings ten seconds ago, one second ago, and the newest.
const GAUGES = [
  { id: "queue", title: "Queue", unit: "inputs", read: ({ now }) => now.values.te_queue_size ?? 0 },
  { id: "fill", title: "Batch fill", unit: "% of budget", read: percent },
  { id: "requests", title: "Requests", unit: "/s", read: perSecond("te_request_success") },
  { id: "tokens", title: "Tokens", unit: "/s", read: perSecond("te_batch_next_tokens_sum") },
  { id: "p50", title: "Latency p50", unit: "ms", read: latency(0.5) },
  { id: "p95", title: "Latency p95", unit: "ms", read: latency(0.95) },
];

let alias = null;
let readings = [];
let lines = {};
let timer = null;
let paused = false;
let asked = 0;

/** Begin to watch; called again, with another model. */
export function watch(chosen) {
  alias = chosen;
  asked += 1;
  readings = [];
  lines = Object.fromEntries(GAUGES.map(({ id }) => [id, []]));
  byId("gauges").replaceChildren(...GAUGES.map(({ id, title, unit }) => element("div", { class: "gauge", "data-gauge": id },
    element("span", { class: "title" }, title), element("output", {}, "–"), element("span", { class: "unit" }, unit),
    drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, drawing("path")))));
  if (timer !== null) clearTimeout(timer);
  timer = null;
  resume();
}

/** Stop while nobody looks, or while asked to; go on after. */
function resume() {
  const idle = paused || document.hidden;
  byId("live-state").textContent = idle ? "paused" : "every second";
  if (idle && timer !== null) {
    clearTimeout(timer);
    timer = null;
  } else if (!idle && timer === null) {
    readings = []; // a gap is no second
    timer = setTimeout(tick, 0);
  }
}

async function tick() {
  const mine = asked;
  try {
    const now = { ...parse(await ask("metrics", { alias, text: true })), at: performance.now() };
    if (mine !== asked) return;
    readings = [...readings, now].slice(-WINDOW - 1);
    if (readings.length > 1) show({ first: readings[0], last: readings.at(-2), now });
    tell("live-error", null);
  } catch (error) {
    if (mine !== asked) return;
    readings = [];
    tell("live-error", `/metrics: ${error.message}`);
  }
  if (timer !== null) timer = setTimeout(tick, EVERY_MS);
}

function show(reading) {
  for (const { id, read } of GAUGES) {
    const value = read(reading);
    lines[id] = [...lines[id], value].slice(-KEPT);
    const gauge = byId("gauges").querySelector(`[data-gauge="${id}"]`);
    gauge.querySelector("output").textContent = value === null ? "–" : written(value);
    gauge.querySelector("path").setAttribute("d", path(lines[id]));
  }
}

const written = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(1));

/** A line of the last minute, newest at the right; it breaks where there is nothing to tell. */
function path(values) {
  const high = Math.max(...values.map((value) => value ?? 0), 1e-9);
  let pen = "M";
  return values.map((value, at) => {
    if (value === null) {
      pen = "M";
      return "";
    }
    const x = WIDTH - ((values.length - 1 - at) * WIDTH) / (KEPT - 1);
    const step = `${pen}${x.toFixed(1)} ${(HEIGHT - 1.5 - (value / high) * (HEIGHT - 3)).toFixed(1)}`;
    const dotted = pen === "M" ? `${step}h0.1` : step;
    pen = "L";
    return dotted;
  }).join("");
}

document.addEventListener("visibilitychange", resume);
byId("live-pause").addEventListener("click", () => {
  paused = !paused;
  byId("live-pause").setAttribute("aria-pressed", String(paused));
  byId("live-pause").textContent = paused ? "Go on" : "Pause";
  resume();
});
