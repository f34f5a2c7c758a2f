// Texts with their tokens shaded by what they weigh in the sparse vector.

import { byId, element, measured } from "./dom.js";
import { label, pieces } from "./tokens.js";

const ADDED_SHOWN = 10;

/**
 * Shows the query and every document. texts: [{title, text, prompt, tokens, sparse: Map, row}]; query: the query's sparse Map;
 * names: Map(id -> text) of terms that are in no text; onSelect(row).
 */
export function showTexts({ texts, query, names, selected, onSelect }) {
  const most = Math.max(...texts.flatMap(({ sparse }) => [...sparse.values()]), 1e-9);
  byId("texts").replaceChildren(...texts.map((text) => shown(text, { query, names, most, selected, onSelect })));
}

function shown({ title, text, prompt, tokens, sparse, row }, { query, names, most, selected, onSelect }) {
  const spelled = element("p", { class: "spelled" }, ...pieces(text, tokens, prompt).map((piece) => token(piece, sparse, row === null ? null : query, most)));
  const added = addedTerms(tokens, sparse);
  const more = added.length > ADDED_SHOWN ? ` and ${added.length - ADDED_SHOWN} more` : "";
  const list = added.length === 0 ? null : element("p", { class: "added" }, "adds ",
    ...added.slice(0, ADDED_SHOWN).flatMap(([id, weight]) => [chip(names.get(id) ?? `#${id}`, weight, query.has(id) && row !== null, most), " "]), more);
  const heading = row === null ? element("h3", {}, title) : element("h3", {}, picker(title, row, selected, onSelect));
  return element("article", { "data-text": row ?? "query", class: row !== null && row === selected ? "selected" : false }, heading, spelled, list);
}

function picker(title, row, selected, onSelect) {
  const button = element("button", { type: "button", class: "pick", "aria-pressed": String(row === selected) }, title);
  button.addEventListener("click", () => onSelect(row));
  return button;
}

function token({ text, token: found }, sparse, query, most) {
  const weight = found === null ? undefined : sparse.get(found.id);
  if (weight === undefined) return text;
  return chip(text, weight, query?.has(found.id) ?? false, most, label(found));
}

function chip(text, weight, matched, most, name = text) {
  const title = `${name}: ${weight.toFixed(3)}${matched ? ", also in the query" : ""}`;
  return measured(element("mark", { class: matched ? "matched" : false, title, "data-weight": weight }, text), "--weight", weight / most);
}

/** Terms of a sparse vector that are no token of its text, the heaviest first: [[id, weight]]. */
export function addedTerms(tokens, sparse) {
  const own = new Set(tokens.map(({ id }) => id));
  return [...sparse].filter(([id]) => !own.has(id)).sort(([, a], [, b]) => b - a);
}

/** Ids whose names are needed to show the added terms of all texts. */
export const unnamed = (texts) => [...new Set(texts.flatMap(({ tokens, sparse }) => addedTerms(tokens, sparse).slice(0, ADDED_SHOWN).map(([id]) => id)))];
