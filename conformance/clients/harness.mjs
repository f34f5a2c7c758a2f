// As harness.py, for clients in JavaScript: the server's address, its plain answers, the checks and the counts of calls.

import { readFileSync } from "node:fs";

export const TEXTS = ["baka lomi beti", "duna boka", "pelu dati buka bera mona", "bo"];
export const QUERY = "boka lomi";
// Of floats that took another way through a batch
const TOLERANCE = 1e-5;

export const server = JSON.parse(readFileSync(process.argv[2], "utf8"));

// A plain request: POST of JSON to a model
export async function ask(path, body, alias) {
  const response = await fetch(`${server.url}/m/${alias}${path}`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return response.json();
}

export const vectors = (texts = TEXTS, settings = {}) => ask("/embed", { inputs: texts, ...settings }, server.embed);

// Of Cohere's route, best first: [index, score]
export async function ranks() {
  const answer = await ask("/v2/rerank", { query: QUERY, documents: TEXTS }, server.rerank);
  return answer.results.map((result) => [result.index, result.relevance_score]);
}

// Throws unless both hold the same numbers, in lists of any depth, within TOLERANCE
export function same(actual, expected, where = "answer") {
  if (Array.isArray(expected)) {
    if (actual.length !== expected.length) throw new Error(`${where}: ${actual.length} items, expected ${expected.length}`);
    expected.forEach((item, place) => same(actual[place], item, `${where}[${place}]`));
  } else if (!(Math.abs(actual - expected) <= TOLERANCE * Math.max(1, Math.abs(expected)))) {
    throw new Error(`${where}: ${actual}, expected ${expected}`);
  }
}

// Throws unless `work` fails with all of these words
export async function refused(work, ...words) {
  try {
    await work();
  } catch (error) {
    const shown = `${error.name}: ${error.message}`;
    const missing = words.filter((word) => !shown.includes(word));
    if (missing.length) throw new Error(`refused as ${shown.slice(0, 300)}, without ${missing}`);
    return;
  }
  throw new Error("should have been refused");
}

// Makes all calls and prints one line of JSON. `vectors` in it: what the call `embeddings` returns, of TEXTS
export async function main(client, calls) {
  const folder = new URL(`node_modules/${client}/`, import.meta.url);
  const { version } = JSON.parse(readFileSync(new URL("package.json", folder), "utf8"));
  const outcome = { client, version, passed: [], failed: {}, skipped: {} };
  for (const [name, call] of Object.entries(calls)) {
    try {
      const answer = await call();
      if (name === "embeddings") outcome.vectors = answer;
      outcome.passed.push(name);
    } catch (error) {
      outcome.failed[name] = `${error.name}: ${String(error.message).slice(0, 300)}`;
    }
  }
  console.log(JSON.stringify(outcome));
}
