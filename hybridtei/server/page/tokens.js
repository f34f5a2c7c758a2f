// Tokens of a text: which were read, which have a vector, and what lies between them. Offsets count UTF-8 bytes.

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** The tokens that a model read of a longer text: the first `limit`, special ones at the end kept. */
export function readOf(tokens, limit) {
  if (tokens.length <= limit) return tokens;
  let closing = 0;
  while (closing < limit && tokens[tokens.length - 1 - closing].special) closing++;
  return [...tokens.slice(0, limit - closing), ...tokens.slice(tokens.length - closing)];
}

/** The tokens behind `count` vectors, or null: models may drop the first, or special ones, or add some that /tokenize does not know. */
export function withVectors(tokens, count) {
  const spoken = tokens.filter((token) => !token.special);
  if (count === tokens.length) return tokens;
  if (count === tokens.length - 1) return tokens.slice(1);
  return count === spoken.length ? spoken : null;
}

/** A token's text to show: spaces seen, nothing empty. */
export const label = (token) => (token.special ? token.text : token.text.trim() || "␠");

/**
 * [{text, token}] that together spell `text`; what no token covers has token null. `prompt`: what the server put before the
 * text, and counted in its offsets. Tokens that share bytes (an emoji of several) are one piece: the first's.
 */
export function pieces(text, tokens, prompt = "") {
  const bytes = encoder.encode(text);
  const shift = encoder.encode(prompt).length;
  const found = [];
  let done = 0;
  for (const token of tokens) {
    if (token.start === null || token.stop - shift <= done) continue;
    const start = Math.max(token.start - shift, done);
    if (start > done) found.push({ text: decoder.decode(bytes.slice(done, start)), token: null });
    done = Math.min(token.stop - shift, bytes.length);
    found.push({ text: decoder.decode(bytes.slice(start, done)), token });
  }
  if (done < bytes.length) found.push({ text: decoder.decode(bytes.slice(done)), token: null });
  return found;
}
