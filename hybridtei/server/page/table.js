// The table of scores: a row a document, sorted by any column; a document's button selects it.

import { element, measured } from "./dom.js";

export const COLUMNS = [
  { id: "place", title: "#", numeric: true },
  { id: "document", title: "Document" },
  { id: "dense", title: "Dense", note: "cosine", numeric: true },
  { id: "sparse", title: "Sparse", note: "dot", numeric: true },
  { id: "multivector", title: "MaxSim", note: "mean", numeric: true },
  { id: "fused", title: "Fused", numeric: true },
];
const DIGITS = { dense: 3, sparse: 2, multivector: 3, fused: 4 };

/** Row numbers in the order that `sort` {column, descending} asks for; equal ones stay in the documents' order. */
export function ordered(rows, sort) {
  const way = sort.descending ? -1 : 1;
  const key = (row) => (sort.column === "document" ? row.document.toLowerCase() : (row[sort.column] ?? -Infinity));
  const compared = (a, b) => (a < b ? -way : a > b ? way : 0);
  return rows.map((_, at) => at).sort((a, b) => compared(key(rows[a]), key(rows[b])) || a - b);
}

/**
 * Fills the table. rows: [{place, document, isRight, dense?, sparse?, multivector?, fused}]; lacking: {kind: reason};
 * selected: a row's number; onSort(column), onSelect(row number).
 */
export function showTable(table, { rows, sort, selected, lacking, onSort, onSelect }) {
  const focused = document.activeElement?.closest("#table") ? document.activeElement.dataset.focus : null;
  const ranges = Object.fromEntries(Object.keys(DIGITS).map((kind) => [kind, rangeOf(rows.map((row) => row[kind]), kind === "fused")]));
  const head = element("tr", {}, ...COLUMNS.map((column) => heading(column, sort, lacking, onSort)));
  const body = ordered(rows, sort).map((at) => {
    const row = rows[at];
    const pick = element("button", { type: "button", class: "pick", "aria-pressed": String(at === selected), "data-focus": `row${at}` }, row.document);
    pick.addEventListener("click", () => onSelect(at));
    const cells = Object.keys(DIGITS).map((kind) => cell(kind, row[kind], ranges[kind], lacking[kind]));
    return element("tr", { "data-row": at, class: at === selected ? "selected" : false },
      element("td", { class: "number" }, String(row.place)), element("td", { class: "document" }, pick, row.isRight ? element("small", { class: "right" }, " ✓ answer") : null), ...cells);
  });
  table.replaceChildren(element("thead", {}, head), element("tbody", {}, ...body));
  if (focused) table.querySelector(`[data-focus="${focused}"]`)?.focus();
}

function heading({ id, title, note, numeric }, sort, lacking, onSort) {
  const sorted = sort.column === id ? (sort.descending ? "descending" : "ascending") : "none";
  const arrow = { ascending: " ▲", descending: " ▼", none: "" }[sorted];
  const button = element("button", { type: "button", "data-sort": id, "data-focus": `head-${id}`, disabled: Boolean(lacking[id]) }, title,
    element("small", {}, note ? ` ${note}` : "", arrow));
  button.addEventListener("click", () => onSort(id));
  return element("th", { scope: "col", "aria-sort": sorted, class: `${numeric ? "number " : ""}${lacking[id] ? "lacking" : ""}`, title: lacking[id] }, button);
}

function cell(kind, value, range, reason) {
  if (value === undefined) return element("td", { class: "number lacking", title: reason }, "–");
  const bar = measured(element("span", { class: `bar ${kind}` }), "--part", range.span > 0 ? (value - range.low) / range.span : 1);
  const best = range.span > 0 && value === range.high;
  return element("td", { class: `number${best ? " best" : ""}`, "data-kind": kind, "data-value": value }, value.toFixed(DIGITS[kind]), bar);
}

/** What a bar shows: from 0, but fused scores, which differ in their third digit, from the lowest. */
function rangeOf(values, isFused) {
  const known = values.filter((value) => value !== undefined);
  const low = Math.min(...known, ...(isFused ? [] : [0]));
  const high = Math.max(...known);
  return { low, high, span: high - low };
}
