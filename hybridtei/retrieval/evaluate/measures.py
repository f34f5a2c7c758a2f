"""Judged queries, and quality and speed of each search mode on a server.

    corpus.jsonl                 {"_id" or "id", "title", "text"} a line; `ingest` reads it
    queries.jsonl                {"_id" or "id", "text"} a line; only judged queries count
    qrels/test.tsv or qrels.tsv  query, document, grade; with a header or without

Every way uses `/search`, one query at a time, so the times are a single user's. ir-measures
computes trec_eval's measures. They rate documents, but a search finds chunks: a document has the
place of its best chunk.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray

from hybridtei.client import AsyncClient
from hybridtei.errors import InvalidInput
from hybridtei.retrieval.ingest.chunking import DOCUMENT_ID, SOURCE
from hybridtei.retrieval.search.calibration import Curve
from hybridtei.retrieval.search.options import SearchResult
from hybridtei.system.machine import require_extra

T = TypeVar("T")
K = TypeVar("K")
CORPUS, QUERIES, FLAT, FOLDER = "corpus.jsonl", "queries.jsonl", "qrels.tsv", "qrels"
HEADER = re.compile(r"[^\t\d]+\t([^\t]+\t){1,2}[^\t\d]+$")


@dataclass(frozen=True, slots=True)
class Judgements:
    """`queries`: id -> text of judged queries. `relevance`: query's id -> document's id -> grade,
    from 0. `notes`: what was counted in reading. `unanswerable`: id -> text of queries whose judged
    documents are all irrelevant, which only probabilities are fitted to."""

    queries: Mapping[str, str]
    relevance: Mapping[str, Mapping[str, int]]
    notes: str = ""
    unanswerable: Mapping[str, str] = field(default_factory=dict)


def read_judgements(folder: Path, split: str = "test") -> Judgements:
    """Read queries and judgements. Raises InvalidInput, naming the file and the line."""
    relevance: dict[str, dict[str, int]] = {}
    judged = _read(
        judgements_file(folder, split),
        _judgement,
        "query, document and a whole grade, with tabs between",
        has_header=True,
    )
    for (query, document), grade in judged.items():
        relevance.setdefault(query, {})[document] = grade
    relevant = {
        query: grades
        for query, grades in relevance.items()
        if any(grade > 0 for grade in grades.values())
    }
    texts = _read(
        folder / QUERIES, _query, "an object with `_id` or `id`, and a `text` of at least one word"
    )
    documents: Collection[str] = {name for grades in relevance.values() for name in grades}
    if (folder / CORPUS).is_file():
        documents = _read(folder / CORPUS, _document, "an object with `_id` or `id`")
    queries = {query: texts[query] for query in relevant if query in texts}
    if not queries:
        raise InvalidInput(
            f"{folder}: none of the {len(texts)} queries has a relevant document in {split!r}"
        )
    counts = {
        "judgements": len(judged),
        "of no query": sum(query not in texts for query, _ in judged),
        "of no document": sum(document not in documents for _, document in judged),
        "queries": len(queries),
        "without a relevant document": len(relevance) - len(relevant),
        "that are a document": sum(query in documents for query in queries),
    }
    notes = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    unanswerable = {
        query: texts[query] for query in relevance.keys() - relevant.keys() if query in texts
    }
    return Judgements(queries, {query: relevant[query] for query in queries}, notes, unanswerable)


def judgements_file(folder: Path, split: str) -> Path:
    """`qrels/SPLIT.tsv`, or else `qrels.tsv`. Raises InvalidInput, listing the splits."""
    if not folder.is_dir():
        raise InvalidInput(f"{folder}: no such folder")
    path = folder / FOLDER / f"{split}.tsv"
    if path.is_file():
        return path
    if (folder / FLAT).is_file():
        return folder / FLAT
    splits = sorted(path.stem for path in (folder / FOLDER).glob("*.tsv"))
    files = (
        f"it has the splits {', '.join(splits)}"
        if splits
        else f"it has neither {FOLDER}/{split}.tsv nor {FLAT}"
    )
    raise InvalidInput(f"{folder}: no judgements for {split!r}: {files}")


def _judgement(line: str) -> tuple[tuple[str, str], int]:
    # TREC's format has a further column without a meaning
    query, *others, document, grade = line.split("\t")
    if len(others) > 1 or float(grade) % 1:
        raise ValueError
    return (query, document), int(float(grade))


def _document(line: str) -> tuple[str, None]:
    record = orjson.loads(line)
    return str(record["_id"] if "_id" in record else record["id"]), None


def _query(line: str) -> tuple[str, str]:
    text = orjson.loads(line)["text"]
    # A query of no words would be searched as nothing, or null as the word None
    if not isinstance(text, str) or not text.strip():
        raise ValueError
    return _document(line)[0], text


def _read(
    path: Path, parse: Callable[[str], tuple[K, T]], what: str, *, has_header: bool = False
) -> dict[K, T]:
    """Parse each non-empty line by `parse`. `has_header`: the first line may be a header. Raises
    InvalidInput, also for a second line of a key."""
    entries: dict[K, T] = {}
    try:
        with path.open(encoding="utf-8-sig") as opened:
            for number, line in enumerate(opened, 1):
                if not line.strip() or (has_header and number == 1 and HEADER.match(line)):
                    continue
                try:
                    key, value = parse(line.rstrip("\r\n"))
                except (ValueError, KeyError, TypeError) as error:
                    raise InvalidInput(f"{path}, line {number}: should be {what}") from error
                if key in entries:
                    raise InvalidInput(f"{path}, line {number}: {key!r} was there before")
                entries[key] = value
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not UTF-8: {error}") from None
    return entries


# Documents of each ranking, since recall is measured at 100
DEPTH = 100
RERANKED = 50
MEASURES = ("nDCG@10", "MRR@10", "recall@100")
# Qdrant's 61 is the literature's 60
LITERATURE_K = 61

Floats64 = NDArray[np.float64]
# query's id -> document's id -> score
Run = dict[str, dict[str, float]]
# (mode, queries done)
Advance = Callable[[str, int], None]


# Options of a search, and the vectors that the collection must have for it
Way = tuple[Mapping[str, Any], Sequence[str]]
DEFAULT, BOTH = "zscore", ("dense", "sparse")
WAYS: Mapping[str, Way] = {
    "dense": ({"mode": "dense"}, ()),
    "sparse": ({"mode": "sparse"}, ()),
    "multivector, all": ({"mode": "multivector", "exact": True}, ()),
    "rrf k=2": ({"mode": "rrf", "rrf_k": 2}, BOTH),
    "rrf k=61": ({"mode": "rrf", "rrf_k": LITERATURE_K}, BOTH),
    # By the checkpoint's weights, or equal ones
    "weighted": ({"mode": "weighted"}, BOTH),
    "weighted m3": ({"mode": "weighted", "weights": "m3"}, BOTH),
    "weighted m3-two": ({"mode": "weighted", "weights": "m3-two"}, BOTH),
    "dense, MaxSim": ({"mode": "dense", "rescore": True}, ()),
    "rrf k=61, MaxSim": (
        {"mode": "rrf", "rrf_k": LITERATURE_K, "rescore": True},
        (*BOTH, "dense, MaxSim"),
    ),
    "zscore, two": ({"mode": "zscore", "legs": ["dense", "sparse"]}, (*BOTH, "dense, MaxSim")),
    DEFAULT: ({}, ()),
}
# Options of every way
COMMON = {
    "limit": DEPTH,
    "prefetch_limit": DEPTH,
    "group_by": "document",
    "with_payload": [DOCUMENT_ID, SOURCE],
}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one way of searching: measures by name, milliseconds a query without its
    embedding, and each query's nDCG@10, both float64[queries]."""

    name: str
    measures: Mapping[str, float]
    times_ms: Any = field(repr=False)
    ndcg: Any = field(repr=False)

    @property
    def p50_ms(self) -> float:
        return float(np.percentile(self.times_ms, 50))

    @property
    def p95_ms(self) -> float:
        return float(np.percentile(self.times_ms, 95))


