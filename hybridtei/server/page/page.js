// The page: what was asked, what came back, and who shows it. The address holds the question, and nothing holds the answer.

import { aliasOfAddress, ask, inParts, useKey } from "./api.js";
import { byId, element, offer, tell } from "./dom.js";
import { exampleOf, keep, lines, query as typed, restore, setUp } from "./form.js";
import { showHeatMap } from "./heatmap.js";
import { watch } from "./live.js";
import { parse } from "./prometheus.js";
import { rerank, showRanks } from "./rerank.js";
import { dot, fused, KINDS, maxSim, ranks, similarities, sparseDot, sparseOf } from "./scores.js";
import { search, showHits } from "./search.js";
import { showTable } from "./table.js";
import { showTexts, unnamed } from "./text.js";
import { readOf } from "./tokens.js";

const MAX_DOCUMENTS = 200; // their vectors are held here as plain numbers
const OPENING_MS = 5_000; // that the first example may take unasked
const NAMES = { dense: "Dense", sparse: "Sparse", multivector: "MaxSim" };

const SHARES = { dense: 1, sparse: 0.7, multivector: 1 }; // of the server's default search
const HINTS = {
  zscore: "Sum of share × (score − mean) ÷ deviation, as the server's default search.",
  rrf: "Sum of share ÷ (60 + rank).",
  weighted: "Each column stretched to 0 … 1, then the mean by shares.",
};

const state = {
  alias: aliasOfAddress, // the model in use; null: the only one
  infos: new Map(), // alias -> what /info tells
  answer: null, // {query, documents, texts, columns}
  scores: null, // of /rerank
  shares: { ...SHARES },
  method: "zscore",
  sort: { column: "fused", descending: true },
  selected: 0,
  collection: "", // that was searched
};
let running = new AbortController();

const info = () => state.infos.get(state.alias);
const outputs = () => KINDS.filter((kind) => info().hybridtei?.outputs.includes(kind));

/** Who serves: at first, after a key, and after another model is chosen. */
async function open() {
  try {
    if (!state.infos.size) await meet();
    byId("key-form").hidden = true;
    byId("main").hidden = false;
  } catch (error) {
    if (error.status === 401) askForKey();
    else byId("facts").textContent = `The server does not tell what it serves: ${error.message}`;
    return;
  }
  const { model_id: id, model_dtype: dtype, version, hybridtei } = info();
  byId("facts").textContent = `${id} · ${hybridtei.role} · ${hybridtei.outputs.join(", ")} · ${hybridtei.backend} ${dtype} · ${version}`;
  byId("docs").href = state.alias === null || aliasOfAddress !== null ? "docs/" : `m/${encodeURIComponent(state.alias)}/docs/`;
  byId("search").hidden = !hybridtei.store;
  forget();
  watch(state.alias);
}

/** What the address asks for, if it asks for something. */
async function follow() {
  const link = restore();
  for (const kind of KINDS) if (link[kind] !== undefined) state.shares[kind] = Math.min(Math.max(Number(link[kind]) || 0, 0), 2);
  if (link.fusion in HINTS) state.method = link.fusion;
  byId("fusion").querySelector(`[value="${state.method}"]`).checked = true;
  byId("mode").value = link.mode ?? "";
  if (state.infos.has(link.model)) state.alias = byId("model").value = link.model;
  await open();
  if (byId("main").hidden) return;
  const listed = byId("search").hidden ? null : listCollections(link.collection);
  if (!Object.keys(link).length) return;
  if (lines().length) await score();
  await listed;
  if (link.collection && listed) await runSearch();
}

/** Scores the first example when the page opens, unless the address holds a question or the server is busy. */
async function scoreFirst() {
  const before = running;
  if (byId("main").hidden || location.hash || !outputs().length) return;
  try {
    const { values } = parse(await ask("metrics", { alias: state.alias, text: true }));
    const isIdle = values.te_queue_size === 0 && values.hybridtei_running_batches === 0;
    if (isIdle && running === before && byId("example").value) await score({ isAsked: false });
  } catch {
    // then it is not known to be idle
  }
}

