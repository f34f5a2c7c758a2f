// MaxSim of one document: query tokens by document tokens, each query token's best match marked.

import { byId, element, measured } from "./dom.js";
import { bestMatches, maxSim } from "./scores.js";
import { label, withVectors } from "./tokens.js";

const CELLS = 40_000; // above which a browser takes seconds to lay them out

/** query and text: {tokens, multivector}; matrix: their similarities; title: the document's place. */
export function showHeatMap({ title, matrix, query, text }) {
  const rows = names(query);
  const shown = Math.max(1, Math.floor(CELLS / Math.max(rows.length, 1)));
  const columns = names(text).slice(0, shown);
  const best = bestMatches(matrix);
  const all = matrix.flat();
  const low = Math.min(0, ...smallest(all));
  const high = all.reduce((most, value) => Math.max(most, value), low);
  const head = element("tr", {}, element("td", { class: "corner" }), element("th", { class: "match", scope: "col" }, "best match"),
    ...columns.map((name) => element("th", { scope: "col", class: "token" }, element("span", {}, name))));
  const body = rows.map((name, at) => {
    const found = best[at];
    return element("tr", {}, element("th", { scope: "row" }, name),
      element("td", { class: "match" }, found ? `${columns[found.at] ?? `token ${found.at + 1}`} ${found.value.toFixed(2)}` : "none"),
      ...matrix[at].slice(0, shown).map((value, column) => heat(value, (value - low) / (high - low || 1), found?.at === column, `${name} × ${columns[column]}`)));
  });
  byId("heat-map").replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  byId("heat-hint").textContent = hint({ title, matrix, query, text, shown });
  byId("heat-legend").replaceChildren(low.toFixed(2), element("span", { class: "ramp" }), high.toFixed(2));
}

function heat(value, part, isBest, title) {
  const made = element("td", { class: isBest ? "heat best" : "heat", title: `${title}: ${value.toFixed(3)}`, "data-value": value });
  return measured(made, "--heat", part);
}

function smallest(values) {
  return values.length ? [values.reduce((least, value) => Math.min(least, value))] : [];
}

function names({ tokens, multivector }) {
  const behind = withVectors(tokens, multivector.length);
  return behind ? behind.map(label) : multivector.map((_, at) => `vector ${at + 1}`);
}

function hint({ title, matrix, query, text, shown }) {
  const dropped = text.tokens.length - text.multivector.length;
  const known = withVectors(query.tokens, query.multivector.length) && withVectors(text.tokens, text.multivector.length);
  const told = [`${title}: query tokens by document tokens; their best matches have a mean of ${maxSim(matrix).toFixed(3)}.`];
  if (!known) told.push("This model adds or skips tokens, so vectors are numbered.");
  else if (dropped === 1) told.push(`The first token, ${label(text.tokens[0])}, has no vector.`);
  else if (dropped > 1) told.push("Special tokens have no vectors.");
  if (text.multivector.length > shown) told.push(`The first ${shown} of ${text.multivector.length} tokens are drawn.`);
  return told.join(" ");
}