@dataclass(frozen=True, slots=True)
class Choice:
    """The recommended way of searching a collection, and its lead over the best other way in
    nDCG@10, with a 95 % interval."""

    name: str
    over: str
    lead: float
    low: float
    high: float
    is_default: bool


@dataclass(frozen=True, slots=True)
class Calibration:
    """A curve, and how far it was from the truth: the expected calibration error in ten bins of the
    first ten hits of half of the queries, by the curve of the other half."""

    way: str
    curve: Curve
    pairs: int
    relevant: int
    error: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of all ways on one collection. `embed_ms` float64[n]: the time of each query's
    embedding."""

    collection: str
    queries: int
    embed_ms: Any
    results: Sequence[Result]
    calibration: Calibration | None = None

    @property
    def choice(self) -> Choice | None:
        """The default, unless another way is significantly better; None if there is only one
        way."""
        if len(self.results) < 2:
            return None
        ranked = sorted(self.results, key=lambda result: -result.measures["nDCG@10"])
        default = next((result for result in self.results if result.name == DEFAULT), ranked[0])
        best = next(result for result in ranked if result is not default)
        lead, low, high = paired_bootstrap(best.ndcg - default.ndcg)
        if low > 0:
            return Choice(best.name, default.name, lead, low, high, is_default=False)
        return Choice(
            default.name, best.name, -lead, -high, -low, is_default=default.name == DEFAULT
        )


def ways_of(rerank: str | None) -> dict[str, Way]:
    """Every way of searching. `rerank`: the alias of a server's reranker."""
    ways = dict(WAYS)
    if rerank is not None:
        options = {
            "rerank": rerank,
            "rerank_limit": RERANKED,
            "limit": RERANKED,
        }
        ways["reranked"] = options, ()
    return ways


