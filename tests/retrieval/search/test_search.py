"""A search through a store: what each stage does, against the same done by hand."""

import asyncio
import threading

import numpy as np
import pytest
from qdrant_client import models

from hybridtei.errors import (
    CollectionMismatch,
    InvalidInput,
    PayloadsTooLarge,
    UnknownCollection,
)
from hybridtei.models.checkpoint.heads import MultivectorHead, Shares
from hybridtei.outputs import Embeddings
from hybridtei.retrieval.search import candidates
from hybridtei.retrieval.search.index import Index
from hybridtei.retrieval.search.options import SearchOptions, StageScore
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store import collection
from hybridtei.retrieval.store.base import CollectionSchema, PayloadBudget, VectorParams
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.plan import PACKED, schema_for
from hybridtei.retrieval.store.points import to_points
from tests.inference.engine import small
from tests.retrieval.search.fusion import Ranking, rrf
from tests.retrieval.search.rankers import ByLength
from tests.retrieval.search.small_search import (
    FLOATS,
    MODEL,
    TEXTS,
    encoder_of,
    exact,
    filled,
    run,
)

QUERY = "the search engine"
TOLERANCE = 1e-5
ALL = ("dense", "sparse", "multivector")


@pytest.fixture(scope="module")
def store(encoder):
    return run(filled(encoder, sparse_idf=False))


@pytest.fixture(scope="module")
def searcher(store, encoder):
    return searcher_of(store, encoder)


def searcher_of(store, encoder, **settings):
    return Searcher(store, encoder.named(MODEL), **settings)


def ranking(scores):
    order = [int(place) for place in np.argsort(-scores, kind="stable") if scores[place] != 0]
    return Ranking(order, scores[order].astype(np.float64))


def ask(searcher, query=QUERY, rank=None, **options):
    return run(searcher.search("papers", query, SearchOptions(**options), ranker=rank))


def test_a_filter_of_too_many_conditions_is_refused_before_the_pass(store, encoder):
    fresh = encoder_of(encoder.spec)
    least = models.FieldCondition(key="metadata.place", match=models.MatchValue(value=1))
    with pytest.raises(InvalidInput, match="`query_filter` holds more than 100 conditions"):
        ask(searcher_of(store, fresh), query_filter=models.Filter(should=[least] * 101))
    assert fresh.forwards == 0


def test_rrf_is_what_k_names_and_fuses_dense_and_sparse(searcher, encoder):
    scores = exact(encoder, QUERY)
    wanted = rrf([ranking(scores["dense"]), ranking(scores["sparse"])], k=61)
    found = ask(searcher, rrf_k=61, limit=len(TEXTS))
    assert found.mode == "rrf"
    assert sorted(hit.score for hit in found.hits) == pytest.approx(
        sorted(wanted.scores), abs=TOLERANCE
    )


def test_weighted_takes_the_shares_that_the_model_declares(encoder, store):
    spec = encoder.spec
    head = MultivectorHead(
        spec.folder, small.DIM, shares=Shares(dense=0.25, sparse=0.05, multivector=1.0)
    )
    encoder = encoder_of(
        small.model_spec(folder=spec.folder, prompts=spec.prompts, multivector=head)
    )
    scores = exact(encoder, QUERY)
    query = encoder.encode([QUERY], ALL, input_type="query")
    scores["multivector"] /= len(query.multivector.row(0))
    wanted = 0.25 * scores["dense"] + 0.05 * scores["sparse"] + scores["multivector"]
    found = ask(searcher_of(store, encoder), mode="weighted", limit=len(TEXTS))
    assert {hit.id: hit.score for hit in found.hits} == pytest.approx(
        dict(enumerate(wanted)), abs=TOLERANCE
    )


