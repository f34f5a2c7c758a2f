// Making elements. Text goes in as text nodes only, so nothing that a user or a model wrote is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element; attributes that are false, null or undefined are left out, children may be strings. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for drawings. */
export function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Sets a number that the style sheet reads; style attributes are refused by the page's policy. */
export function measured(made, name, value) {
  made.style.setProperty(name, String(value));
  return made;
}

/** Shows a message where it belongs, or hides it. */
export function tell(id, message) {
  const place = byId(id);
  place.textContent = message ?? "";
  place.hidden = !message;
}

/** Puts options into a list of names, and keeps the choice where it is still there. */
export function offer(select, names, chosen) {
  select.replaceChildren(...names.map((name) => element("option", { value: name, selected: name === chosen }, name)));
}
