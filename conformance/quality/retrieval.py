"""Ranking quality of a running server on judged collections: nDCG@10 for every output and for their
fusions.

    hybridtei serve &
    python conformance/quality/retrieval.py --data ../shared/data --base-url http://127.0.0.1:3000

Without --base-url a server with the embedded model is started for the run. All vectors come over
HTTP from `/embed_hybrid`. nDCG@10 has linear gains; ties are broken by corpus order. Sparse with
idf multiplies the query's weights by ln(1 + (N - df + 0.5) / (df + 0.5)), df counted over the
collection's own sparse vectors, as Qdrant's `modifier: idf` does. MaxSim ranks the whole
collection. Exits 1 if a mark of the embedded model is missed (`--marks` to check them).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from tqdm import tqdm

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# Run as a file, this package is not on the path
from conformance.processes import free_port, served, started  # noqa: E402

Scores = NDArray[np.float32]
BATCH = 16
# The required figures of the embedded model: (low, high).
MARKS: dict[str, dict[str, tuple[float, float]]] = {
    "cranfield": {
        "dense": (0.4976, 0.5016),
        "sparse": (0.485, 1.0),
        "sparse, idf": (0.51, 1.0),
        "multivector": (0.52, 1.0),
        "best fusion": (0.55, 1.0),
    },
    "xquad": {"dense": (0.941, 0.945)},
}
# Beside 1 for MaxSim's mean: what the embedded model's `/rerank` takes
SHARES = {"dense": 0.25, "sparse": 0.05}
REFERENCE = {
    "cranfield": "BM25 0.4983, SPLADE-tiny 0.4912",
    "xquad": "BM25 0.9585, SPLADE-tiny 0.9658",
}


@dataclass(frozen=True)
class Collection:
    """Texts and judgements: `relevance[q]` maps a document's place to its grade."""

    documents: list[str]
    queries: list[str]
    relevance: list[dict[int, int]]


@dataclass(frozen=True)
class Vectors:
    """Outputs of n texts."""

    dense: Scores
    sparse: csr_array
    multivector: list[Scores]