async def evaluate(
    client: AsyncClient,
    collection: str,
    judged: Judgements,
    *,
    rerank: str | None = None,
    advance: Advance = lambda name, done: None,
) -> Evaluation:
    """Run every judged query in every way that the collection's vectors allow. `rerank`: the alias
    of a server's reranker.

    Raises LoadError without ir-measures, and the errors of `AsyncClient.search`.
    """
    require_extra("eval", "ir_measures")
    results: dict[str, Result] = {}
    embed_ms: list[float] = []
    for name, (options, needs) in ways_of(rerank).items():
        if not results.keys() >= {*needs}:
            continue
        try:
            run, times = await _run(
                partial(client.search, collection, **{**COMMON, **options}),
                judged,
                embed_ms,
                name,
                advance,
            )
        except InvalidInput:
            # The model or the collection lacks these vectors
            continue
        values = measures_of(run, judged)
        means = {measure: float(column.mean()) for measure, column in values.items()}
        results[name] = Result(name, means, np.array(times), values[MEASURES[0]])
    # A collection of one kind of vectors has one other way, which is the default's
    if len(results) == 2:
        del results[DEFAULT]
    return Evaluation(collection, len(judged.queries), np.array(embed_ms), [*results.values()])


async def _run(
    search: Callable[[str], Awaitable[SearchResult]],
    judged: Judgements,
    embed_ms: list[float],
    name: str,
    advance: Advance,
) -> tuple[Run, list[float]]:
    """(the documents of each query, the milliseconds of each search without the embedding, which
    goes to `embed_ms`)."""
    run: Run = {}
    times = []
    for done, (identity, text) in enumerate(judged.queries.items(), 1):
        result = await search(text)
        embedding, *stages = result.stages
        embed_ms.append(embedding.milliseconds)
        times.append(sum(stage.milliseconds for stage in stages))
        run[identity] = scores_by_rank(documents_of(result))
        advance(name, done)
    return run, times


def documents_of(result: SearchResult) -> list[str]:
    """The ids of the hits' documents. A document that has the id of a better one of another file
    is another document, which no judgement names."""
    sources: dict[str, Any] = {}
    documents = []
    for hit in result.hits:
        document, source = str(hit.payload.get(DOCUMENT_ID, hit.id)), hit.payload.get(SOURCE)
        if sources.setdefault(document, source) != source:
            document = f"{source} {document}"
        documents.append(document)
    return documents


def scores_by_rank(documents: Sequence[str]) -> dict[str, float]:
    """Give documents, the best first, strictly descending scores: measures order equal scores
    arbitrarily."""
    return {
        document: -float(place)
        for place, document in enumerate(list(dict.fromkeys(documents))[:DEPTH], 1)
    }


def measures_of(run: Run, judged: Judgements) -> dict[str, Floats64]:
    """nDCG@10 (linear gains), MRR@10 and recall@100 of the judged queries, in order:
    float64[queries] by name. A query without a result counts as 0."""
    import ir_measures
    from ir_measures import RR, R, nDCG

    # ir-measures would leave out a query without documents
    complete = {query: run.get(query) or {"": 0.0} for query in judged.queries}
    relevance = {query: dict(grades) for query, grades in judged.relevance.items()}
    names = dict(zip((nDCG @ 10, RR @ 10, R @ 100), MEASURES, strict=True))
    ranks = {
        (names[metric.measure], metric.query_id): metric.value
        for metric in ir_measures.iter_calc([*names], relevance, complete)
    }
    return {
        name: np.array([ranks[name, query] for query in judged.queries], np.float64)
        for name in MEASURES
    }


RESAMPLES, RESAMPLED_AT_ONCE, SEED = 10_000, 500, 0


def paired_bootstrap(differences: Floats64) -> tuple[float, float, float]:
    """(mean, low, high): the 95 % interval of the mean of float64[queries] over resampled queries.
    Deterministic."""
    random, count = np.random.default_rng(SEED), len(differences)
    means = []
    for _ in range(RESAMPLES // RESAMPLED_AT_ONCE):
        means.append(differences[random.integers(0, count, (RESAMPLED_AT_ONCE, count))].mean(1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(differences.mean()), float(low), float(high)
