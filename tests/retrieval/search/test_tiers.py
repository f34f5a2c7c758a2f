"""Searches by document, whose candidates come in tiers: laws over random collections, with numpy as
the oracle."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.retrieval.search.options import SearchOptions
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store.base import CollectionSchema, SparseVectorParams, VectorParams
from hybridtei.retrieval.store.collection import Searchable
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.points import to_points
from tests.inference.engine import small
from tests.retrieval.search.small_search import run

WIDTH, VOCABULARY = 4, 12
SCHEMA = CollectionSchema(
    {"dense": VectorParams(size=WIDTH, distance="Cosine")},
    {"sparse": SparseVectorParams()},
    {"model_id": "small"},
)
# (source, id) of a chunk's document; 1 is not "1", and an id may be a source too
NAMES = st.sampled_from(["a", "b", "1", 1, 2])
DOCUMENTS = st.tuples(st.sampled_from([None, "a", "b"]), NAMES)
COLLECTIONS = st.tuples(st.lists(DOCUMENTS, min_size=1, max_size=40), st.integers(0, 99))
MODES = st.sampled_from(["rrf", "zscore", "dense"])
BY_DOCUMENT = {"group_by": "document", "with_payload": False}


class Shelf:
    """A collection of chunks with random vectors, which a random query searches by document."""

    def __init__(self, documents, seed):
        random = np.random.default_rng(seed)
        count = len(documents) + 1
        sparse = np.where(random.random((count, VOCABULARY)) < 0.4, 1.0, 0.0)
        sparse *= random.random((count, VOCABULARY)) + 0.1
        dense = random.normal(size=(count, WIDTH))
        dense /= np.linalg.norm(dense, axis=1, keepdims=True)
        self.vectors = Embeddings(
            dense=dense.astype(np.float32),
            sparse=SparseVectors.from_dense(sparse.astype(np.float32)),
        )
        self.documents = documents
        self.dense = dense[1:] @ dense[0]
        self.sparse = sparse[1:] @ sparse[0]
        self.query = self.vectors.part(0, 1)
        payloads = [
            {"document_id": name} | ({} if source is None else {"source": source})
            for source, name in documents
        ]
        self.points = to_points(self.vectors.part(1, count), list(range(len(documents))), payloads)

    def pages(self, *pages):
        """The hits of pages, each with its options."""

        async def search():
            store = MemoryStore()
            await store.create("c", SCHEMA)
            await store.upsert("c", self.points)
            spec = small.model_spec(multivector=None, hidden_size=WIDTH)
            fit = Searchable.of(SCHEMA, spec, "c")
            searcher = Searcher(store, None)
            return [
                (await searcher.find("c", "", self.query, 0, SearchOptions(**page), fit=fit)).hits
                for page in pages
            ]

        return run(search())

    def group(self, identity):
        """What makes a point one with others."""
        source, name = self.documents[identity]
        # The server writes a number as the text of the document's id
        return ("own", identity) if name == str(identity) else (source, type(name), name)

    def scores(self, mode):
        """Every chunk's score where all of them are candidates."""
        if mode == "dense":
            return self.dense
        if mode == "rrf":
            scores = np.zeros(len(self.dense))
            for leg in (self.dense, np.where(self.sparse > 0, self.sparse, -np.inf)):
                order = np.lexsort((np.arange(len(leg)), -leg.astype(np.float32)))
                places = np.empty(len(leg))
                places[order] = np.arange(1, len(leg) + 1)
                scores += np.where(np.isfinite(leg), 1 / (places + 1), 0)
            return scores.round(9)
        return None


@given(COLLECTIONS, MODES)
@settings(max_examples=60, deadline=None)
def test_where_the_first_tier_holds_the_collection_the_search_is_exact(collection, mode):
    shelf = Shelf(*collection)
    options = BY_DOCUMENT | {"mode": mode, "prefetch_limit": 100}
    whole, chunks = shelf.pages(options | {"limit": 50}, options | {"limit": 50, "group_by": None})
    scores = [hit.score for hit in whole]
    assert scores == sorted(scores, reverse=True)
    # Groups are numpy's over every chunk
    best, counts = {}, {}
    for hit in chunks:
        best.setdefault(shelf.group(hit.id), hit.id)
        counts[shelf.group(hit.id)] = counts.get(shelf.group(hit.id), -1) + 1
    assert [hit.id for hit in whole] == list(best.values())
    assert [hit.more for hit in whole] == [counts[shelf.group(hit.id)] for hit in whole]
    oracle = shelf.scores(mode)
    if oracle is not None:
        assert [hit.score for hit in chunks] == pytest.approx(
            sorted(oracle, reverse=True), abs=1e-5
        )
    threshold = scores[len(scores) // 2]
    pages = [{"limit": 3, "offset": offset} for offset in range(0, 30, 3)]
    thirty, above, *threes = shelf.pages(
        options | {"limit": 30},
        options | {"limit": 50, "score_threshold": threshold},
        *(options | page for page in pages),
    )
    assert [hit for page in threes for hit in page] == thirty
    assert [hit.id for hit in above] == [hit.id for hit in whole if hit.score >= threshold]


@given(COLLECTIONS, MODES, st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_where_it_does_not_nothing_is_twice_or_left_out(collection, mode, prefetch_limit):
    shelf = Shelf(*collection)
    options = BY_DOCUMENT | {"mode": mode, "prefetch_limit": prefetch_limit}
    pages = [{"limit": 3, "offset": offset} for offset in range(0, 45, 3)]
    whole, *threes = shelf.pages(options | {"limit": 50}, *(options | page for page in pages))
    every = {shelf.group(identity) for identity in range(len(shelf.documents))}
    for hits in (whole, [hit for page in threes for hit in page]):
        groups = [shelf.group(hit.id) for hit in hits]
        assert len(groups) == len(every)
        assert set(groups) == every
    for page in (whole, *threes):
        scores = [hit.score for hit in page]
        assert scores == sorted(scores, reverse=True)
    threshold = whole[len(whole) // 2].score
    (above,) = shelf.pages(options | {"limit": 50, "score_threshold": threshold})
    assert {hit.id for hit in above} <= {hit.id for hit in whole if hit.score >= threshold}
    assert whole[0].id in {hit.id for hit in above}


def test_a_long_document_puts_no_better_one_behind():
    """One document fills the first tiers: what a later tier finds is sorted in, and the threshold
    keeps all above it."""
    shelf = Shelf([("manual", "manual")] * 60 + [(f"n{n}", f"n{n}") for n in range(12)], 5)
    options = {"mode": "rrf", "group_by": "document", "prefetch_limit": 20, "limit": 13}
    (whole,) = shelf.pages(options)
    scores = [hit.score for hit in whole]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 13
    (above,) = shelf.pages(options | {"score_threshold": scores[7]})
    assert [hit.id for hit in above] == [hit.id for hit in whole[: len(above)]]
    assert len(above) >= 8
