"""A text's vectors, scores and spans are the same alone, in a batch and among concurrent requests, on every route.

    python conformance/numerics/alone_or_together.py [--backend ort openvino torch] [--texts 40] [--seed N]
    python conformance/numerics/alone_or_together.py --base-url URL      a server that runs, with the aliases of `ROUTES`

Starts, for each backend, one server of five models in float32, seeded tiny checkpoints. Texts have 1 to 300 words, so that
batches are padded, packed and cut. Prints a line a backend and route with the largest difference, then one line of JSON; ends
with 1 if any is above 1e-5. A backend that cannot run a kind of model is left out there, and that is told. A weight that one
answer has and the other has not counts as 0 there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

TOLERANCE = 1e-5
CONCURRENT = 16
ALIASES = ("hybrid", "splade", "reranker", "classifier", "tagger")
WORDS = [
    start + end for start in ("ba", "be", "bo", "bu", "da", "du") for end in ("ka", "ke", "lo", "lu", "mi", "mo", "na", "pe")
]
FIXED = "baka bulo dati"

Texts = list[str]
# A sparse vector, labels with scores: {name: number}, however they are written. Anything else: as it is.
Item = Any


@dataclass(frozen=True)
class Route:
    """How a route is asked about texts, and where in its answer each text's part lies, in their order."""

    alias: str
    path: str
    body: Callable[[Texts], Any]
    items: Callable[[Any], list[Item]]

    @property
    def name(self) -> str:
        return f"{self.path} {self.alias}"


def _as_is(answer: Any) -> list[Item]:
    return list(answer)


def _sparse(answer: Any) -> list[Item]:
    return [_weights(row) for row in answer]


def _weights(row: Any) -> dict[str, float]:
    return {str(entry["index"]): entry["value"] for entry in row}


def _hybrid(answer: Any) -> list[Item]:
    return [{**item, "sparse": _weights(item["sparse"])} for item in answer]


def _labels(answer: Any) -> list[Item]:
    return [{entry["label"]: entry["score"] for entry in row} for row in answer]


def _of(key: str, inner: str) -> Callable[[Any], list[Item]]:
    return lambda answer: [item[inner] for item in answer[key]]


def _ranked(score: str, key: str | None = None) -> Callable[[Any], list[Item]]:
    """Scores in the order of the texts; answers have the best first."""

    def items(answer: Any) -> list[Item]:
        given = answer if key is None else answer[key]
        return [item[score] for item in sorted(given, key=lambda item: item["index"])]

    return items


def _openai_hybrid(answer: Any) -> list[Item]:
    return [[item["embedding"], _pairs(item["sparse_embedding"]), item["multivector"]] for item in answer["data"]]


def _pairs(sparse: Any) -> dict[str, float]:
    return dict(zip(map(str, sparse["indices"]), sparse["values"], strict=True))


def _vertex(answer: Any) -> list[Item]:
    return list(answer["predictions"])


def _hook(answer: Any) -> list[Item]:
    return [_pairs(item) if isinstance(item, dict) else item for item in answer["embeddings"]]


def _hook_body(vector: str) -> Callable[[Texts], Any]:
    return lambda texts: {"inputs": [{"data": text, "data_type": "text", "model": f"hybrid/{vector}"} for text in texts]}


def _inputs(texts: Texts, **more: Any) -> Any:
    return {"inputs": texts, **more}


def _documents(texts: Texts) -> Any:
    return {"query": FIXED, "documents": texts}


def _texts(texts: Texts, **more: Any) -> Any:
    return {"query": FIXED, "texts": texts, **more}


def _pairs_of(texts: Texts) -> Any:
    return {"text_1": FIXED, "text_2": texts}


def _singles(texts: Texts) -> Any:
    return {"inputs": [[text] for text in texts], "raw_scores": True}


def _beside(texts: Texts) -> Any:
    return {"inputs": [[text, FIXED] for text in texts], "raw_scores": True}


ALL = ["dense", "sparse", "multivector"]
ROUTES = (
    Route("hybrid", "/embed", _inputs, _as_is),
    Route("hybrid", "/embed_all", _inputs, _as_is),
    Route("hybrid", "/embed_sparse", _inputs, _sparse),
    Route("splade", "/embed_sparse", _inputs, _sparse),
    Route("hybrid", "/embed_hybrid", _inputs, _hybrid),
    Route("hybrid", "/embed_multivector", _inputs, _as_is),
    Route("hybrid", "/similarity", lambda texts: {"inputs": {"source_sentence": FIXED, "sentences": texts}}, _as_is),
    Route("hybrid", "/v1/embeddings", lambda texts: {"input": texts, "outputs": ALL}, _openai_hybrid),
    Route("hybrid", "/embeddings", lambda texts: {"input": texts}, _of("data", "embedding")),
    Route("hybrid", "/v1/embed", lambda texts: {"texts": texts}, lambda answer: list(answer["embeddings"])),
    Route("hybrid", "/v2/embed", lambda texts: {"texts": texts}, lambda answer: list(answer["embeddings"]["float"])),
    Route("hybrid", "/api/embed", lambda texts: {"input": texts}, lambda answer: list(answer["embeddings"])),
    Route("hybrid", "/vertex", lambda texts: {"instances": [{"inputs": text} for text in texts]}, _vertex),
    Route("hybrid", "/", _inputs, _as_is),
    Route("hybrid", "/invocations", _inputs, _as_is),
    *(Route("hybrid", "/qdrant/inference", _hook_body(vector), _hook) for vector in ALL),
    Route("hybrid", "/rerank", _texts, _ranked("score")),
    Route("reranker", "/rerank", partial(_texts, raw_scores=True), _ranked("score")),
    Route("reranker", "/rerank", _documents, _ranked("relevance_score", "results")),
    Route("reranker", "/v1/rerank", _documents, _ranked("relevance_score", "results")),
    Route("reranker", "/v2/rerank", _documents, _ranked("relevance_score", "results")),
    Route("reranker", "/score", _pairs_of, _ranked("score", "data")),
    Route("reranker", "/v1/score", _pairs_of, _ranked("score", "data")),
    Route("classifier", "/predict", _singles, _labels),
    Route("classifier", "/predict", _beside, _labels),
    Route("classifier", "/classify", lambda texts: {"input": texts}, lambda answer: _labels(answer["data"])),
    Route("classifier", "/v1/classify", lambda texts: {"input": texts}, _of("data", "probs")),
    Route("tagger", "/predict_tokens", partial(_inputs, raw_scores=True), _as_is),
    Route("tagger", "/predict_tokens", partial(_inputs, aggregation_strategy="simple"), _as_is),
    Route("tagger", "/", _inputs, _as_is),
)