def test_a_reranker_has_the_last_word_and_pages_go_through_its_order(searcher):
    best = ask(searcher, mode="dense", limit=5).hits
    expected = sorted((len(hit.payload["text"]) for hit in best), reverse=True)
    found = ask(searcher, rank=ByLength(), mode="dense", limit=2, rerank_limit=5)
    assert [hit.score for hit in found.hits] == expected[:2]
    assert [stage.name for stage in found.stages] == ["embed", "search", "rerank"]
    following = ask(searcher, rank=ByLength(), mode="dense", limit=2, offset=2, rerank_limit=5)
    assert [hit.score for hit in following.hits] == expected[2:4]


def test_long_queries_are_normalised_in_a_thread(store, encoder, monkeypatch):
    """Letters that NFKC makes 18 of."""
    threads = []

    def noted(text):
        threads.append(threading.current_thread() is threading.main_thread())
        return text

    monkeypatch.setattr("hybridtei.retrieval.search.searcher.normalised", noted)
    searcher = searcher_of(store, encoder)
    run(searcher.embed("papers", ["one"]))
    assert threads == [True]
    run(searcher.embed("papers", ["\ufdfa" * 3000] * 2))
    assert threads == [True, False, False]


def test_an_index_takes_rerankers_only(encoder):
    with pytest.raises(
        InvalidInput, match="`reranker` should be a reranker, is a model of the role embedding"
    ):
        Index(TEXTS, encoder, reranker=encoder)


@pytest.mark.parametrize("rescore", [False, True])
def test_an_explanation_tells_what_each_stage_gave_each_hit(searcher, encoder, rescore):
    scores, legs = exact(encoder, QUERY), ("dense", "sparse")
    last = "multivector" if rescore else "rrf"
    assert ask(searcher).hits[0].scores is None
    found = ask(searcher, rrf_k=61, limit=3, rescore=rescore, explain=True, prefetch_limit=3)
    names = [*legs, last] if rescore else legs
    assert [stage.name for stage in found.stages] == ["embed", *names, "search"]
    assert all(stage.milliseconds > 0 for stage in found.stages)
    best = {leg: ranking(scores[leg]).ids[:3] for leg in legs}
    for place, hit in enumerate(found.hits, 1):
        assert hit.scores.pop(last) == StageScore(hit.score, place)
        if rescore:
            assert hit.score == pytest.approx(scores[last][hit.id], abs=TOLERANCE)
        assert set(hit.scores) == {leg for leg in legs if hit.id in best[leg]}
        for leg, given in hit.scores.items():
            assert given.score == pytest.approx(scores[leg][hit.id], abs=TOLERANCE)
            assert best[leg][given.rank - 1] == hit.id


def test_no_leg_runs_twice_where_a_search_is_explained(encoder):
    store = run(filled(encoder, CountedStore()))

    def queries(**options):
        store.calls.clear()
        ask(searcher_of(store, encoder), **options)
        return [(query.using, query.filter is not None) for _, query in store.calls if query]

    for options in ({}, {"mode": "rrf"}, {"mode": "weighted"}, {"mode": "dense", "rescore": True}):
        plain, explained = queries(**options), queries(**options, explain=True)
        assert plain == explained
        assert len(plain) == len(set(plain))


def test_explaining_a_reranked_page_counts_from_its_offset(searcher):
    found = ask(searcher, rank=ByLength(), limit=2, offset=1, explain=True)
    assert [hit.scores["rerank"].rank for hit in found.hits] == [2, 3]
    assert [hit.scores["rerank"].score for hit in found.hits] == [hit.score for hit in found.hits]


def test_highlights_are_the_words_shared_with_the_query(searcher, encoder):
    query = " ".join(small.WORDS)
    found = ask(searcher, query, highlights=True, limit=10)
    of_query = encoder.encode([query], ALL, input_type="query").sparse.to_dense()
    of_documents = encoder.encode(TEXTS, ALL, input_type="document").sparse.to_dense()
    weights = of_query * of_documents
    assert sum(len(hit.highlights) for hit in found.hits) > 3
    for hit in found.hits:
        text = hit.payload["text"]
        marked = [word for word in text.split() if weights[hit.id, small.IDS[word]] > 0]
        assert [mark.text for mark in hit.highlights] == marked
        for mark in hit.highlights:
            assert text[mark.start : mark.end] == mark.text
            weight = weights[hit.id, small.IDS[mark.text]]
            assert mark.weight == pytest.approx(weight, rel=1e-5)


