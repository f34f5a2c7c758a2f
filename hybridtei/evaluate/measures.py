"""Judged queries, and how good and how fast each way of searching answers them.

    corpus.jsonl                 {"_id" or "id", "title", "text"} a line; `ingest` reads it
    queries.jsonl                {"_id" or "id", "text"} a line; a file holds those of all splits, only judged ones count
    qrels/test.tsv or qrels.tsv  query, document, grade; with a header or without

Every mode goes the way that `search` goes, through the store, one query at a time; queries are embedded once, also one at a
time, so both times are what a single user waits. The measures' arithmetic is trec_eval's, by ir-measures. A measure is of
documents, and a search finds chunks: a document stands where the best of its chunks does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

from hybridtei.batch import Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import InvalidInput
from hybridtei.ingest.chunking import CHUNK, DOCUMENT_ID
from hybridtei.outputs import Embeddings
from hybridtei.search.options import MAX_RERANKED, Mode, SearchOptions
from hybridtei.search.searcher import Rank, Searcher, since
from hybridtei.store import MAX_LIMIT
from hybridtei.store.base import CollectionSchema
from hybridtei.store.collection import common_heads
from hybridtei.store.packed import packed_format
from hybridtei.system.machine import require_extra

CORPUS, QUERIES, FLAT, FOLDER = "corpus.jsonl", "queries.jsonl", "qrels.tsv", "qrels"


@dataclass(frozen=True, slots=True)
class Judgements:
    """`queries`: id -> text, of those that are judged. `relevance`: query's id -> document's id -> grade, 0 and up."""

    queries: Mapping[str, str]
    relevance: Mapping[str, Mapping[str, int]]


def read_judgements(folder: Path, split: str = "test") -> Judgements:
    """Read queries and judgements. Raises InvalidInput, naming the file and the line."""
    relevance: dict[str, dict[str, int]] = {}
    for query, document, grade in _judgements(judgements_file(folder, split)):
        relevance.setdefault(query, {})[document] = grade
    relevant = {query: grades for query, grades in relevance.items() if any(grade > 0 for grade in grades.values())}
    texts = dict(_queries(folder / QUERIES))
    queries = {query: texts[query] for query in relevant if query in texts}
    if not queries:
        raise InvalidInput(f"{folder}: none of the {len(texts)} queries has a relevant document in {split!r}")
    return Judgements(queries, {query: relevant[query] for query in queries})


def judgements_file(folder: Path, split: str) -> Path:
    """`qrels/SPLIT.tsv`, or else `qrels.tsv`. Raises InvalidInput, which lists the splits."""
    path = folder / FOLDER / f"{split}.tsv"
    if path.is_file():
        return path
    if (folder / FLAT).is_file():
        return folder / FLAT
    splits = sorted(path.stem for path in (folder / FOLDER).glob("*.tsv"))
    there = f"it has the splits {', '.join(splits)}" if splits else f"it has neither {FOLDER}/{split}.tsv nor {FLAT}"
    raise InvalidInput(f"{folder}: no judgements for {split!r}: {there}")


def _judgements(path: Path) -> Iterator[tuple[str, str, int]]:
    for number, line in enumerate(_lines(path), 1):
        fields = line.split("\t")
        if len(fields) == 4:  # TREC's, whose second column means nothing
            fields = [fields[0], *fields[2:]]
        try:
            query, document, grade = fields
            yield query, document, int(float(grade))
        except ValueError:
            if number > 1:  # the first may be a header
                raise InvalidInput(f"{path}, line {number}: should be query, document and grade, with tabs between") from None


def _queries(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_lines(path), 1):
        try:
            record = orjson.loads(line)
            identity = record["_id"] if "_id" in record else record["id"]
            yield str(identity), str(record["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path}, line {number}: should be an object with `_id` or `id`, and `text`") from error


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as opened:
            for line in opened:
                if line.strip():
                    yield line.rstrip("\r\n")
    except FileNotFoundError:
        raise InvalidInput(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{path}: is not UTF-8: {error}") from None


DEPTH = 100  # documents of each ranking, since recall is measured at 100
RERANKED = 50
MEASURES = ("nDCG@10", "MRR@10", "recall@100")
LITERATURE_K = 61  # Qdrant's 61 is the literature's 60

Floats64 = NDArray[np.float64]
Run = dict[str, dict[str, float]]  # query's id -> document's id -> score
Advance = Callable[[str, int], None]  # (mode, queries done)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to search, by the name it has in tables."""

    name: str
    options: SearchOptions
    needs: frozenset[Head]
    reranked: bool = False
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a way: measures by name, milliseconds a query without its embedding, and nDCG@10 of each query, both
    float64[queries]."""

    name: str
    measures: Mapping[str, float]
    times_ms: Any = field(repr=False)
    ndcg: Any = field(repr=False)
    is_default: bool = False

    @property
    def p50_ms(self) -> float:
        return float(np.percentile(self.times_ms, 50))

    @property
    def p95_ms(self) -> float:
        return float(np.percentile(self.times_ms, 95))


@dataclass(frozen=True, slots=True)
class Choice:
    """The way to search a collection by, and its lead over the best other way in nDCG@10, with a 95 % interval."""

    name: str
    over: str
    lead: float
    low: float
    high: float
    is_default: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All ways over one collection. `embed_ms`: of each query's embedding, float64[queries]."""

    collection: str
    queries: int
    documents: int
    embed_ms: Any
    results: Sequence[Result]

    @property
    def choice(self) -> Choice | None:
        """The default, unless another way is above it by more than chance; None where there is only one way."""
        if len(self.results) < 2:
            return None
        ranked = sorted(self.results, key=lambda result: -result.measures["nDCG@10"])
        default = next((result for result in self.results if result.is_default), ranked[0])
        best = next(result for result in ranked if result is not default)
        lead, low, high = paired_bootstrap(best.ndcg - default.ndcg)
        if low > 0:
            return Choice(best.name, default.name, lead, low, high, is_default=False)
        return Choice(default.name, best.name, -lead, -high, -low, is_default=default.is_default)


