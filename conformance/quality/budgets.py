"""What small multi-vectors cost in ranking quality: nDCG@10 of MaxSim at each budget, against all
tokens in float32.

    python conformance/quality/budgets.py --data ../shared/data [--collections cranfield,xquad]
    [--time]

The 100 best by dense vectors are ranked anew by MaxSim, with documents as `Encoder.encode(...,
multivector=...)` makes them; bits stand for ±1. Prints for each budget its nDCG@10, its share of
what all tokens reach with a 95 % interval (paired bootstrap over queries), and bytes a document.
`--time`: also milliseconds to merge one document's tokens. Exits 1 if a share is below its mark.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from retrieval import gains, read_collection

from hybridtei.batch import Ragged
from hybridtei.config import MultivectorDtype
from hybridtei.encoder import Encoder
from hybridtei.inference.tasks.embed import InputType
from hybridtei.inference.tasks.pooling import MultivectorBudget, budgeted, merge, unpacked
from hybridtei.inference.tasks.rerank import maxsim
from hybridtei.outputs import Embeddings, Floats

TOP, SAMPLES = 100, 4000
TOKENS = (None, 64, 32, 16)
DTYPES: tuple[MultivectorDtype, ...] = ("float", "int8", "binary")
MARKS: dict[tuple[int | None, str], float] = {
    (32, "float"): 0.99,
    (32, "binary"): 0.98,
    (64, "binary"): 0.995,
}


def rescored(queries: Ragged, documents: Ragged, top: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places of `top` [queries, 100] by MaxSim, equal scores in the order of the collection."""
    ordered = []
    for query, places in zip(queries, top, strict=True):
        scores = maxsim(query, documents.take(places), mean=False)
        ordered.append(places[np.lexsort((places, -scores))])
    return np.array(ordered)


def as_floats(rows: Ragged, width: int) -> Ragged:
    """Documents' vectors as MaxSim takes them: unit, float32."""
    if rows.values.dtype == np.uint8:
        return Ragged(unpacked(rows.values, width), rows.offsets)
    values = rows.values.astype(np.float32)
    return Ragged(values / np.linalg.norm(values, axis=1, keepdims=True), rows.offsets)


def share(found: Floats, full: Floats) -> tuple[float, float, float]:
    """(ratio of means, its 2.5 % and 97.5 % points over resampled queries)."""
    drawn = np.random.default_rng(0).integers(0, len(full), (SAMPLES, len(full)))
    low, high = np.percentile(found[drawn].mean(1) / full[drawn].mean(1), [2.5, 97.5])
    return float(found.mean() / full.mean()), float(low), float(high)


def merge_ms(rows: Sequence[Floats], tokens: int) -> float:
    """Median milliseconds to merge one of the documents of 140 to 160 tokens."""
    times = []
    for row in [row for row in rows if 140 <= len(row) <= 160][:50]:
        began = time.perf_counter()
        merge(row, tokens)
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def measure(encoder: Encoder, folder: Path, *, timed: bool) -> list[str]:
    """Prints a table; returns the marks that are missed."""
    collection, missed = read_collection(folder), []

    def embed(texts: Sequence[str], kind: InputType, tokens: int | None = None) -> Embeddings:
        budget = MultivectorBudget(max_tokens=tokens)
        return encoder.encode(texts, ("dense", "multivector"), input_type=kind, multivector=budget)

    queries, documents = embed(collection.queries, "query"), embed(collection.documents, "document")
    assert queries.dense is not None
    asked, whole = queries.multivector, documents.multivector
    top = np.argsort(-(queries.dense @ documents.dense.T), axis=1, kind="stable")[:, :TOP]
    full = gains(rescored(asked, whole, top), collection.relevance)
    print(
        f"\n{folder.name}: nDCG@10, dense {gains(top, collection.relevance).mean():.4f}; share of "
        "all tokens in float32; bytes"
    )
    for tokens in TOKENS:
        merged = (
            whole if tokens is None else embed(collection.documents, "document", tokens).multivector
        )
        assert merged is not None
        for dtype in DTYPES:
            made = budgeted(merged, MultivectorBudget(dtype=dtype))
            found = gains(
                rescored(asked, as_floats(made, asked.values.shape[1]), top), collection.relevance
            )
            ratio, low, high = share(found, full)
            name, mark = f"{tokens or 'all'} {dtype}", MARKS.get((tokens, dtype))
            verdict = (
                ""
                if mark is None
                else f"  mark {mark:.1%} {'holds' if ratio >= mark else 'MISSED'}"
            )
            size = f"{made.values.nbytes / len(made):>9,.0f}"
            print(
                f"  {name:12} {found.mean():.4f}  {ratio:8.2%} [{low:.2%}, {high:.2%}] "
                f"{size}{verdict}",
                flush=True,
            )
            missed += (
                [f"{folder.name}: {name} {ratio:.2%}"] if mark is not None and ratio < mark else []
            )
    if timed:
        print(f"  to merge 150 tokens to 32: {merge_ms([*whole], 32):.2f} ms")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with one folder a collection"
    )
    parser.add_argument("--collections", default="cranfield,xquad")
    parser.add_argument("--model", default="minilm-hybrid")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    encoder = Encoder.load(options.model)
    missed = [
        line
        for name in options.collections.split(",")
        for line in measure(encoder, options.data / name, timed=options.time)
    ]
    print("\n".join(["", *(f"below its mark: {line}" for line in missed)]))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
