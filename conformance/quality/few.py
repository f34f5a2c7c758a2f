"""How `zscore` ranks fewer than ten candidates: nDCG of small collections by four rules.

    python conformance/quality/few.py --data ../shared/data [--collections cranfield,xquad]
    [--samples 4] [--seed 0]

For each query and each count from 2 to 12, a small collection has one relevant document and others
of the query's best 50 by dense vectors. Idf is that of the small collection. Rules for the mean and
the deviation of each kind of vector:

    shares      0 and the best score; from ten candidates on their own
    own         the candidates' own, however few they are
    steps       what `hybridtei` does: from the first to the second by equal steps
    collection  of scores of the documents' first sentences, as queries, in the small collection

The columns are nDCG@10, the lead over `shares` with the 95 % interval of a paired bootstrap over
the queries, and the mean change of the best score when the last document joins the others.
"""

import argparse
import re
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# Run as a file, this package is not on the path
from conformance.quality.retrieval import gains, max_sim, read_collection  # noqa: E402
from hybridtei.encoder import Encoder  # noqa: E402
from hybridtei.outputs import Embeddings  # noqa: E402
from hybridtei.retrieval.evaluate.measures import paired_bootstrap  # noqa: E402
from hybridtei.retrieval.search.fusion import (  # noqa: E402
    FEW,
    FLAT,
    ZSCORE_WEIGHTS_WITH_MAXSIM,
    scale_of,
)

OUTPUTS = ("dense", "sparse", "multivector")
POOL, SIZES = 50, (2, 3, 4, 5, 6, 8, 9, 10, 12)
SENTENCE = re.compile(r"(?<=[.!?])\s")


class Scores:
    """Scores of queries and documents by each kind of vector."""

    def __init__(self, queries: Embeddings, documents: Embeddings) -> None:
        self.queries, self.documents = queries, documents
        self.sparse = queries.sparse.to_scipy(), documents.sparse.to_scipy()

    def of(self, rows: list[int], places: list[int]) -> dict[str, np.ndarray]:
        """float64[rows, places]; idf of these documents alone."""
        asked, stored = (
            side[chosen] for side, chosen in zip(self.sparse, (rows, places), strict=True)
        )
        having = np.bincount(stored.indices, minlength=stored.shape[1])
        idf = np.log1p((len(places) - having + 0.5) / (having + 0.5))
        vectors = self.queries.multivector, self.documents.multivector
        multi = [
            [side.row(i) for i in chosen]
            for side, chosen in zip(vectors, (rows, places), strict=True)
        ]
        return {
            "dense": self.queries.dense[rows] @ self.documents.dense[places].T,
            "sparse": (asked.multiply(idf[None]).tocsr() @ stored.T).toarray(),
            "multivector": max_sim(*multi),
        }


Scale = Callable[[np.ndarray], tuple[float, float]]


def shares(column: np.ndarray) -> tuple[float, float]:
    return own(column) if len(column) >= FEW else (0.0, float(np.abs(column).max()))


def own(column: np.ndarray) -> tuple[float, float]:
    return float(column.mean()), float(column.std())


def total(scores: dict[str, np.ndarray], scales: dict[str, tuple[float, float]]) -> np.ndarray:
    parts = np.zeros(len(scores["dense"]))
    for leg, weight in ZSCORE_WEIGHTS_WITH_MAXSIM.items():
        mean, deviation = scales[leg]
        parts += weight * (scores[leg] - mean) / deviation if deviation > FLAT else 0.0
    return parts.round(5)


def totals(scores: Scores, sentences: Scores, row: int, places: list[int]) -> dict[str, np.ndarray]:
    """The score of each document by each rule."""
    columns = {leg: column[0] for leg, column in scores.of([row], places).items()}
    rules: dict[str, Scale] = {"shares": shares, "own": own, "steps": scale_of}
    found = {
        name: total(columns, {leg: rule(column) for leg, column in columns.items()})
        for name, rule in rules.items()
    }
    others = sentences.of(places, places)
    apart = ~np.eye(len(places), dtype=bool)
    known = {leg: own(matrix[apart]) for leg, matrix in others.items()}
    return found | {"collection": total(columns, known)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--collections", default="cranfield,xquad")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--queries", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = np.random.default_rng(options.seed)
    for name in options.collections.split(","):
        judged = read_collection(options.data / name)
        with closing(Encoder.load()) as encoder:
            documents = encoder.encode(judged.documents, OUTPUTS, input_type="document")
            asked = judged.queries[: options.queries]
            queries = encoder.encode(asked, OUTPUTS, input_type="query")
            # The first sentence of 20 characters or more
            first = [
                next((part for part in SENTENCE.split(text) if len(part) >= 20), text)
                for text in judged.documents
            ]
            sentences = Scores(encoder.encode(first, OUTPUTS, input_type="query"), documents)
        scores = Scores(queries, documents)
        pools = np.argsort(-(queries.dense @ documents.dense.T), axis=1)[:, :POOL]
        print(f"\n{name}, {len(asked)} queries, {options.samples} collections each")
        for size in SIZES:
            quality: dict[str, list[float]] = {}
            steps: dict[str, list[float]] = {}
            for row, relevance in enumerate(judged.relevance[: len(asked)]):
                sampled: dict[str, list[float]] = {}
                for _ in range(options.samples):
                    relevant = draw.choice([place for place, grade in relevance.items() if grade])
                    others = [place for place in pools[row] if place != relevant]
                    drawn = draw.choice(others, size - 1, replace=False)
                    places = [int(relevant), *map(int, drawn)]
                    order = draw.permutation(size)
                    after = totals(scores, sentences, row, places)
                    before = totals(scores, sentences, row, places[:-1])
                    for rule, values in after.items():
                        best = order[np.argsort(-values[order], kind="stable")]
                        ranking = np.array([[places[place] for place in best]])
                        mine = {place: relevance.get(place, 0) for place in places}
                        sampled.setdefault(rule, []).append(float(gains(ranking, [mine])[0]))
                        steps.setdefault(rule, []).append(
                            abs(values[:-1].max() - before[rule].max())
                        )
                for rule, values in sampled.items():
                    quality.setdefault(rule, []).append(float(np.mean(values)))
            base = np.array(quality["shares"])
            for rule, values in quality.items():
                lead, low, high = paired_bootstrap(np.array(values) - base)
                print(
                    f"{size:3} {rule:10} {np.mean(values):.4f} {lead:+.4f} [{low:+.4f}, {high:+.4f}]"
                    f"  change {np.mean(steps[rule]):.2f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
