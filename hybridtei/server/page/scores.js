// How alike two texts are by each kind of vector, and how the three are made one. Plain numbers in, plain numbers out.

export const KINDS = ["dense", "sparse", "multivector"];
export const RRF_K = 60; // Cormack et al. 2009

export function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
  return sum;
}

/** Sparse vectors as Map(id -> weight). */
export const sparseOf = (entries) => new Map(entries.map(({ index, value }) => [index, value]));

export function sparseDot(a, b) {
  let sum = 0;
  for (const [id, weight] of a) sum += weight * (b.get(id) ?? 0);
  return sum;
}

/** Similarities [query vectors][document vectors]. */
export const similarities = (query, rows) => query.map((vector) => rows.map((row) => dot(vector, row)));

/** Place and value of each query vector's best match, or null where the document has no vector. */
export const bestMatches = (matrix) =>
  matrix.map((row) => (row.length ? row.reduce((best, value, at) => (value > best.value ? { at, value } : best), { at: 0, value: row[0] }) : null));

/** The mean over the query's vectors of their best match: on the scale of a cosine. Source: ColBERT, 2020. */
export function maxSim(matrix) {
  if (!matrix.length) return 0;
  return bestMatches(matrix).reduce((sum, best) => sum + (best?.value ?? -1), 0) / matrix.length;
}

/** 1 for the highest; equal scores share a rank. */
export function ranks(scores) {
  const sorted = [...scores].sort((a, b) => b - a);
  return scores.map((score) => sorted.indexOf(score) + 1);
}

/** Scores -> 0 … 1, lowest to highest; all 0 where they are equal. */
export function stretched(scores) {
  const low = Math.min(...scores);
  const span = Math.max(...scores) - low;
  return scores.map((score) => (span > 0 ? (score - low) / span : 0));
}

const FEW = 10;
const FLAT = 1e-6;

/** Scores -> their distance from the mean, in deviations; fewer than `FEW` as the server does it (`scale_of` of fusion.py). */
export function standardised(scores) {
  const own = Math.min((scores.length - 1) / (FEW - 1), 1);
  const mean = scores.reduce((sum, score) => sum + score, 0) / scores.length;
  const best = Math.max(...scores);
  const size = Math.max(...scores.map(Math.abs));
  let deviation = Math.sqrt(scores.reduce((sum, score) => sum + (score - mean) ** 2, 0) / scores.length);
  if (deviation <= FLAT) deviation = Math.max(size, FLAT);
  const height = own * (best - mean) / deviation + 1 - own;
  deviation = deviation ** own * size ** (1 - own);
  return scores.map((score) => (deviation > FLAT ? (score - best) / deviation + height : 0));
}

const PARTS = { zscore: standardised, weighted: stretched, rrf: (scores) => ranks(scores).map((rank) => 1 / (RRF_K + rank)) };

/** One score a document from columns {kind: scores} and shares {kind: number}; `method`: a key of `PARTS`. */
export function fused(columns, shares, method) {
  const kinds = KINDS.filter((kind) => columns[kind] && shares[kind] > 0);
  const count = Object.values(columns).find(Boolean)?.length ?? 0;
  const total = kinds.reduce((sum, kind) => sum + shares[kind], 0);
  const parts = kinds.map((kind) => PARTS[method](columns[kind]));
  return Array.from({ length: count }, (_, row) => {
    const sum = kinds.reduce((whole, kind, at) => whole + shares[kind] * parts[at][row], 0);
    return method !== "weighted" || total === 0 ? sum : sum / total;
  });
}