def test_fields_of_the_payload_as_asked_for_whatever_else_needs_the_text(searcher):
    for rank in (None, ByLength()):
        for wanted, names in ((["document_id"], ["document_id"]), (False, [])):
            hit = ask(searcher, rank=rank, with_payload=wanted, highlights=True).hits[0]
            assert list(hit.payload) == names
            assert hit.highlights is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": "3"}, "`limit` is '3': expected `int`, got `str`"),
        ({"legs": "dense"}, "`legs` is 'dense': expected `list"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(searcher, options, message):
    with pytest.raises(InvalidInput, match=message):
        ask(searcher, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rerank_limit": 0}, "`rerank_limit` is 0"), ({"offset": 995}, "1000 is the last")],
)
def test_a_reranker_has_limits(searcher, options, message):
    with pytest.raises(InvalidInput, match=message):
        ask(searcher, rank=ByLength(), **options)


def test_only_the_model_of_the_collection_may_search_it(store, encoder):
    with pytest.raises(CollectionMismatch, match="model_id: there small, wanted other"):
        ask(Searcher(store, encoder.named("other")))
    searcher = searcher_of(store, encoder)
    for name, error, message in (
        ("nowhere", UnknownCollection, "`nowhere`"),
        ("a/b", InvalidInput, "name"),
    ):
        with pytest.raises(error, match=message):
            run(searcher.search(name, QUERY))


def test_a_string_is_no_store(encoder, tmp_path):
    with pytest.raises(
        InvalidInput, match=rf"`store` is '{tmp_path}': should be `open_store\(StoreConfig\("
    ):
        Searcher(str(tmp_path), encoder.named("small"))


async def others(encoder, *names):
    """A searcher of a collection that somebody else made."""
    store = MemoryStore()
    params = VectorParams(size=encoder.spec.dense_width, distance="Cosine")
    await store.create("papers", CollectionSchema(dict.fromkeys(names, params), {}))
    return searcher_of(store, encoder)


async def test_a_collection_of_others_only_where_it_is_allowed(encoder):
    searcher = await others(encoder, "dense")
    with pytest.raises(CollectionMismatch):
        await searcher.search("papers", QUERY)
    found = await searcher.search("papers", QUERY, SearchOptions(unlabelled=True))
    assert (found.mode, found.hits) == ("dense", [])


async def test_a_collection_of_nothing_the_model_makes(encoder):
    searcher = await others(encoder, "image", "sound")
    with pytest.raises(CollectionMismatch, match="has the named vectors image, sound"):
        await searcher.search("papers", QUERY, SearchOptions(unlabelled=True))


async def test_queries_are_cut_to_the_widths_of_the_collection(encoder):
    store = MemoryStore()
    layout = schema_for(encoder.spec, MODEL, dense_dim=4, multivector_dim=3, **FLOATS)
    await store.create("papers", layout)
    dense = encoder.encode(TEXTS, ("dense",), dimensions=4, input_type="document").dense
    rows = encoder.encode(TEXTS, ("multivector",), dimensions=3, input_type="document").multivector
    cut = Embeddings(dense=dense, multivector=rows)
    await store.upsert("papers", to_points(cut, list(range(len(TEXTS)))))
    hits, by_rows = [
        (await searcher_of(store, encoder).search("papers", QUERY, SearchOptions(mode=mode))).hits
        for mode in ("dense", "multivector")
    ]
    query = encoder.encode([QUERY], ("dense",), dimensions=4, input_type="query").dense[0]
    assert hits[0].score == pytest.approx((dense @ query).max(), abs=TOLERANCE)
    assert len(by_rows) == 10


def test_within_an_event_loop_as_in_a_notebook(encoder, tmp_path):
    async def cell():
        with Index(TEXTS, encoder) as index:
            index.save(tmp_path, "papers")
        with Index.open(tmp_path, "papers", encoder) as index:
            both = [index.search(TEXTS[4], limit=1, mode="dense") for _ in range(2)]
        # A second call does nothing
        index.close()
        assert both[0] == both[1]
        return both[0][0].payload["text"]

    assert asyncio.run(cell()) == TEXTS[int(exact(encoder, TEXTS[4])["dense"].argmax())]


async def test_highlights_are_made_beside_the_event_loop(store, encoder):
    loop, turned = asyncio.get_running_loop(), threading.Event()
    model = encoder.named(MODEL)

    def tokens_of(text):
        loop.call_soon_threadsafe(turned.set)
        assert turned.wait(5), "the event loop stands still"
        return encoder.tokens_of(text)

    model.tokens_of = tokens_of
    found = await Searcher(store, model).search("papers", QUERY, SearchOptions(highlights=True))
    assert any(hit.highlights for hit in found.hits)


class CountedStore(MemoryStore):
    """Notes the calls that a search makes for points, and their queries."""

    def __init__(self):
        super().__init__()
        self.calls = []

    async def query(self, name, query):
        self.calls.append(("query", query))
        return await super().query(name, query)

    async def retrieve(self, *arguments, **options):
        self.calls.append(("retrieve", None))
        return await super().retrieve(*arguments, **options)


@pytest.mark.parametrize("with_payload", [True, ["text"], ["text", PACKED], False])
def test_few_points_are_read_once(encoder, monkeypatch, with_payload):
    """The payloads come with the multi-vectors that rank the points, and are those that a further
    call would read."""
    store = run(filled(encoder, CountedStore(), multivector_dtype="int8", multivector_tokens=None))
    searcher = searcher_of(store, encoder)
    store.calls.clear()
    together = ask(searcher, with_payload=with_payload)
    calls = ["query", "query", "retrieve"]
    if with_payload == ["text", PACKED]:
        calls = [*calls, "retrieve"]
    assert [call for call, _ in store.calls] == calls
    monkeypatch.setattr(candidates, "READ_WHOLE", 0)
    apart = ask(searcher, with_payload=with_payload)
    assert together.hits == apart.hits
    names = {"text", "document_id", "metadata"} if with_payload is True else set(with_payload or ())
    assert {name for hit in together.hits for name in hit.payload} == names


def test_the_budget_counts_payloads_that_came_with_multivectors(encoder):
    store = run(filled(encoder, multivector_dtype="int8", multivector_tokens=None))
    budget = PayloadBudget(100_000)
    ask(searcher_of(store, encoder, budget=budget))
    assert 200 < budget.spent < 2_000
    with pytest.raises(PayloadsTooLarge):
        ask(searcher_of(store, encoder, budget=PayloadBudget(200)))


async def test_a_fit_is_made_once_and_again_for_another_schema(encoder, monkeypatch):
    store = await filled(encoder)
    searcher = searcher_of(store, encoder)
    monkeypatch.setattr(collection, "KEPT_S", -1.0)
    first = await searcher.fit("papers")
    # The schema was read again, and is equal.
    assert await searcher.fit("papers") is first
    await store.drop("papers")
    await store.create("papers", schema_for(encoder.spec, MODEL, dense_dim=4, **FLOATS))
    second = await searcher.fit("papers")
    assert second is not first
    assert (first.is_cut, second.is_cut) == (False, True)
    assert (await searcher.embed("papers", [QUERY])).dense.shape == (1, 4)
    await store.drop("papers")
    with pytest.raises(UnknownCollection):
        await searcher.fit("papers")