def ways(has: frozenset[Head], *, reranker: bool = False, shares: bool = False, packed: bool = False) -> list[Way]:
    """Every way to search a collection with these vectors. `shares`: the checkpoint declares the weights of its vectors.
    `packed`: multi-vectors only rank what others found."""
    both, multi = frozenset({Head.DENSE, Head.SPARSE}), frozenset({Head.MULTIVECTOR})
    weights = None if shares else "m3-two" if packed else "m3"
    candidates = [
        Way("dense", SearchOptions(mode="dense"), frozenset({Head.DENSE})),
        Way("sparse", SearchOptions(mode="sparse"), frozenset({Head.SPARSE})),
        *([] if packed else [Way("multivector, all", SearchOptions(mode="multivector", exact=True), multi)]),
        Way("rrf k=2", SearchOptions(mode="rrf", k=2), both),
        Way("rrf k=61", SearchOptions(mode="rrf", k=LITERATURE_K), both),
        Way("weighted", SearchOptions(mode="weighted", weights=weights), both),
        Way("zscore", SearchOptions(), frozenset(), is_default=True),
        Way("zscore, two", SearchOptions(mode="zscore", legs=["dense", "sparse"]), both | multi),
        Way("rrf k=61, MaxSim", SearchOptions(mode="rrf", k=LITERATURE_K, rescore=True), both | multi),
        Way("dense, MaxSim", SearchOptions(mode="dense", rescore=True), frozenset({Head.DENSE}) | multi),
    ]
    if reranker:
        mode: Mode | None = "rrf" if both <= has else None
        options = SearchOptions(mode=mode, k=LITERATURE_K if mode else None, rerank_limit=RERANKED)
        candidates.append(Way(f"{'rrf k=61' if mode else 'found'}, reranked", options, frozenset(), reranked=True))
    several = len(has & {Head.DENSE, Head.SPARSE, Head.MULTIVECTOR}) > 1
    return [way for way in candidates if way.needs <= has and (several or not way.is_default)]


async def evaluate(
    searcher: Searcher,
    collection: str,
    judged: Judgements,
    *,
    rank: Rank | None = None,
    chosen: Sequence[Way] | None = None,
    advance: Advance = lambda name, done: None,
) -> Evaluation:
    """Run every judged query every way. Raises LoadError without ir-measures; what searching raises."""
    require_extra("eval", "ir_measures")
    schema = await searcher.schema(collection)
    points = await searcher.store.count(collection)
    several = await _is_chunked(searcher, collection)
    spec = searcher.model.spec
    has = common_heads(schema, spec)
    selected = list(chosen) if chosen is not None else _ways_of(schema, has, spec, reranker=rank is not None)
    embedded, embed_ms = await _embedded(searcher, collection, judged, advance)
    # of a document's chunks only one counts, so more are searched
    depth = min(4 * DEPTH if several else DEPTH, max(points, 1), MAX_LIMIT)
    results = []
    for way in selected:
        run, times = await _run(
            searcher,
            collection,
            judged,
            embedded,
            way=way,
            rank=rank if way.reranked else None,
            depth=depth,
            advance=advance,
        )
        results.append(Result(way.name, measure(run, judged), times, ndcg_of(run, judged), way.is_default))
    return Evaluation(collection, len(judged.queries), points, embed_ms, results)


