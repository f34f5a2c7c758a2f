// Requests to the server that served this page, for one of its models. The key lives in this module and nowhere else.

let key = null;

const [, root, named] = /^(.*?)(?:m\/([^/]+)\/)?(?:page)?$/.exec(location.pathname);

/** The model that the address names (`/m/ALIAS/`), or null. */
export const aliasOfAddress = named === undefined ? null : decodeURIComponent(named);

/** What the server refused, in its own words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(given) {
  key = given;
}

/** The answer to a GET (no body) or POST (with one). `alias`: which model, null: the server's choice. Raises Refused. */
export async function ask(path, { alias = null, body, signal, text = false } = {}) {
  const headers = { accept: text ? "text/plain" : "application/json" };
  if (key !== null) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const url = root + (alias === null ? "" : `m/${encodeURIComponent(alias)}/`) + path;
  const request = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store", redirect: "error" };
  let response;
  try {
    response = await fetch(url, body === undefined ? request : { ...request, body: JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server cannot be reached");
  }
  if (!response.ok) throw new Refused(response.status, reason(response, await response.text()));
  return text ? response.text() : response.json();
}

function reason(response, body) {
  if (response.status === 401) return "the API key is missing or wrong (401)";
  let told = body.slice(0, 500);
  try {
    told = JSON.parse(body).error ?? told;
  } catch {
    // plain text is how bodies of the wrong shape are refused
  }
  return `${told || response.statusText || "no reason given"} (${response.status})`;
}

/** One POST after the other, each with at most `size` of `items`; the answers' lists joined. */
export async function inParts(path, items, size, bodyOf, settings) {
  const answers = [];
  for (let begin = 0; begin < items.length; begin += size) {
    answers.push(...(await ask(path, { ...settings, body: bodyOf(items.slice(begin, begin + size)) })));
  }
  return answers;
}
