"""`Index` beside `encode` and beside Qdrant: the rate of building, the time of a search and the
order of its hits.

    python -m conformance.load index [--texts 10000] [--points 100000] [--queries 200] [--seed 0]

Texts are seeded words; a word's frequency falls with its rank, as in a language. Each thousand is
embedded by `encode` and added to an `Index`, in turns: the ratio is the median of the pairs. Then
both the index and its saved collection in the embedded engine are searched exactly, with the
query's embedding in the time. Hits are equal if ids agree wherever scores differ by more than
rounding. Last, the index grows to `--points` points by copies of the points with noise on their
dense vectors. Exits with 1 if a promise is broken.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from conformance.load.report import Report, milliseconds
from conformance.load.traffic import Texts
from hybridtei import Encoder, Index, SearchHit
from hybridtei.retrieval.search.index import CHUNK
from hybridtei.retrieval.store.base import Stored
from hybridtei.retrieval.store.collection import heads_of
from hybridtei.retrieval.store.plan import budget_of_plan, plan_of

FLAGS = {"index": {"--texts": 10_000, "--points": 100_000, "--queries": 200, "--seed": 0}}
RATE, P50_MS, LARGE_P50_MS, NOISE, ROUNDING = 0.9, 15.0, 80.0, 0.05, 2e-4
LENGTHS, QUERY_LENGTHS = (12, 40), (3, 8)


def texts_of(draw: random.Random, count: int, lengths: tuple[int, int]) -> list[str]:
    words = Texts().words
    draw_of = random.Random(0)
    draw_of.shuffle(words)
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    return [" ".join(draw.choices(words, weights, k=draw.randint(*lengths))) for _ in range(count)]


def built(index: Index, texts: Sequence[str]) -> float:
    """The rate of `add` divided by that of `encode`: the median over the chunks."""
    heads = heads_of(index._schema)
    budget = budget_of_plan(plan_of(index._schema))
    ratios = []
    for number, begin in enumerate(range(0, len(texts), CHUNK)):
        chunk = texts[begin : begin + CHUNK]
        seconds = {}
        for name in sorted(("add", "encode"), reverse=number % 2 == 0):
            began = time.perf_counter()
            if name == "add":
                index.add(chunk, show_progress=False)
            else:
                index.encoder.encode(
                    chunk, sorted(heads), input_type="document", multivector=budget
                )
            seconds[name] = time.perf_counter() - began
        ratios.append(seconds["encode"] / seconds["add"])
    return statistics.median(ratios)


def searched(
    index: Index, queries: Sequence[str], **options: Any
) -> tuple[list[list[SearchHit]], float]:
    """(the hits of each query, the median milliseconds). Prints those of the processor too, which
    other programs of the machine lengthen less."""
    index.search(queries[0], **options)
    hits, seconds, busy = [], [], []
    for query in queries:
        began, began_busy = time.perf_counter(), time.process_time()
        hits.append(index.search(query, **options))
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - began_busy)
    print(f"{milliseconds(busy):.1f} ms of all processors a search", flush=True)
    return hits, milliseconds(seconds)


def is_same(ours: Sequence[SearchHit], others: Sequence[SearchHit]) -> bool:
    return len(ours) == len(others) and all(
        one.id == other.id or abs(one.score - other.score) <= ROUNDING
        for one, other in zip(ours, others, strict=True)
    )


def grow(index: Index, count: int, seed: int) -> None:
    """Fill the index to `count` points."""
    noise, store = np.random.default_rng(seed), index._store
    points, _ = index._loop.run(store.scroll(index._name, limit=count, with_vectors=True))
    for begin in range(len(points), count, len(points)):
        copies = []
        for place, point in enumerate(points[: count - begin]):
            dense = np.asarray(point.vector["dense"], np.float32)
            moved = dense + noise.normal(0, NOISE, dense.shape).astype(np.float32)
            vectors = {**point.vector, "dense": moved}
            copies.append(Stored(begin + place, point.payload, vectors))
        index._loop.run(store.upsert(index._name, copies, index._schema))


def index(options: argparse.Namespace) -> int:
    draw, report = random.Random(options.seed), Report()
    texts = texts_of(draw, options.texts, LENGTHS)
    queries = texts_of(draw, options.queries, QUERY_LENGTHS)
    with closing(Encoder.load()) as encoder, Index(encoder=encoder) as made:
        share = built(made, texts)
        told = f"{share:.3f} of the rate of `encode`"
        report.add("build", f"{len(texts):,} texts", told, share >= RATE)
        hits, p50 = searched(made, queries, exact=True)
        report.add("search", f"{len(made):,} texts", f"p50 {p50:.1f} ms", p50 <= P50_MS)
        with tempfile.TemporaryDirectory() as folder:
            made.save(folder)
            with Index.open(folder, encoder=encoder) as stored:
                others, theirs = searched(stored, queries, exact=True)
        equal = sum(is_same(*pair) for pair in zip(hits, others, strict=True))
        told = f"{equal} in the order of the embedded Qdrant, whose p50 is {theirs:.1f} ms"
        report.add("order", f"{len(queries)} queries", told, equal == len(queries))
        grow(made, options.points, options.seed)
        _, p50 = searched(made, queries, exact=True)
        report.add("search", f"{len(made):,} points", f"p50 {p50:.1f} ms", p50 <= LARGE_P50_MS)
    return report.finish()
