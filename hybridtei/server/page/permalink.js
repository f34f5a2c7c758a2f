// What is asked, as the part of the address after `#`: browsers send it to no server.

const MAX_CHARACTERS = 8_000; // longer addresses are cut or refused by mail programs and chats

/** {name: text} of the address. */
export const read = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

/** Puts {name: text} into the address, without what is empty; true if it fits. Nothing is added to the history. */
export function write(fields) {
  const shown = Object.entries(fields).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  const text = new URLSearchParams(shown).toString();
  const fits = text.length <= MAX_CHARACTERS;
  history.replaceState(null, "", fits && text ? `#${text}` : location.pathname + location.search);
  return fits;
}