/** Fills the menu of collections; a `linked` one that is not there is refused when it is searched. */
async function listCollections(linked) {
  const { collections } = await ask("collections").catch((error) => (refused(error, "search-error"), { collections: [] }));
  const names = linked === undefined || collections.includes(linked) ? collections : [...collections, linked];
  offer(byId("collection"), names, linked);
  if (!names.length) byId("hits-hint").textContent = "There is no collection yet: hybridtei ingest makes one.";
}

/** The question into the address. */
function remember() {
  const shares = Object.fromEntries(KINDS.filter((kind) => state.shares[kind] !== SHARES[kind]).map((kind) => [kind, state.shares[kind]]));
  const fits = keep({
    ...shares,
    fusion: state.method === "zscore" ? "" : state.method,
    model: byId("model-label").hidden ? "" : state.alias,
    collection: state.collection,
    mode: byId("mode").value,
  });
  byId("ask-hint").textContent = `Ctrl + Enter scores them. ${fits ? "The address holds the question: copy it to share it." : "Too long for an address."}`;
}

async function meet() {
  const served = aliasOfAddress === null ? (await ask("v1/models")).data.map(({ id }) => id) : [aliasOfAddress];
  const several = served.length > 1;
  const aliases = several ? served : [aliasOfAddress];
  const told = [];
  for (const alias of aliases) told.push([alias, await ask("info", { alias })]);
  state.infos = new Map(told);
  const fit = aliases.find((alias) => state.infos.get(alias).hybridtei.role === "embedding");
  state.alias = fit === undefined ? aliases[0] : fit;
  if (!several) return;
  const ranker = aliases.find((alias) => state.infos.get(alias).hybridtei.role === "reranker");
  offer(byId("model"), aliases, state.alias);
  offer(byId("ranker"), aliases, ranker ?? state.alias);
  byId("model-label").hidden = byId("ranker-label").hidden = false;
}

function askForKey() {
  tell("key-error", byId("key").value ? "This key was refused." : null);
  byId("facts").textContent = "locked";
  byId("key-form").hidden = false;
  byId("key").focus();
}

/** Nothing has been asked of this model yet. */
function forget() {
  state.answer = state.scores = null;
  byId("text").hidden = byId("heat").hidden = true;
  byId("table").replaceChildren();
  byId("ranks").replaceChildren();
  for (const id of ["ask-error", "rerank-error", "verdict"]) tell(id, null);
  showShares();
  showNotes([]);
}

function lacking() {
  const reason = (kind) => `${info().served_model_name} has no ${kind} output`;
  return Object.fromEntries(KINDS.filter((kind) => !outputs().includes(kind)).map((kind) => [kind, reason(kind)]));
}

function showNotes(notes) {
  const reasons = Object.entries(lacking()).map(([kind, reason]) => `${NAMES[kind]}: ${reason}.`);
  tell("scores-notes", [...reasons, ...notes].join(" "));
}

function showShares() {
  const reasons = lacking();
  byId("shares").replaceChildren(...KINDS.map((kind) => {
    const slider = element("input", { type: "range", min: 0, max: 2, step: 0.05, value: state.shares[kind], disabled: kind in reasons, "data-share": kind });
    const shown = element("output", {}, state.shares[kind].toFixed(2));
    slider.addEventListener("input", () => {
      state.shares[kind] = Number(slider.value);
      shown.textContent = state.shares[kind].toFixed(2);
      showScores();
    });
    slider.addEventListener("change", remember);
    return element("label", { class: `share ${kind}${kind in reasons ? " lacking" : ""}`, title: reasons[kind] }, NAMES[kind], slider, shown);
  }));
  byId("fusion-hint").textContent = HINTS[state.method];
}

/** Prompts of both sides, by the names that checkpoints give them. */
function prompts() {
  const table = info().hybridtei.prompts;
  const named = (...names) => names.map((name) => [name, table[name]]).find(([, text]) => text !== undefined) ?? [undefined, ""];
  return { query: named("query", "search_query", "retrieval.query"), document: named("document", "passage", "search_document", "retrieval.passage") };
}

