// The server's own order of the documents, beside the fused one.

import { ask } from "./api.js";
import { byId, element, measured } from "./dom.js";

/** Scores in the documents' order, from /rerank. Documents of several requests are comparable: each is scored by itself. */
export async function rerank({ alias, query, documents, size, signal }) {
  const scores = new Array(documents.length);
  for (let begin = 0; begin < documents.length; begin += size) {
    const texts = documents.slice(begin, begin + size);
    for (const { index, score } of await ask("rerank", { alias, signal, body: { query, texts, truncate: true } })) {
      scores[begin + index] = score;
    }
  }
  return scores;
}

/** fusedRanks: place of each document in the fused order, or null where nothing was fused. */
export function showRanks({ documents, scores, fusedRanks, selected, onSelect }) {
  const high = Math.max(...scores);
  const low = Math.min(0, ...scores);
  const order = scores.map((_, at) => at).sort((a, b) => scores[b] - scores[a] || a - b);
  byId("ranks").replaceChildren(...order.map((at, place) => {
    const pick = element("button", { type: "button", class: "pick", "aria-pressed": String(at === selected) }, documents[at]);
    pick.addEventListener("click", () => onSelect(at));
    const bar = measured(element("span", { class: "bar fused" }), "--part", (scores[at] - low) / (high - low || 1));
    return element("li", { "data-row": at, "data-score": scores[at] },
      element("span", { class: "number" }, scores[at].toFixed(4), bar), pick, moved(fusedRanks, at, place + 1));
  }));
}

function moved(fusedRanks, at, place) {
  if (fusedRanks === null) return null;
  const by = fusedRanks[at] - place;
  if (by === 0) return element("span", { class: "moved", title: "the same place as fused" }, "=");
  const words = `${by > 0 ? "up" : "down"} ${Math.abs(by)}`;
  return element("span", { class: `moved ${by > 0 ? "up" : "down"}`, title: `fused: ${fusedRanks[at]}` }, `${by > 0 ? "▲" : "▼"} ${words}`);
}
