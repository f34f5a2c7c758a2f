// What is asked: a query and documents, chosen from the menu of examples, typed, or read from the address.

import { byId, element } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { read, write } from "./permalink.js";

export const query = () => byId("query").value.trim();
export const lines = () => byId("documents").value.split("\n").map((line) => line.trim()).filter(Boolean);

/** The example with exactly this query and these documents, or undefined. */
export const exampleOf = (asked, documents) =>
  EXAMPLES.find((one) => one.query === asked && one.documents.join("\n") === documents.join("\n"));

/** Fills the menu; `onChosen` comes after an example has been put into the form. */
export function setUp(onChosen) {
  const options = EXAMPLES.map(({ id, title }) => element("option", { value: id }, title));
  byId("example").replaceChildren(...options, element("option", { value: "" }, "Your own text"));
  put(EXAMPLES[0]);
  byId("example").addEventListener("change", () => {
    const chosen = EXAMPLES.find(({ id }) => id === byId("example").value);
    if (!chosen) return byId("query").focus();
    put(chosen);
    onChosen();
  });
  for (const id of ["query", "documents"]) byId(id).addEventListener("input", showExample);
}

function put({ query: asked, documents }) {
  byId("query").value = asked;
  byId("documents").value = documents.join("\n");
  showExample();
}

function showExample() {
  byId("example").value = exampleOf(query(), lines())?.id ?? "";
}

/** Puts the address' query and documents into the form: {name: text} of everything that the address holds. */
export function restore() {
  const link = read();
  const example = EXAMPLES.find(({ id }) => id === link.example);
  if (example) put(example);
  else if (link.query !== undefined) put({ query: link.query, documents: (link.documents ?? "").split("\n") });
  return link;
}

/** Puts the form and `others` {name: text} into the address; true if they fit. */
export function keep(others) {
  const example = exampleOf(query(), lines());
  return write({ ...(example ? { example: example.id } : { query: query(), documents: lines().join("\n") }), ...others });
}
