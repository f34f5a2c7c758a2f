"""Ranking quality through the database is the exhaustive ranking's, mode by mode: a real model, a
part of a real collection, the embedded engine. Skipped where the collection is not there."""

import asyncio
import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.retrieval.evaluate.measures import (
    evaluate,
    measures_of,
    read_judgements,
    scores_by_rank,
)
from hybridtei.retrieval.ingest.run import ingest
from hybridtei.retrieval.store import opened
from hybridtei.retrieval.store.query import CollectionPlan
from hybridtei.server.start import in_process
from tests.retrieval.ingest.small_ingest import points
from tests.retrieval.search.fusion import Ranking, rrf

FOLDER = Path(__file__).parents[4] / "shared" / "data" / "cranfield"
ALL = ("dense", "sparse", "multivector")
TOLERANCE = 0.01
# Of the lists that are fused, on both sides
DEPTH = 100
# Of 1,400 and 225: more than twice what a list holds
DOCUMENTS, QUERIES = 250, 75

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not FOLDER.is_dir(), reason="the cranfield collection is not beside the repository"
    ),
]


def part_of_it(folder):
    """The collection's first documents, and the judgements of them."""
    folder.mkdir()
    corpus = (FOLDER / "corpus.jsonl").read_text().splitlines(keepends=True)[:DOCUMENTS]
    kept = {json.loads(line)["id"] for line in corpus}

    def is_kept(query, document, _):
        return int(query) <= QUERIES and document in kept

    header, *judgements = (FOLDER / "qrels.tsv").read_text().splitlines(keepends=True)
    (folder / "corpus.jsonl").write_text("".join(corpus))
    (folder / "qrels.tsv").write_text(
        "".join([header, *(line for line in judgements if is_kept(*line.split("\t")))])
    )
    shutil.copy(FOLDER / "queries.jsonl", folder)
    return folder


def test_every_mode_ranks_as_well_as_an_exhaustive_ranking(tmp_path):
    source = part_of_it(tmp_path / "cranfield")
    judged, place = read_judgements(source), StoreConfig(qdrant_path=str(tmp_path / "qdrant"))
    # All ways, also those that find by MaxSim
    summary = ingest(
        source,
        "cranfield",
        store=place,
        no_chunking=True,
        quiet=True,
        plan=CollectionPlan(multivector_tokens=0, multivector_dtype="float"),
        quarantine=str(tmp_path / "quarantine.jsonl"),
    )
    assert summary.stats.points == DOCUMENTS
    evaluation, documents = asyncio.run(through_the_database(judged, place))
    found = {result.name: result.measures["nDCG@10"] for result in evaluation.results}
    with closing(Encoder.load()) as encoder:
        wanted = exhaustive(encoder, judged, documents)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, abs=TOLERANCE), name
    assert found["dense"] == pytest.approx(0.5010, abs=0.002)


async def through_the_database(judged, place):
    """The evaluation, and every stored point with its vectors."""
    async with in_process([ModelConfig()], EngineConfig(), place) as client:
        evaluation = await evaluate(client, "cranfield", judged)
    async with opened(place) as store:
        return evaluation, await points(store, "cranfield", with_vectors=True)


def exhaustive(encoder, judged, documents):
    """nDCG@10 of rankings of the whole collection, in numpy, from the vectors that are stored."""
    documents = sorted(documents, key=lambda point: int(point.payload["document_id"]))
    names = [point.payload["document_id"] for point in documents]
    asked = encoder.encode(list(judged.queries.values()), ALL, input_type="query")
    dense = asked.dense @ np.array([point.vector["dense"] for point in documents], np.float32).T
    sparse = sparse_scores(asked.sparse, [point.vector.get("sparse") for point in documents])
    rows = [np.array(point.vector["multivector"], np.float32) for point in documents]
    starts = np.cumsum([0, *(len(each) for each in rows[:-1])])
    stacked = np.concatenate(rows)
    maxsim = np.stack(
        [
            np.maximum.reduceat(query @ stacked.T, starts, axis=1).sum(0)
            for query in asked.multivector
        ]
    )
    single = {"dense": dense, "sparse": sparse, "multivector, all": maxsim}
    figures = {
        name: ndcg([np.argsort(-row, kind="stable") for row in scores], names, judged)
        for name, scores in single.items()
    }
    lists = [[cut(dense[q]), cut(sparse[q])] for q in range(len(dense))]
    fused = {"rrf k=2": lambda pair: rrf(pair, k=2), "rrf k=61": lambda pair: rrf(pair, k=61)}
    for name, fuse in fused.items():
        figures[name] = ndcg([fuse(pair).ids for pair in lists], names, judged)
    candidates = [list({*pair[0].ids, *pair[1].ids}) for pair in lists]
    weighted = (
        0.25 * dense
        + 0.05 * sparse
        + maxsim / np.array([len(query) for query in asked.multivector])[:, None]
    )
    for name, scores in (("weighted", weighted), ("rrf k=61, MaxSim", maxsim)):
        rankings = [
            sorted(some, key=lambda place, row=row: -row[place])
            for some, row in zip(candidates, scores, strict=True)
        ]
        figures[name] = ndcg(rankings, names, judged)
    return figures


def sparse_scores(queries, documents):
    """With the collection's inverse document frequency on the query, as the database has it."""
    width = queries.width
    table = np.zeros((len(documents), width), np.float32)
    for row, document in enumerate(documents):
        if document is not None:
            table[row, np.asarray(document["indices"])] = document["values"]
    frequency = (table != 0).sum(0)
    total = sum(document is not None for document in documents)
    idf = np.log(1 + (total - frequency + 0.5) / (frequency + 0.5))
    return (queries.to_dense() * idf) @ table.T


def cut(scores):
    best = [
        int(place) for place in np.argsort(-scores, kind="stable")[:DEPTH] if scores[place] != 0
    ]
    return Ranking(best, scores[best].astype(np.float64))


def ndcg(rankings, names, judged):
    """As `test_evaluate.py` holds it against its definition."""
    runs = {
        query: scores_by_rank([names[place] for place in ranking])
        for query, ranking in zip(judged.relevance, rankings, strict=True)
    }
    return measures_of(runs, judged)["nDCG@10"].mean()
