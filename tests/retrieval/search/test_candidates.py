"""Candidates in tiers: normalised scores are numpy's, pages hold every point once, and a document
has one hit."""

import numpy as np
import pytest
from msgspec import structs

from hybridtei.batch import Head
from hybridtei.errors import InvalidInput, PayloadsTooLarge
from hybridtei.outputs import Embeddings, SparseVectors
from hybridtei.retrieval.search.candidates import Candidates, group_of
from hybridtei.retrieval.search.fusion import legs_of
from hybridtei.retrieval.search.options import SearchOptions, StageScore
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store.base import PayloadBudget, Stored
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.plan import schema_for
from hybridtei.retrieval.store.points import to_points
from tests.retrieval.search.rankers import ByLength
from tests.retrieval.search.small_search import (
    MODEL,
    TEXTS,
    encoder_of,
    exact,
    filled,
    run,
    spec_in,
)
from tests.retrieval.store.stores import asked

QUERY = "the search engine"
ALL = ("dense", "sparse", "multivector")
WEIGHTS = {"dense": 1.0, "sparse": 0.7, "multivector": 1.0}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return encoder_of(spec_in(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The embedded engine, which starts when it is first asked."""
    with asked("embedded", tmp_path_factory.mktemp("store")) as one:
        yield one


def searched(kind, shared, encoder, texts, work, **plan):
    """What `work` makes of a searcher over the texts; five texts in a row are chunks of a
    document."""
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
def test_normalised_scores_are_numpys(encoder, shared, kind, weights):
    options = chunks(
        weights=None if weights is WEIGHTS else weights, limit=len(TEXTS), explain=True
    )
    found = searched(
        kind,
        shared,
        encoder,
        TEXTS,
        lambda it: it.search("papers", QUERY, options),
        sparse_idf=False,
    )
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


def test_a_sum_that_maxsim_replaced_is_not_explained_as_one(encoder, shared):
    options = chunks(rescore=True, explain=True)
    found = searched(
        "memory", shared, encoder, TEXTS, lambda it: it.search("papers", QUERY, options)
    )
    for place, hit in enumerate(found.hits, 1):
        assert "zscore" not in hit.scores
        assert hit.scores["multivector"] == StageScore(hit.score, place)


def test_legs_that_agree_on_all_points_of_a_tier_hide_no_others(encoder, shared):
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
        each = [
            vectors(dense_order.index(i) / 10, 1 - sparse_order.index(i) / 10) for i in range(8)
        ]
        points = [
            point for i, embedded in enumerate(each) for point in to_points(embedded, [100 + i])
        ]
        await searcher.store.delete("papers", range(len(TEXTS)))
        await searcher.store.upsert("papers", points)
        options = chunks(limit=8, prefetch_limit=2)
        return (await searcher.find("papers", QUERY, vectors(0, 1), 0, options)).hits

    hits = searched("memory", shared, encoder, TEXTS, work, sparse_idf=False)
    assert sorted(hit.id - 100 for hit in hits) == dense_order


def test_a_leg_that_finds_nothing_changes_no_place(encoder, shared):
    async def both(searcher):
        embedded = await searcher.embed("papers", [QUERY])
        none = np.zeros(2, np.int64)
        wordless = Embeddings(
            embedded.dense,
            SparseVectors(none[:0], np.zeros(0, np.float32), none, embedded.sparse.width),
        )
        options = chunks(limit=len(TEXTS))
        hits = (await searcher.find("papers", QUERY, wordless, 0, options)).hits
        dense = (
            await searcher.find(
                "papers", QUERY, wordless, 0, chunks(mode="dense", limit=len(TEXTS))
            )
        ).hits
        return [hit.id for hit in hits], [hit.id for hit in dense]

    hybrid, dense = searched("memory", shared, encoder, TEXTS, both)
    assert hybrid == dense


@pytest.mark.parametrize("kind", ["memory", "embedded"])
@pytest.mark.parametrize("mode", ["zscore", "dense", "rrf"])
def test_as_many_documents_as_asked_for_with_the_best_chunk_of_each(encoder, shared, kind, mode):
    # The first four documents fill every first tier
    texts = [QUERY] * 20 + [f"{one} {QUERY}" for one in TEXTS]

    async def work(searcher):
        asked = chunks(mode=mode, limit=6, prefetch_limit=5)
        return (
            await searcher.search("papers", QUERY, structs.replace(asked, group_by="document_id")),
            await searcher.search(
                "papers", QUERY, structs.replace(asked, group_by="metadata.nothing")
            ),
            await searcher.search(
                "papers", QUERY, structs.replace(asked, mode=mode, limit=30, prefetch_limit=100)
            ),
        )

    grouped, single, every = searched(kind, shared, encoder, texts, work)
    documents = [hit.payload["document_id"] for hit in grouped.hits]
    assert len(set(documents)) == len(documents) == 6
    assert [hit.more for hit in single.hits] == [0] * 6
    if mode == "dense":
        best = list(dict.fromkeys(hit.payload["document_id"] for hit in every.hits))
        assert documents == best[:6]
    assert all(hit.more is None for hit in every.hits)


def test_what_more_counts(encoder, shared):
    options = chunks(group_by="document", limit=2)
    found = searched(
        "memory", shared, encoder, TEXTS, lambda it: it.search("papers", QUERY, options)
    )
    assert [hit.more for hit in found.hits] == [4, 4]


@pytest.mark.parametrize("kind", ["memory", "embedded"])
def test_lists_of_several_values_are_of_no_group_and_not_hidden_by_one(encoder, shared, kind):
    tags = [["a"], "a", ["a", "b"], "b", ["a", "c"]]

    async def work(searcher):
        records, _ = await searcher.store.scroll("papers", limit=100)
        for record in records:
            record.payload["tag"] = tags[record.id % len(tags)]
        vectors = await searcher.store.retrieve(
            "papers", [one.id for one in records], with_vectors=True
        )
        by_id = {one.id: one.vector for one in vectors}
        points = [Stored(one.id, one.payload, by_id[one.id]) for one in records]
        await searcher.store.upsert("papers", points)
        options = chunks(group_by="tag", limit=10, prefetch_limit=2)
        return (await searcher.search("papers", QUERY, options)).hits

    hits = searched(kind, shared, encoder, TEXTS, work)
    assert sorted(
        str(hit.payload["tag"]) for hit in hits if len(hit.payload["tag"]) == 2
    ) == sorted(map(str, tags[2::2] * 2))
    assert len(hits) == 6


def test_a_reranker_ranks_documents(encoder, shared):
    options = chunks(group_by="document", rerank_limit=2, limit=2)
    found = searched(
        "memory",
        shared,
        encoder,
        TEXTS,
        lambda it: it.search("papers", QUERY, options, ranker=ByLength()),
    )
    assert {hit.payload["document_id"] for hit in found.hits} == {"d0", "d1"}
    assert [hit.score for hit in found.hits] == sorted(
        (hit.score for hit in found.hits), reverse=True
    )
    assert found.hits[0].score == len(found.hits[0].payload["text"])


def test_scores_below_the_threshold_are_left_out(encoder, shared):
    async def both(searcher):
        every = await searcher.search("papers", QUERY, chunks())
        some = await searcher.search(
            "papers", QUERY, chunks(score_threshold=0.0, prefetch_limit=100)
        )
        return every.hits, some.hits

    every, some = searched("memory", shared, encoder, TEXTS, both)
    assert some == [hit for hit in every if hit.score >= 0]
    assert 0 < len(some) < len(every)


@pytest.mark.parametrize(
    ("payload", "key", "group"),
    [
        ({"a": {"b": "c"}}, ["a.b"], ("c",)),
        ({"a": "c"}, ["a.b"], None),
        ({"a": 3}, ["a"], (3,)),
        ({"a": True}, ["a"], None),
        ({"a": ["c"]}, ["a"], ("c",)),
        ({"a": ["c", "d"]}, ["a"], None),
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
def test_values_that_points_are_grouped_by_are_payloads_too(encoder, shared, mode):
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

    assert len(searched("memory", shared, encoder, TEXTS, work)) == 2


@pytest.mark.parametrize(
    "fields",
    [{"mode": "dense"}, {"mode": "dense", "limit": 150}, {"offset": 1}, {"with_payload": False}],
)
def test_bytes_of_multivectors_in_payloads_are_neither_given_nor_counted(encoder, shared, fields):
    read = []

    async def work(searcher):
        small = Searcher(searcher.store, searcher.model, budget=PayloadBudget(2_000))
        return (
            await small.search(
                "papers", QUERY, chunks(**{"highlights": True, "limit": 9, **fields})
            )
        ).hits

    class Spent(PayloadBudget):
        def spend(self, points):
            read.extend(points)

    async def counted(searcher):
        return await Searcher(searcher.store, searcher.model, budget=Spent(0)).search(
            "papers", QUERY, chunks(**fields)
        )

    plan = {"multivector_dtype": "int8"}
    assert len(searched("embedded", shared, encoder, TEXTS, work, **plan)) >= 9
    searched("embedded", shared, encoder, TEXTS, counted, **plan)
    assert all("multivector_base64" not in (point.payload or {}) for point in read)


@pytest.mark.parametrize(
    "fields", [{}, {"mode": "rrf"}, {"mode": "rrf", "rescore": True}, {"group_by": "document"}]
)
def test_without_a_known_term_or_dense_vectors_nothing_is_found(encoder, shared, fields):
    none = SparseVectors(np.zeros(0, np.int64), np.zeros(0, np.float32), np.array([0, 0]), 10)
    asked = encoder.encode([QUERY], ALL, input_type="query")
    query = Embeddings(sparse=none, multivector=asked.multivector)
    plan = {"heads": frozenset({Head.SPARSE, Head.MULTIVECTOR}), "multivector_dtype": "int8"}

    async def work(searcher):
        return await searcher.find("papers", "?", query, 0, chunks(explain=True, **fields))

    assert searched("embedded", shared, encoder, TEXTS, work, **plan).hits == []


@pytest.mark.parametrize("key", ["", "a b", "a[", "a[].b", "..", "a.", '"a b"', "a\n"])
def test_a_key_that_qdrant_reads_otherwise_is_refused(key):
    with pytest.raises(InvalidInput, match="`group_by` is"):
        chunks(group_by=key)


def test_of_two_candidates_a_leg_that_hardly_tells_them_apart_does_not_decide(encoder):
    """Point 2 is far above by dense vectors, and point 1 by a hundredth of the sparse score."""
    width, (one, other) = encoder.spec.dense_width, (0.1, 0.9)
    dense = np.zeros((2, width), np.float32)
    dense[:, :2] = [[one, (1 - one**2) ** 0.5], [other, (1 - other**2) ** 0.5]]
    sparse = SparseVectors(
        np.array([5, 5]),
        np.array([1.01, 1.0], np.float32),
        np.array([0, 1, 2]),
        encoder.spec.sparse_width,
    )
    asked = Embeddings(dense=np.eye(1, width, dtype=np.float32), sparse=sparse)

    async def scenario():
        store = MemoryStore()
        await store.create(
            "two", schema_for(encoder.spec, MODEL, heads=frozenset({Head.DENSE, Head.SPARSE}))
        )
        await store.upsert("two", to_points(Embeddings(dense=dense, sparse=sparse), [1, 2]))
        options = chunks(mode="zscore", weights={"dense": 1.0, "sparse": 1.0})
        legs = legs_of(asked, 0, options, is_packed=False)
        return [found.id for found in await Candidates(store, "two", legs, options).best(2)]

    assert run(scenario()) == [2, 1]


@pytest.mark.parametrize("left", [1, 2, 3, 5, 9])
def test_few_that_a_filter_leaves_stand_in_the_order_of_the_whole(encoder, shared, left):
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

    searched("embedded", shared, encoder, texts, work)


@pytest.mark.parametrize("count", [1, 2, 9])
@pytest.mark.parametrize("weights", [None, {"dense": 1.0, "sparse": 1.0}])
def test_the_scores_of_a_small_collection_follow_from_its_scales(encoder, shared, count, weights):
    options = chunks(weights=weights, explain=True)
    hits = searched(
        "memory", shared, encoder, TEXTS[:count], lambda it: it.search("papers", QUERY, options)
    ).hits
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


@pytest.mark.parametrize("kind", ["memory", "embedded"])
def test_a_tenth_point_changes_a_score_as_little_as_others_do(encoder, shared, kind):
    """Of a collection that grows by copies of one text."""
    query = TEXTS[2]
    texts = [query, TEXTS[0], TEXTS[4], TEXTS[3], TEXTS[8], *[TEXTS[1]] * 8]
    scores = []
    for count in range(7, 13):
        found = searched(
            kind,
            shared,
            encoder,
            texts[:count],
            lambda it: it.search("papers", query, chunks(limit=20)),
        )
        scores.append([hit.score for hit in sorted(found.hits, key=lambda hit: hit.id)[:5]])
    before, at_tenth, after = np.abs(np.diff(scores, axis=0))[1:4].max(axis=1)
    assert at_tenth <= 1.5 * max(before, after), scores