/** [{tokens, sparse, dense, multivector}] of one side. `prompt_name` undefined is not sent. */
async function vectors(texts, promptName, settings) {
  const size = info().max_client_batch_size;
  const shared = { prompt_name: promptName };
  const found = await inParts("embed_hybrid", texts, size, (inputs) => ({ inputs, outputs: outputs(), sparse_format: "tei", truncate: true, ...shared }), settings);
  const tokens = await inParts("tokenize", texts, size, (inputs) => ({ inputs, ...shared }), settings);
  return found.map(({ sparse, ...rest }, at) => ({
    ...rest,
    sparse: sparse && sparseOf(sparse),
    tokens: readOf(tokens[at], info().max_input_length),
    isCut: tokens[at].length > info().max_input_length,
  }));
}

async function score({ isAsked = true } = {}) {
  const [query, documents] = [typed(), lines()];
  running.abort();
  const mine = (running = new AbortController());
  const settings = { alias: state.alias, signal: mine.signal };
  tell("ask-error", null);
  if (isAsked) remember();
  else setTimeout(() => mine.abort(), OPENING_MS);
  if (!query || !documents.length) return tell("ask-error", "A query and at least one document are needed.");
  if (documents.length > MAX_DOCUMENTS) return tell("ask-error", `At most ${MAX_DOCUMENTS} documents, given: ${documents.length}.`);
  if (!outputs().length) return tell("ask-error", `${info().served_model_name} gives no vectors (${info().hybridtei.role}); it may rerank.`);
  byId("scores").setAttribute("aria-busy", "true");
  try {
    const { query: asQuery, document: asDocument } = prompts();
    const together = asQuery[0] === asDocument[0]; // then one call reads both sides
    const all = together
      ? await vectors([query, ...documents], undefined, settings)
      : [...(await vectors([query], asQuery[0], settings)), ...(await vectors(documents, asDocument[0], settings))];
    const texts = all.map((one, at) => ({ ...one, text: [query, ...documents][at], prompt: (at ? asDocument : asQuery)[1] }));
    state.answer = { query, documents, texts, columns: compared(texts) };
    [state.scores, state.selected] = [null, 0];
    byId("ranks").replaceChildren();
    const isCut = texts.filter((text) => text.isCut).length;
    showNotes(isCut ? [`${isCut} texts were cut to ${info().max_input_length} tokens.`] : []);
    state.selected = fusedScores().reduce((best, value, at, values) => (value > values[best] ? at : best), 0);
    state.answer.names = await named(texts, settings);
    showAll();
  } catch (error) {
    if (error.name !== "AbortError") refused(error, "ask-error");
  } finally {
    if (mine === running) byId("scores").setAttribute("aria-busy", "false");
  }
}

function refused(error, place) {
  if (error.status === 401) askForKey();
  tell(place, error.message);
}

/** Texts of terms that a SPLADE model adds; nothing is asked where there are none. */
async function named(texts, settings) {
  if (!outputs().includes("sparse")) return new Map();
  const ids = unnamed(texts);
  try {
    const told = await inParts("decode", ids, info().max_client_batch_size, (part) => ({ ids: part.map((id) => [id]), skip_special_tokens: false }), settings);
    tell("text-error", null);
    return new Map(ids.map((id, at) => [id, told[at].trim()]));
  } catch (error) {
    if (error.name === "AbortError") throw error;
    tell("text-error", `Added terms have no names: ${error.message}`);
    return new Map();
  }
}

/** {kind: a score a document}, and the matrices behind MaxSim. */
function compared([query, ...documents]) {
  const columns = {};
  if (query.dense) columns.dense = documents.map(({ dense }) => dot(query.dense, dense));
  if (query.sparse) columns.sparse = documents.map(({ sparse }) => sparseDot(query.sparse, sparse));
  if (query.multivector) columns.multivector = documents.map(({ multivector }) => maxSim(similarities(query.multivector, multivector)));
  return columns;
}

const fusedScores = () => fused(state.answer.columns, state.shares, state.method);

