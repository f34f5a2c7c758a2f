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
      ...blocks(String(payload.text ?? JSON.stringify(payload)), highlights ?? []),
      element("p", { class: "hint" }, [source(id, payload), ...Object.entries(scores ?? {}).map(staged)].join(" · "))))));
}

// A row of a table is known by its file too
const source = (id, payload) => [...new Set([payload["source"], payload.document_id ?? id])].filter((part) => part !== undefined).join(" ");
const staged = ([name, { score, rank }]) => `${name} ${rank === null ? "rescored" : `#${rank}`} (${score.toFixed(3)})`;

const RULE = /^\|[\s:|-]+\|$/u;

/** The text as paragraphs and, of lines such as `| a | b |`, tables, with its highlights marked; their offsets count code points. */
function blocks(text, highlights) {
  const points = Array.from(text);
  const found = [];
  let rows = null;
  let from = 0; // where the paragraph begins
  let start = 0;
  const paragraph = (end) => {
    const inner = marked(points, highlights, from, end);
    if (inner.length) found.push(element("p", {}, ...inner));
  };
  for (const line of text.split("\n")) {
    const length = Array.from(line).length;
    if (line.startsWith("|") && line.trimEnd().endsWith("|")) {
      if (rows === null) {
        paragraph(start);
        rows = element("table", {});
        found.push(rows);
      }
      if (!RULE.test(line.trim())) rows.append(element("tr", {}, ...cells(points, highlights, line, start)));
      from = start + length + 1;
    } else rows = null;
    start += length + 1;
  }
  paragraph(points.length);
  return found;
}

/** Of `| a | b |`: what stands between the bars. */
function cells(points, highlights, line, start) {
  const parts = line.trimEnd().split("|").slice(1, -1);
  let begin = start + 1;
  return parts.map((part) => {
    const end = begin + Array.from(part).length;
    const cell = element("td", {}, ...marked(points, highlights, begin, end));
    begin = end + 1;
    return cell;
  });
}

/** The nodes of a part of the text. */
function marked(points, highlights, from, until) {
  const parts = [];
  let done = from;
  for (const { start, end } of [...highlights].sort((a, b) => a.start - b.start)) {
    if (start < done || end > until) continue;
    parts.push(points.slice(done, start).join(""), element("mark", {}, points.slice(start, end).join("")));
    done = end;
  }
  return [...parts, points.slice(done, until).join("")].filter((part) => part !== "");
}
