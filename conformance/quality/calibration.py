"""How true the probabilities of `hybridtei eval --calibrate` are, on queries that were not fitted.

    python conformance/quality/calibration.py --data ../shared/data [--draw]

Each collection is ingested as `hybridtei ingest` does without flags, and each judged query has 100
hits of each mode. A curve is fitted to the hits of a random half of the queries (seed 0). Prints
the expected calibration error in ten equally wide bins of that half and of the other: of all hits;
of a query's first ten, since of 100 hits most are improbable; and of the first one. Then the errors
of a curve on the collection that it was not fitted to, and how many queries are answerable: of
those that the curve's collection answers, and of the other collection's, which it does not.
`--draw` writes the diagram of notebooks/quality.md. Exits 1 if the error of the half of cranfield
that was not fitted, of all or of ten hits, is above its mark.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from hybridtei.config import ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.retrieval.evaluate.calibrate import (
    BINS,
    PAGE,
    calibration_error,
    fit,
    judged_pairs,
    split,
)
from hybridtei.retrieval.evaluate.measures import DEPTH, Floats64, Judgements, read_judgements
from hybridtei.retrieval.ingest.run import ingest
from hybridtei.retrieval.search.calibration import Curve, probabilities
from hybridtei.retrieval.search.options import SearchOptions, SearchResult
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store import open_store
from notebooks.writing.draw import COLOURS, svg, text

NAMES = ("cranfield", "xquad")
PICTURE = Path(__file__).parents[2] / "notebooks" / "pictures" / "reliability.svg"
# Of the half that was not fitted
MARK = 0.08
# The hits of a query, the best first, of which an error is told; the mark is not about the last
FIRST = (DEPTH, PAGE, 1)
BOUNDS = (0.1, 0.3, 0.5, 0.7)
# Relevance drawn from the probabilities
DRAWS = 100
# Queries of the other collection
UNANSWERABLE = 300


class Local:
    """A searcher with the method of a client that `judged_pairs` calls."""

    def __init__(self, searcher: Searcher) -> None:
        self.searcher = searcher

    async def search(self, collection: str, query: str, **options: object) -> SearchResult:
        return await self.searcher.search(collection, query, SearchOptions(**options))


async def all_pairs(
    store: StoreConfig, encoder: Encoder, judged: dict[str, Judgements], options: dict[str, object]
) -> dict[tuple[str, str], Floats64]:
    """(collection, whose queries) -> pairs. The other's queries have no relevant document here."""
    opened = open_store(store)
    client = Local(Searcher(opened, encoder.named(ModelConfig().model_id)))
    pairs = {}
    try:
        for name, other in (NAMES, NAMES[::-1]):
            queries = dict([*judged[other].queries.items()][:UNANSWERABLE])
            foreign = Judgements({}, {}, unanswerable=queries)
            _, pairs[name, name] = await judged_pairs(client, name, judged[name], options)
            _, pairs[name, other] = await judged_pairs(client, name, foreign, options)
    finally:
        await opened.close()
    return pairs


def errors(curve: Curve, pairs: Floats64) -> list[float]:
    """The calibration error among the first hits of each query, for each of `FIRST`."""
    scores, relevant, _, ranks = pairs.T
    values = np.array(probabilities(curve, scores))
    return [calibration_error(values[ranks < n], relevant[ranks < n]) for n in FIRST]


def by_chance(curve: Curve, pairs: Floats64) -> list[float]:
    """What `errors` would be on average if every probability were true: that of finite numbers."""
    drawn = np.random.default_rng(0)
    values = np.array(probabilities(curve, pairs[:, 0]))
    draws = []
    for _ in range(DRAWS):
        true = np.column_stack([pairs[:, 0], drawn.random(len(values)) < values, pairs[:, 2:]])
        draws.append(errors(curve, true))
    return np.mean(draws, axis=0).tolist()


def told(name: str, figures: list[float]) -> None:
    print(f"  {name:34}" + "".join(f"{figure:9.4f}" for figure in figures), flush=True)


def answerable(curve: Curve, pairs: Floats64, bound: float) -> float:
    """The share of queries with a hit whose probability reaches the bound."""
    scores, _, places, _ = pairs.T
    reached = np.array(probabilities(curve, scores)) >= bound
    return len(np.unique(places[reached])) / len(np.unique(places))