function showAll() {
  showScores();
  const [query, ...documents] = state.answer.texts;
  byId("text").hidden = !query.sparse;
  if (query.sparse) {
    const texts = [{ ...query, title: "Query", row: null }, ...documents.map((text, row) => ({ ...text, title: `Document ${row + 1}`, row }))];
    showTexts({ texts, query: query.sparse, names: state.answer.names, selected: state.selected, onSelect: select });
  }
  byId("heat").hidden = !query.multivector;
  if (query.multivector) {
    const text = documents[state.selected];
    showHeatMap({ title: `Document ${state.selected + 1}`, matrix: similarities(query.multivector, text.multivector), query, text });
  }
}

function showScores() {
  if (state.answer) {
    const { documents, columns } = state.answer;
    const all = fusedScores();
    const valuesOf = (at) => Object.fromEntries(Object.entries(columns).map(([kind, values]) => [kind, values[at]]));
    const right = exampleOf(state.answer.query, documents)?.answer;
    const rows = documents.map((document, at) => ({ place: at + 1, document, isRight: at === right, ...valuesOf(at), fused: all[at] }));
    tell("verdict", right === undefined ? null : verdict(right, { ...columns, fused: all }));
    showTable(byId("table"), { rows, sort: state.sort, selected: state.selected, lacking: lacking(), onSort: sortBy, onSelect: select });
  }
  if (state.scores) {
    const { documents, scores } = state.scores;
    const same = state.answer !== null && state.answer.documents.join("\n") === documents.join("\n");
    showRanks({ documents, scores, fusedRanks: same ? ranks(fusedScores()) : null, selected: state.selected, onSelect: (row) => same && select(row) });
  }
}

/** Where each column puts the document that answers the query. */
function verdict(right, columns) {
  const names = { ...NAMES, fused: "Fused" };
  const places = Object.entries(columns).map(([kind, values]) => `${names[kind]} #${ranks(values)[right]}`);
  return `Document ${right + 1} answers the query. Its rank: ${places.join(", ")}.`;
}

function sortBy(column) {
  const isSame = state.sort.column === column;
  state.sort = { column, descending: isSame ? !state.sort.descending : !["place", "document"].includes(column) };
  showScores();
}

function select(row) {
  state.selected = row;
  showAll();
}

async function runRerank() {
  const several = !byId("ranker-label").hidden;
  const alias = several ? byId("ranker").value : state.alias;
  const [query, documents] = [typed(), lines()];
  const button = byId("rerank-run");
  tell("rerank-error", null);
  if (!query || !documents.length) return tell("rerank-error", "A query and at least one document are needed.");
  button.disabled = true;
  try {
    const scores = await rerank({ alias, query, documents, size: state.infos.get(alias).max_client_batch_size });
    state.scores = { documents, scores };
    showScores();
  } catch (error) {
    byId("ranks").replaceChildren();
    state.scores = null;
    if (error.status === 424) tell("rerank-error", `${state.infos.get(alias).served_model_name} cannot rerank: ${error.message}`);
    else refused(error, "rerank-error");
  } finally {
    button.disabled = false;
  }
}

async function runSearch() {
  const [collection, query] = [byId("collection").value, typed()];
  state.collection = collection;
  tell("search-error", null);
  remember();
  if (!query || !collection) return tell("search-error", "A query and the name of a collection are needed.");
  byId("search").setAttribute("aria-busy", "true");
  try {
    showHits(await search({ alias: null, collection, query, mode: byId("mode").value }));
  } catch (error) {
    byId("hits").replaceChildren();
    refused(error, "search-error");
  } finally {
    byId("search").setAttribute("aria-busy", "false");
  }
}

byId("search-form").addEventListener("submit", (event) => {
  event.preventDefault();
  runSearch();
});
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  score();
});
byId("documents").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("ask").requestSubmit();
});
byId("fusion").addEventListener("change", (event) => {
  if (event.target.name !== "fusion") return;
  state.method = event.target.value;
  showShares();
  showScores();
  remember();
});
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  await follow();
  scoreFirst();
});
byId("model").addEventListener("change", () => {
  running.abort();
  state.alias = byId("model").value;
  open();
  remember();
});
byId("rerank-run").addEventListener("click", runRerank);
addEventListener("hashchange", follow);
setUp(score);
await follow();
scoreFirst();
