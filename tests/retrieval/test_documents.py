"""Documents are fetched, deleted and changed whole, in every kind of store."""

import pytest

from hybridtei.errors import InvalidInput, PayloadsTooLarge, UnknownDocument
from hybridtei.retrieval.documents import Selection, changed, deleted, fetched
from hybridtei.retrieval.store.base import PayloadBudget
from hybridtei.retrieval.store.points import point_id, to_points
from tests.retrieval.store.stores import asked, embeddings

KINDS = ("embedded", "memory", "grpc")
# Two files with documents of one id, of two chunks each; a file of one; and texts of clients
CHUNKS = [
    (point_id(source, chunk), {"document_id": "line-2", "source": source, "chunk": chunk})
    for source in ("a.csv", "b.csv")
    for chunk in range(2)
]
ALONE = [(point_id("c.md", 0), {"document_id": "c.md", "source": "c.md", "chunk": 0, "lang": "de"})]
OWN = [
    (7, {"document_id": "7", "lang": "en"}),
    (point_id("mine", 0), {"document_id": "mine", "lang": "en"}),
    (point_id("", -1), {"lang": "de", "chunk": {"any": "thing"}}),
]
POINTS = [
    (identity, {"text": f"text {place}", "chunks": 2, **payload})
    for place, (identity, payload) in enumerate(CHUNKS + ALONE + OWN)
]


@pytest.fixture(params=KINDS)
def filled(request, tmp_path):
    with asked(request.param, tmp_path) as made:
        ids, payloads = zip(*POINTS, strict=True)
        made.fill(to_points(embeddings(len(ids)), ids, payloads))
        yield made


def rest(made):
    points, _ = made.scroll(limit=100)
    return {point.id: point.payload for point in points}


def delete(made, **selection):
    return made.run(deleted(made.store, made.name, of(**selection)))


def change(made, values, **selection):
    return made.run(changed(made.store, made.name, of(**selection), values))


def of(**fields):
    return Selection(where=fields.pop("filter", None), **fields)


@pytest.mark.parametrize(
    ("selection", "gone"),
    [
        ({"ids": ["mine", "nobody", 99]}, [6]),
        # A chunk stands for its document, and for no other file's
        ({"ids": [POINTS[1][0]]}, [0, 1]),
        ({"ids": ["line-2"], "source": "b.csv"}, [2, 3]),
        ({"filter": {"must": [{"key": "lang", "match": {"value": "de"}}]}}, [4, 7]),
        ({"filter": {"must": [{"key": "chunk", "match": {"value": 1}}]}}, [0, 1, 2, 3]),
        ({"filter": {"must_not": [{"key": "lang", "match": {"any": ["de", "en"]}}]}}, [0, 1, 2, 3]),
    ],
)
def test_a_document_is_deleted_whole(filled, selection, gone):
    assert delete(filled, **selection) == len(gone)
    kept = {identity for place, (identity, _) in enumerate(POINTS) if place not in gone}
    assert set(rest(filled)) == kept
    # Once more: no error
    assert delete(filled, **selection) == 0


def test_a_document_of_several_files_is_named_by_its_file(filled):
    with pytest.raises(InvalidInput, match=r"several files have a document 'line-2'.*a\.csv, b"):
        delete(filled, ids=["line-2"])
    assert len(rest(filled)) == len(POINTS)


def test_what_is_fetched(filled):
    def found(identity, source=None):
        return filled.run(fetched(filled.store, filled.name, identity, source))

    (point,) = found(7)
    assert (point.id, point.payload) == POINTS[5]
    (point,) = found("mine")
    assert point.payload == POINTS[6][1]
    assert [point.payload["chunk"] for point in found("line-2", "a.csv")] == [0, 1]
    # A chunk by its own id alone
    assert [point.id for point in found(POINTS[1][0])] == [POINTS[1][0]]
    with pytest.raises(UnknownDocument, match="has no document 'nobody'"):
        found("nobody")


def test_a_payload_is_changed_in_all_chunks(filled):
    before = rest(filled)
    values = {"lang": "fr", "tags": ["x", {"y": 1.5}]}
    # None removes a key, as in Qdrant
    assert change(filled, {**values, "none": None}, ids=[POINTS[0][0], 7]) == 3
    after = rest(filled)
    for identity, payload in before.items():
        is_chosen = identity in (POINTS[0][0], POINTS[1][0], 7)
        assert after[identity] == ({**payload, **values} if is_chosen else payload)
    change(filled, dict.fromkeys(("lang", "tags", "missing")), ids=[7])
    assert {"lang", "tags"}.isdisjoint(rest(filled)[7])


@pytest.mark.parametrize("key", ["text", "document_id", "source", "chunk", "multivector_base64"])
def test_what_vectors_and_identity_rest_on_is_not_changed(filled, key):
    for value in ("x", None):
        with pytest.raises(InvalidInput, match=f"`{key}` of a stored point cannot be changed"):
            change(filled, {key: value}, ids=[7])


@pytest.mark.parametrize("where", [{}, {"must": []}, {"should": [{"must": []}]}])
def test_an_empty_filter_is_refused(where):
    with pytest.raises(InvalidInput, match="`filter` is empty"):
        of(filter=where)


def test_ids_or_a_filter():
    for fields in ({}, {"ids": [1], "filter": {"must": [{"has_id": [1]}]}}):
        with pytest.raises(InvalidInput, match="should be given, and not both"):
            of(**fields)


def test_thousands_are_deleted_in_pages(tmp_path):
    with asked("memory", tmp_path) as made:
        ids = list(range(2_500))
        payloads = [{"even": place % 2 == 0} for place in ids]
        made.fill(to_points(embeddings(len(ids)), ids, payloads))
        where = {"must": [{"key": "even", "match": {"value": True}}]}
        assert delete(made, filter=where) == 1_250
        assert made.count() == 1_250


@pytest.mark.parametrize("identity", [7, "c.md"])
def test_a_document_of_too_many_bytes_is_not_given(filled, identity):
    fetching = fetched(filled.store, filled.name, identity, budget=PayloadBudget(10))
    with pytest.raises(PayloadsTooLarge):
        filled.run(fetching)


def test_a_change_that_would_write_too_many_bytes_changes_nothing(filled, monkeypatch):
    """The bytes of a request count once for each point."""
    monkeypatch.setattr("hybridtei.retrieval.documents.MAX_CHANGED_BYTES", 150)
    before, values = rest(filled), {"note": "a" * 80}
    with pytest.raises(InvalidInput, match="for each of 2 points"):
        change(filled, values, ids=["line-2"], source="a.csv")
    assert rest(filled) == before