def _ways_of(schema: CollectionSchema, has: frozenset[Head], spec: ModelSpec, *, reranker: bool) -> list[Way]:
    shares = spec.multivector is not None and spec.multivector.shares is not None
    return ways(has, reranker=reranker, shares=shares, packed=packed_format(schema) is not None)


async def _is_chunked(searcher: Searcher, collection: str) -> bool:
    from qdrant_client import models

    later = models.Filter(must=[models.FieldCondition(key=CHUNK, range=models.Range(gte=1))])
    records, _ = await searcher.store.scroll(collection, limit=1, scroll_filter=later, with_payload=False)
    return bool(records)


async def _embedded(searcher: Searcher, collection: str, judged: Judgements, advance: Advance) -> tuple[list[Embeddings], Any]:
    rows, times = [], []
    for done, text in enumerate(judged.queries.values(), 1):
        began = perf_counter_ns()
        rows.append(await searcher.embed(collection, [text]))
        times.append(since(began))
        advance("embedding", done)
    return rows, np.array(times)


async def _run(
    searcher: Searcher,
    collection: str,
    judged: Judgements,
    embedded: Sequence[Embeddings],
    *,
    way: Way,
    rank: Rank | None,
    depth: int,
    advance: Advance,
) -> tuple[Run, Any]:
    limit = min(depth, MAX_RERANKED) if rank is not None else depth
    prefetch = max(way.options.prefetch_limit, depth)
    options = msgspec.structs.replace(way.options, limit=limit, prefetch_limit=prefetch, with_payload=[DOCUMENT_ID])
    if way.options.mode in (None, "zscore") and rank is None:  # as `search` has it, whose tiers go as deep as they must
        options = msgspec.structs.replace(options, limit=DEPTH, prefetch_limit=way.options.prefetch_limit, group_by="document")
    if rank is not None:
        options = msgspec.structs.replace(options, limit=min(RERANKED, limit))
    run: Run = {}
    times = []
    for done, (identity, text) in enumerate(judged.queries.items(), 1):
        began = perf_counter_ns()
        result = await searcher.find(collection, text, embedded[done - 1], 0, options, rank=rank)
        times.append(since(began))
        run[identity] = scores_by_rank([str(hit.payload.get(DOCUMENT_ID, hit.id)) for hit in result.hits])
        advance(way.name, done)
    return run, np.array(times)


def scores_by_rank(documents: Sequence[str]) -> dict[str, float]:
    """Documents, the best first, with strictly descending scores, since measures order equal scores as they like."""
    return {document: -float(place) for place, document in enumerate(list(dict.fromkeys(documents))[:DEPTH], 1)}


def measure(run: Run, judged: Judgements) -> dict[str, float]:
    """nDCG@10 (linear gains), MRR@10 and recall@100, means over all judged queries; one without a result counts 0."""
    import ir_measures
    from ir_measures import RR, R, nDCG

    named = {"nDCG@10": nDCG @ 10, "MRR@10": RR @ 10, "recall@100": R @ 100}
    means = ir_measures.calc_aggregate(list(named.values()), *_complete(run, judged))
    return {name: float(means[measure]) for name, measure in named.items()}


def ndcg_of(run: Run, judged: Judgements) -> Floats64:
    """nDCG@10 of each judged query, in their order: float64[queries]."""
    import ir_measures
    from ir_measures import nDCG

    found = {one.query_id: one.value for one in ir_measures.iter_calc([nDCG @ 10], *_complete(run, judged))}
    return np.array([found[query] for query in judged.queries], np.float64)


def _complete(run: Run, judged: Judgements) -> tuple[dict[str, dict[str, int]], Run]:
    """(relevance, run) with every judged query: one without any document would be left out of the mean."""
    complete = {query: run.get(query) or {"": 0.0} for query in judged.queries}
    return {query: dict(grades) for query, grades in judged.relevance.items()}, complete


RESAMPLES, RESAMPLED_AT_ONCE, SEED = 10_000, 500, 0


def paired_bootstrap(differences: Floats64) -> tuple[float, float, float]:
    """(mean, low, high): the 95 % interval of the mean of float64[queries], over resampled queries; the same each time."""
    random, count = np.random.default_rng(SEED), len(differences)
    means = []
    for _ in range(RESAMPLES // RESAMPLED_AT_ONCE):
        means.append(differences[random.integers(0, count, (RESAMPLED_AT_ONCE, count))].mean(1))
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    return float(differences.mean()), float(low), float(high)