def diagram(curve: Curve, own: Floats64, other: Floats64) -> str:
    """Shares of relevant hits by the curve's probability, among a query's first `PAGE` hits, of two
    collections."""
    left, top, size, legend = 70, 50, 320, 414
    parts = [
        text(20, 28, f"The first {PAGE} hits of each query, by cranfield's curve", "bold", "start"),
        f'<rect x="{left}" y="{top}" width="{size}" height="{size}" class="box"/>',
        f'<path class="line" style="marker-end:none" stroke-dasharray="4" d="M{left} {top + size} '
        f'L{left + size} {top}"/>',
        text(left + size / 2, top + size + 38, "probability", "small"),
    ]
    for tick in range(0, 11, 2):
        place = size * tick / 10
        parts.append(text(left + place, top + size + 18, f"{tick / 10:g}", "small"))
        parts.append(text(left - 8, top + size - place + 4, f"{tick / 10:g}", "small", "end"))
    rows = (("cranfield, queries that were not fitted", own, 1), ("xquad", other, 3))
    for number, (name, pairs, shade) in enumerate(rows):
        colour = COLOURS[shade]
        shown = pairs[pairs[:, 3] < PAGE]
        values, relevant = np.array(probabilities(curve, shown[:, 0])), shown[:, 1]
        bins = np.minimum((values * BINS).astype(int), BINS - 1)
        for place in np.unique(bins):
            chosen = bins == place
            x = left + size * values[chosen].mean()
            y = top + size * (1 - relevant[chosen].mean())
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            if number == 0:
                parts.append(text(round(x) - 10, round(y) - 6, f"{chosen.sum():,}", "small", "end"))
        error = calibration_error(values, relevant)
        y = top + 24 + 44 * number
        parts.append(f'<circle cx="{legend}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(text(legend + 14, y, name, "small", "start"))
        parts.append(text(legend + 14, y + 18, f"expected error {error:.3f}", "small", "start"))
    lines = (
        "A point has the hits of a tenth of the",
        "probabilities; its height is the share of",
        "relevant ones; a number counts them.",
    )
    for number, line in enumerate(lines):
        parts.append(text(legend, top + 140 + 18 * number, line, "small", "start"))
    return svg(700, top + size + 54, "Reliability of the probabilities", *parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with one folder a collection"
    )
    parser.add_argument("--modes", default="zscore,dense", help="the first is drawn")
    parser.add_argument("--draw", action="store_true", help="write the diagram")
    choices = parser.parse_args()
    judged = {name: read_judgements(choices.data / name) for name in NAMES}
    encoder = Encoder.load()
    with tempfile.TemporaryDirectory() as folder:
        store = StoreConfig(qdrant_path=f"{folder}/qdrant")
        for name in NAMES:
            corpus, rejected = choices.data / name / "corpus.jsonl", f"{folder}/rejected.jsonl"
            summary = ingest(corpus, name, store=store, quiet=True, quarantine=rejected)
            print(summary.in_words(), file=sys.stderr)
        by_mode = {
            mode: asyncio.run(all_pairs(store, encoder, judged, {"mode": mode}))
            for mode in choices.modes.split(",")
        }
    first, *_ = [reported(mode, pairs) for mode, pairs in by_mode.items()]
    if choices.draw:
        pairs = by_mode[choices.modes.split(",")[0]]
        own = pairs["cranfield", "cranfield"]
        half = split(own[:, 2])
        curve = fit(own[half, 0], own[half, 1])
        drawing = diagram(curve, own[~half], pairs["xquad", "xquad"])
        PICTURE.write_text(drawing, encoding="utf-8")
    return int(first > MARK)


def reported(mode: str, pairs: dict[tuple[str, str], Floats64]) -> float:
    """Print the figures of a mode. Return the greatest error of the half of cranfield that was not
    fitted."""
    curves, worst = {}, 0.0
    print(f"\n{mode}: expected calibration error among a query's first {FIRST} hits")
    for name in NAMES:
        own = pairs[name, name]
        half = split(own[:, 2])
        curves[name] = fit(own[half, 0], own[half, 1])
        unfitted = errors(curves[name], own[~half])
        told(f"{name}, the half that was fitted", errors(curves[name], own[half]))
        told(f"{name}, the other half", unfitted)
        told("... by chance, if all were true", by_chance(curves[name], own[~half]))
        if name == "cranfield":
            worst = max(unfitted[:2])
    for name, other in (NAMES, NAMES[::-1]):
        told(f"{other}, by {name}'s curve", errors(curves[name], pairs[other, other]))
    for name, other in (NAMES, NAMES[::-1]):
        own = pairs[name, name]
        for bound in BOUNDS:
            shares = (
                answerable(curves[name], own[~split(own[:, 2])], bound),
                answerable(curves[name], pairs[name, other], bound),
            )
            print(
                f"  in {name}, `min_probability` {bound}: answerable are {shares[0]:.1%} of its "
                f"own queries, {shares[1]:.1%} of {other}'s"
            )
    return worst


if __name__ == "__main__":
    sys.exit(main())
