// A collection of the server's vector store, searched by `/search`: hits, each stage's score, and the terms that matched.

import { ask } from "./api.js";
import { byId, element } from "./dom.js";

/** The answer of `/search`. `mode` "" is the server's choice. */
export const search = ({ alias, collection, query, mode, signal }) =>
  ask("search", { alias, signal, body: { collection, query, limit: 10, explain: true, highlights: true, ...(mode ? { mode } : {}) } });

export function showHits({ mode, hits, stages }) {
  const spent = stages.map(({ name, milliseconds }) => `${name} ${milliseconds.toFixed(1)} ms`).join(", ");
  byId("hits-hint").textContent = hits.length ? `Mode ${mode}: ${spent}.` : "Nothing was found.";
  byId("hits").replaceChildren(...hits.map(({ id, score, payload, highlights, scores }) => element("li", { "data-id": id },
    element("span", { class: "number" }, score.toFixed(4)),
    element("div", {},
      element("p", {}, ...marked(String(payload.text ?? JSON.stringify(payload)), highlights ?? [])),
      element("p", { class: "hint" }, [source(id, payload), ...Object.entries(scores ?? {}).map(staged)].join(" · "))))));
}

// A row of a table is known by its file too
const source = (id, payload) => [...new Set([payload["source"], payload.document_id ?? id])].filter((part) => part !== undefined).join(" ");
const staged = ([name, { score, rank }]) => `${name} ${rank === null ? "rescored" : `#${rank}`} (${score.toFixed(3)})`;

/** The text with its highlights marked; their offsets count code points. */
function marked(text, highlights) {
  const points = Array.from(text);
  const parts = [];
  let done = 0;
  for (const { start, end } of [...highlights].sort((a, b) => a.start - b.start)) {
    if (start < done) continue;
    parts.push(points.slice(done, start).join(""), element("mark", {}, points.slice(start, end).join("")));
    done = end;
  }
  return [...parts, points.slice(done).join("")];
}
