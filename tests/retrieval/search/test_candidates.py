"""Candidates in tiers: normalised scores are numpy's, pages hold every point once, and a document
has one hit."""

import numpy as np
import pytest
from msgspec import structs

from hybridtei.batch import Head
from hybridtei.errors import InvalidInput, PayloadsTooLarge
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.retrieval.search.candidates import group_of
from hybridtei.retrieval.search.options import SearchOptions
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store.base import PayloadBudget, Stored
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.points import to_points
from tests.retrieval.search.rankers import ByLength
from tests.retrieval.search.small_search import (
    MODEL,
    TEXTS,
    exact,
    filled,
)
from tests.retrieval.store.stores import asked

QUERY = "the search engine"
ALL = ("dense", "sparse", "multivector")
WEIGHTS = {"dense": 1.0, "sparse": 0.7, "multivector": 1.0}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The embedded engine, which starts when it is first asked."""
    with asked("embedded", tmp_path_factory.mktemp("store")) as one:
        yield one


@pytest.fixture
def searched(encoder, shared):
    """A function: what `work` makes of a searcher over the texts; five texts in a row are chunks of
    a document."""

    def result(work, kind="memory", texts=TEXTS, **plan):
        store = shared.store if kind == "embedded" else MemoryStore()

        async def scenario():
            await filled(
                encoder,
                store,
                texts=texts,
                payload_of=lambda place: {"document_id": f"d{place // 5}"},
                **plan,
            )
            try:
                return await work(Searcher(store, encoder.named(MODEL)))
            finally:
                await store.drop("papers")

        return shared.run(scenario())

    return result


def one_search(options, **given):
    return lambda searcher: searcher.search("papers", QUERY, options, **given)


def chunks(**fields):
    """Options of a search without groups, unless it names one."""
    return SearchOptions(**{"group_by": None, **fields})


def z_sum(scores, weights):
    return sum(
        weight * (scores[leg] - scores[leg].mean()) / scores[leg].std()
        for leg, weight in weights.items()
    )


@pytest.mark.parametrize("kind", ["memory", "embedded"])
@pytest.mark.parametrize("weights", [WEIGHTS, {"dense": 2.0, "sparse": 0.7}])
def test_normalised_scores_are_numpys(encoder, searched, kind, weights):
    options = chunks(
        weights=None if weights is WEIGHTS else weights, limit=len(TEXTS), explain=True
    )
    found = searched(one_search(options), kind, sparse_idf=False)
    scores = exact(encoder, QUERY)
    total = z_sum(scores, weights)
    assert found.mode == "zscore"
    assert [hit.score for hit in found.hits] == pytest.approx(sorted(total, reverse=True), abs=1e-3)
    for place, hit in enumerate(found.hits, 1):
        assert hit.score == pytest.approx(total[hit.id], abs=1e-3)
        assert hit.scores["zscore"].rank == place
        for leg in weights:
            assert hit.scores[leg].score == pytest.approx(scores[leg][hit.id], abs=1e-5)
    assert [stage.name for stage in found.stages] == ["embed", *weights, "search"]


def test_legs_that_agree_on_all_points_of_a_tier_hide_no_others(encoder, searched):
    """The two best of each leg are the next best of the other, so a second tier of four holds
    nothing new."""
    dense_order, sparse_order = [0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 0, 1, 4, 5, 6, 7]
    one, width = np.zeros(1, np.int64), encoder.spec.dense_width

    def vectors(angle, weight):
        dense = np.zeros((1, width), np.float32)
        dense[0, :2] = np.cos(angle), np.sin(angle)
        return Embeddings(
            dense, SparseVectors(one, np.array([weight], np.float32), np.array([0, 1]), 100)
        )

    async def work(searcher):
        await searcher.store.delete("papers", range(len(TEXTS)))
        for i in range(8):
            one = vectors(dense_order.index(i) / 10, 1 - sparse_order.index(i) / 10)
            await searcher.store.upsert("papers", to_points(one, [100 + i]))
        options = chunks(limit=8, prefetch_limit=2)
        return (await searcher.find("papers", QUERY, vectors(0, 1), 0, options)).hits

    hits = searched(work, sparse_idf=False)
    assert sorted(hit.id - 100 for hit in hits) == dense_order


@pytest.mark.parametrize("kind", ["memory", "embedded"])
@pytest.mark.parametrize("mode", ["zscore", "dense", "rrf"])
def test_as_many_documents_as_asked_for_with_the_best_chunk_of_each(searched, kind, mode):
    # The first four documents fill every first tier
    texts = [QUERY] * 20 + [f"{one} {QUERY}" for one in TEXTS]

    async def work(searcher):
        asked = {"mode": mode, "limit": 6, "prefetch_limit": 5}
        return [
            await searcher.search("papers", QUERY, SearchOptions(**asked | changes))
            for changes in (
                {"group_by": "document_id"},
                {"group_by": "metadata.nothing"},
                {"group_by": None, "limit": 30, "prefetch_limit": 100},
            )
        ]

    grouped, single, every = searched(work, kind, texts)
    documents = [hit.payload["document_id"] for hit in grouped.hits]
    assert len(set(documents)) == len(documents) == 6
    assert [hit.more for hit in single.hits] == [0] * 6
    if mode == "dense":
        best = list(dict.fromkeys(hit.payload["document_id"] for hit in every.hits))
        assert documents == best[:6]
    assert all(hit.more is None for hit in every.hits)


@pytest.mark.parametrize("kind", ["memory", "embedded"])
def test_lists_of_several_values_are_of_no_group_and_not_hidden_by_one(searched, kind):
    tags = [["a"], "a", ["a", "b"], "b", ["a", "c"]]

    async def work(searcher):
        records, _ = await searcher.store.scroll("papers", limit=100, with_vectors=True)
        for record in records:
            record.payload["tag"] = tags[record.id % len(tags)]
        await searcher.store.upsert("papers", records)
        options = chunks(group_by="tag", limit=10, prefetch_limit=2)
        return (await searcher.search("papers", QUERY, options)).hits

    hits = searched(work, kind)
    assert sorted(
        str(hit.payload["tag"]) for hit in hits if len(hit.payload["tag"]) == 2
    ) == sorted(map(str, tags[2::2] * 2))
    assert len(hits) == 6


def test_a_reranker_ranks_documents(searched):
    options = chunks(group_by="document", rerank_limit=2, limit=2)
    first, second = searched(one_search(options, ranker=ByLength())).hits
    assert {first.payload["document_id"], second.payload["document_id"]} == {"d0", "d1"}
    assert first.score == len(first.payload["text"]) >= second.score


@pytest.mark.parametrize(
    ("payload", "key", "group"),
    [
        ({"a": {"b": "c"}}, ["a.b"], ("c",)),
        ({"a": 3}, ["a"], (3,)),
        ({"a": True}, ["a"], None),
        ({"a": ["c"]}, ["a"], ("c",)),
        ({"a": 1.5}, ["a"], None),
        ({}, ["a.b"], None),
        ({"a": "c"}, ["a", "source"], ("c", None)),
        ({"a": "c", "source": "d"}, ["a", "source"], ("c", "d")),
        # A point of its own: the server has written its number as the document's id
        ({"a": "7"}, ["a", "source"], None),
        ({"a": "7"}, ["a"], ("7",)),
    ],
)
def test_what_a_group_is(payload, key, group):
    assert group_of(Stored(7, payload, {}), key) == group


@pytest.mark.parametrize("mode", ["zscore", "dense"])
def test_values_that_points_are_grouped_by_are_payloads_too(searched, mode):
    async def work(searcher):
        small = Searcher(searcher.store, searcher.model, budget=PayloadBudget(200))
        asked = chunks(
            mode=mode, group_by="document_id", with_payload=False, limit=2, prefetch_limit=2
        )
        hits = (await small.search("papers", QUERY, asked)).hits
        with pytest.raises(PayloadsTooLarge):
            await small.search(
                "papers", QUERY, structs.replace(asked, group_by="text", prefetch_limit=10)
            )
        return hits

    assert len(searched(work)) == 2


@pytest.mark.parametrize(
    "fields",
    [{"mode": "dense"}, {"mode": "dense", "limit": 150}, {"offset": 1}, {"with_payload": False}],
)
def test_bytes_of_multivectors_in_payloads_are_neither_given_nor_counted(searched, fields):
    read = []

    async def work(searcher):
        small = Searcher(searcher.store, searcher.model, budget=PayloadBudget(2_000))
        options = chunks(**{"highlights": True, "limit": 9, **fields})
        return (await small.search("papers", QUERY, options)).hits

    class Spent(PayloadBudget):
        def spend(self, points):
            read.extend(points)

    async def counted(searcher):
        spending = Searcher(searcher.store, searcher.model, budget=Spent(0))
        return await spending.search("papers", QUERY, chunks(**fields))

    assert len(searched(work, "embedded", multivector_dtype="int8")) >= 9
    searched(counted, "embedded", multivector_dtype="int8")
    assert all("multivector_base64" not in (point.payload or {}) for point in read)


@pytest.mark.parametrize(
    "fields", [{}, {"mode": "rrf"}, {"mode": "rrf", "rescore": True}, {"group_by": "document"}]
)
def test_without_a_known_term_or_dense_vectors_nothing_is_found(encoder, searched, fields):
    none = SparseVectors(np.zeros(0, np.int64), np.zeros(0, np.float32), np.array([0, 0]), 10)
    asked = encoder.encode([QUERY], ALL, input_type="query")
    query = Embeddings(sparse=none, multivector=asked.multivector)
    plan = {"heads": frozenset({Head.SPARSE, Head.MULTIVECTOR}), "multivector_dtype": "int8"}

    async def work(searcher):
        return await searcher.find("papers", "?", query, 0, chunks(explain=True, **fields))

    assert searched(work, "embedded", **plan).hits == []


@pytest.mark.parametrize("key", ["", "a b", "a[", "a[].b", "..", "a.", '"a b"', "a\n"])
def test_a_key_that_qdrant_reads_otherwise_is_refused(key):
    with pytest.raises(InvalidInput, match="`group_by` is"):
        chunks(group_by=key)


@pytest.mark.parametrize("left", [1, 2, 3, 5, 9])
def test_few_that_a_filter_leaves_stand_in_the_order_of_the_whole(searched, left):
    texts = [f"{one} {other}" for one in TEXTS for other in TEXTS[:6]]

    async def work(searcher):
        asked = chunks(limit=len(texts))
        whole = [
            (hit.id, hit.score) for hit in (await searcher.search("papers", QUERY, asked)).hits
        ]
        for begin in range(0, len(texts) - left, 7):
            some = {identity for identity, _ in whole[begin :: len(texts) // left][:left]}
            only = {"must": [{"has_id": sorted(some)}]}
            for options in (
                structs.replace(asked, query_filter=only),
                structs.replace(asked, query_filter=only, limit=1),
            ):
                hits = (await searcher.search("papers", QUERY, options)).hits
                wanted = [one for one in whole if one[0] in some][: options.limit]
                assert [(hit.id, hit.score) for hit in hits] == wanted

    searched(work, "embedded", texts)


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("weights", [None, {"dense": 1.0, "sparse": 1.0}])
def test_the_scores_of_a_small_collection_follow_from_its_scales(searched, count, weights):
    options = chunks(weights=weights, explain=True)
    hits = searched(one_search(options), texts=TEXTS[:count]).hits
    assert len(hits) == count
    given, own = weights or WEIGHTS, (count - 1) / 9
    total = np.zeros(count)
    for leg, weight in given.items():
        column = np.array([hit.scores[leg].score for hit in hits])
        size = np.abs(column).max()
        deviation = column.std() if column.std() > 1e-6 else size
        height = own * (column.max() - column.mean()) / (deviation or 1) + 1 - own
        scale = deviation**own * size ** (1 - own)
        if scale:
            total += weight * (height + (column - column.max()) / scale)
    assert [hit.score for hit in hits] == pytest.approx(total, abs=1e-5)