def difference(one: Item, other: Item) -> float:
    """The largest between two answers; infinite where they differ in anything but numbers."""
    if isinstance(one, bool) or isinstance(other, bool) or isinstance(one, str) or one is None:
        return 0.0 if one == other else inf
    if isinstance(one, int | float) and isinstance(other, int | float):
        return abs(one - other)
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return max(map(difference, one, other), default=0.0)
    if isinstance(one, dict) and isinstance(other, dict):
        return max((difference(one.get(key, 0.0), other.get(key, 0.0)) for key in one.keys() | other.keys()), default=0.0)
    return inf


def compared(ask: Callable[[str, str, Any], Any], route: Route, texts: Texts) -> dict[str, float]:
    """Return the largest difference to a text alone, by kind of batch. `ask`: alias, path, body -> answer."""

    def alone(text: str) -> Item:
        return route.items(ask(route.alias, route.path, route.body([text])))[0]

    def some(part: Texts) -> list[Item]:
        return route.items(ask(route.alias, route.path, route.body(part)))

    expected = [alone(text) for text in texts]
    found = {"again": difference(expected, [alone(text) for text in texts]), "batched": difference(expected, some(texts))}
    found["reversed"] = difference(expected, some(texts[::-1])[::-1])
    with ThreadPoolExecutor(CONCURRENT) as pool:
        found["concurrent"] = difference(expected, [*pool.map(alone, texts)])
        halves = pool.map(some, [texts[place : place + 8] for place in range(0, len(texts), 8)])
        found["concurrent batches"] = difference(expected, [item for half in halves for item in half])
    return found


def drawn(count: int, seed: int) -> Texts:
    """Texts of 1 to 300 words, lengths even on a logarithmic scale."""
    draw = Random(seed)
    return [" ".join(draw.choices(WORDS, k=int(300 ** draw.random()))) for _ in range(count)]


def asker(client: httpx.Client, *, aliases: bool = True) -> Callable[[str, str, Any], Any]:
    """Asks below the alias. Raises RuntimeError for anything but 200."""

    def ask(alias: str, path: str, body: Any) -> Any:
        response = client.post(f"/m/{alias}{path}" if aliases else path, json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{path}: {response.status_code} {response.text[:300]}")
        return response.json()

    return ask


def measured(url: str, texts: Texts, label: str) -> dict[str, dict[str, float]]:
    """Every route of a server; prints as it goes."""
    found = {}
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        served = {alias for alias in ALIASES if client.get(f"/m/{alias}/info").status_code == 200}
        for number, route in enumerate(ROUTES):
            if route.alias not in served:
                print(f"none {label:9s} {route.name:32s} this backend serves no such model", flush=True)
                continue
            apart = compared(asker(client), route, texts)
            found[f"{number} {route.name}"] = apart
            worst = max(apart.values())
            print(
                f"{'ok  ' if worst <= TOLERANCE else 'FAIL'} {label:9s} {route.name:32s} {worst:.1e} {_worst_of(apart)}",
                flush=True,
            )
    return found


def _worst_of(apart: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.0e}" for name, value in apart.items() if value)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", default=["ort", "openvino", "torch"])
    parser.add_argument("--base-url")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    texts = drawn(arguments.texts, arguments.seed)
    results: dict[str, dict[str, dict[str, float]]] = {}
    if arguments.base_url:
        results["given"] = measured(arguments.base_url, texts, "given")
    else:
        for backend in arguments.backend:
            results[backend] = _of_backend(backend, texts)
    worst = {
        backend: max((max(apart.values()) for apart in routes.values()), default=inf) for backend, routes in results.items()
    }
    asked = {backend: len(routes) for backend, routes in results.items()}
    print(json.dumps({"texts": len(texts), "routes": asked, "tolerance": TOLERANCE, "worst": worst}))
    return int(any(value > TOLERANCE for value in worst.values()) or not all(asked.values()))


def _of_backend(backend: str, texts: Texts) -> dict[str, dict[str, float]]:
    from conformance.fuzz.servers import Plan, serving, write_model

    flags = ("--backend", backend, "--max-client-batch-size", str(len(texts) + 1))  # /similarity adds one
    with tempfile.TemporaryDirectory(prefix="together-") as folder:
        scratch = Path(folder)
        os.environ.setdefault("HYBRIDTEI_CACHE", str(scratch / "cache"))
        with serving(Plan(backend, ALIASES, 1, flags), partial(write_model, folder=scratch / "models"), scratch) as server:
            return measured(f"http://{server.host}:{server.port}", texts, backend)


if __name__ == "__main__":
    raise SystemExit(main())