def read_collection(folder: Path) -> Collection:
    documents, queries = (_jsonl(folder / f"{name}.jsonl") for name in ("corpus", "queries"))
    place = {document["id"]: i for i, document in enumerate(documents)}
    row = {query["id"]: i for i, query in enumerate(queries)}
    relevance: list[dict[int, int]] = [{} for _ in queries]
    for line in (folder / "qrels.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query_id, document_id, grade = line.split("\t")
        relevance[row[query_id]][place[document_id]] = int(grade)
    # The API refuses an empty text; a blank has the same tokens: only special ones.
    texts = [f"{document['title']}\n{document['text']}".strip() or " " for document in documents]
    return Collection(texts, [query["text"] for query in queries], relevance)


def _jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def embed(client: httpx.Client, texts: Sequence[str], width: int, what: str) -> Vectors:
    """Every output of every text, from the server."""
    rows: list[dict[str, Any]] = []
    for start in tqdm(range(0, len(texts), BATCH), desc=what, unit_scale=BATCH, unit="text"):
        body = {"inputs": texts[start : start + BATCH], "sparse_format": "qdrant"}
        answer = client.post("/embed_hybrid", json=body)
        answer.raise_for_status()
        rows += [_arrays(row) for row in answer.json()]
    indptr = np.cumsum([0, *(len(row["indices"]) for row in rows)])
    indices, values = (
        np.concatenate([row[name] for row in rows]) for name in ("indices", "values")
    )
    sparse = csr_array((values, indices, indptr), shape=(len(rows), width))
    return Vectors(
        np.stack([row["dense"] for row in rows]), sparse, [row["multivector"] for row in rows]
    )


def _arrays(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "dense": np.array(row["dense"], np.float32),
        "indices": np.array(row["sparse"]["indices"], np.int64),
        "values": np.array(row["sparse"]["values"], np.float32),
        "multivector": np.array(row["multivector"], np.float32),
    }


def idf(documents: csr_array) -> Scores:
    """Inverse document frequency of each column."""
    frequency = np.bincount(documents.indices, minlength=documents.shape[1])
    total = documents.shape[0]
    return np.log(1 + (total - frequency + 0.5) / (frequency + 0.5)).astype(np.float32)


def max_sim(queries: Sequence[Scores], documents: Sequence[Scores]) -> Scores:
    """Sum over query vectors of the largest dot product: float32[queries, documents]."""
    rows = np.concatenate(documents)
    starts = np.cumsum([0, *(len(document) for document in documents[:-1])])
    return np.stack(
        [np.maximum.reduceat(query @ rows.T, starts, axis=1).sum(0) for query in queries]
    )


def z_scored(scores: Scores) -> Scores:
    """Each query's scores with mean 0 and deviation 1."""
    return (scores - scores.mean(1, keepdims=True)) / (scores.std(1, keepdims=True) + 1e-9)


def reciprocal_ranks(scores: Scores, k: int = 60) -> Scores:
    """1 / (k + rank), ranks from 1."""
    ranks = np.argsort(np.argsort(-scores, axis=1, kind="stable"), axis=1, kind="stable")
    return 1.0 / (k + 1 + ranks)


def reranked(fused: Scores, scores: Scores, top: int = 50) -> Scores:
    """The best `top` of each query in the order of other scores, the rest below them in the order
    it was."""
    floor = np.sort(fused, axis=1)[:, -top, None]
    # float32 would round them away
    return np.where(fused >= floor, scores.astype(np.float64) + 1e6, fused)


def ndcg(scores: Scores, relevance: Sequence[dict[int, int]], cut: int = 10) -> float:
    """Mean nDCG@cut over all queries."""
    return float(gains(np.argsort(-scores, axis=1, kind="stable")[:, :cut], relevance, cut).mean())


def gains(
    places: NDArray[np.int64], relevance: Sequence[dict[int, int]], cut: int = 10
) -> NDArray[np.float64]:
    """nDCG@cut of each query with linear gains, from documents' places in order; the ideal order
    has all judged documents."""
    discount = 1 / np.log2(np.arange(2, cut + 2))
    found = []
    for top, judged in zip(places, relevance, strict=True):
        gained = np.array([judged.get(int(place), 0) for place in top[:cut]])
        ideal = np.sort(list(judged.values()))[::-1][:cut]
        found.append(
            (gained * discount[: len(gained)]).sum() / (ideal * discount[: len(ideal)]).sum()
        )
    return np.array(found)


def scores_of(queries: Vectors, documents: Vectors) -> dict[str, Scores]:
    weights = idf(documents.sparse)
    scores = {
        "dense": queries.dense @ documents.dense.T,
        "sparse": (queries.sparse @ documents.sparse.T).toarray(),
        "sparse, idf": ((queries.sparse * weights) @ documents.sparse.T).toarray(),
        "multivector": max_sim(queries.multivector, documents.multivector),
    }
    dense, sparse, multi = (
        z_scored(scores[name]) for name in ("dense", "sparse, idf", "multivector")
    )
    ranks = {name: reciprocal_ranks(value) for name, value in scores.items()}
    lengths = np.array([len(rows) for rows in queries.multivector])[:, None]
    own = (
        sum(share * scores[name] for name, share in SHARES.items())
        + scores["multivector"] / lengths
    )
    return scores | {
        "RRF dense + sparse, idf": ranks["dense"] + ranks["sparse, idf"],
        "its top 50 by MaxSim": reranked(
            ranks["dense"] + ranks["sparse, idf"], scores["multivector"]
        ),
        "RRF dense + sparse": ranks["dense"] + ranks["sparse"],
        "… its top 50 by MaxSim": reranked(ranks["dense"] + ranks["sparse"], scores["multivector"]),
        "… its top 50 as /rerank scores them": reranked(ranks["dense"] + ranks["sparse"], own),
        "RRF of all three": ranks["dense"] + ranks["sparse, idf"] + ranks["multivector"],
        "z dense + 0.5 z sparse, idf": dense + 0.5 * sparse,
        "z dense + 0.5 z sparse, idf + z multivector": dense + 0.5 * sparse + multi,
    }


def evaluate(client: httpx.Client, folder: Path) -> dict[str, float]:
    """nDCG@10 of every output and fusion on one collection."""
    collection = read_collection(folder)
    # Wider than any vocabulary
    width = 1 << 20
    documents = embed(client, collection.documents, width, f"{folder.name} documents")
    queries = embed(client, collection.queries, width, f"{folder.name} queries")
    scores = scores_of(queries, documents)
    found = {name: ndcg(value, collection.relevance) for name, value in scores.items()}
    return found | {
        "best fusion": max(value for name, value in found.items() if name.startswith(("RRF", "z ")))
    }


@contextlib.contextmanager
def started_server() -> Iterator[str]:
    """A server with the embedded model on a free port."""
    port = free_port()
    with TemporaryDirectory() as folder, started(served(port), port, Path(folder) / "log"):
        yield f"http://127.0.0.1:{port}"


def missed_marks(name: str, found: dict[str, float]) -> list[str]:
    return [
        f"{name}: {what} {found[what]:.4f}, should be in [{low}, {high}]"
        for what, (low, high) in MARKS.get(name, {}).items()
        if not low <= found[what] <= high
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with one folder a collection"
    )
    parser.add_argument("--collections", default="cranfield,xquad")
    parser.add_argument("--base-url", help="a running server [default: start one]")
    parser.add_argument(
        "--marks", action="store_true", help="exit 1 if a mark of the embedded model is missed"
    )
    options = parser.parse_args()
    missed: list[str] = []
    with contextlib.nullcontext(options.base_url) if options.base_url else started_server() as url:
        for name in options.collections.split(","):
            with httpx.Client(base_url=url, timeout=600) as client:
                found = evaluate(client, options.data / name)
            print(f"\n{name}, nDCG@10 (reference: {REFERENCE.get(name, '-')})")
            for what, value in found.items():
                print(f"  {what:45} {value:.4f}")
            print(
                json.dumps(
                    {"collection": name, **{what: round(value, 4) for what, value in found.items()}}
                )
            )
            missed += missed_marks(name, found)
    if options.marks and missed:
        print("\n".join(missed), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
