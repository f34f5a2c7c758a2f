"""`Index`: a list of texts is searched as a collection of Qdrant with the same texts."""

import pandas
import polars
import pytest

from hybridtei import Index, StoreError, UnknownCollection
from hybridtei.errors import EmptyInput, InvalidInput, InvalidPoint
from tests.retrieval.search.small_search import TEXTS, encoder_of, spec_in

QUERIES = ("the search engine", "one two", "words and meaning", "five")
RECORDS = [{"text": text, "year": 2000 + place} for place, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return encoder_of(spec_in(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def index(encoder):
    with Index(RECORDS, encoder) as made:
        yield made


@pytest.mark.parametrize("mode", [None, "dense", "sparse", "rrf", "weighted"])
def test_hits_are_those_of_the_same_collection_in_qdrant(index, encoder, tmp_path, mode):
    index.save(tmp_path, "papers")
    with Index.open(tmp_path, "papers", encoder) as stored:
        assert len(stored) == len(index) == len(TEXTS)
        for query in QUERIES:
            hits, expected = (
                side.search(query, limit=4, mode=mode, exact=True) for side in (index, stored)
            )
            assert [hit.id for hit in hits] == [hit.id for hit in expected]
            assert [hit.payload for hit in hits] == [hit.payload for hit in expected]
            scores = [hit.score for hit in expected]
            assert [hit.score for hit in hits] == pytest.approx(scores, abs=1e-4)


def test_a_saved_index_grows_and_is_not_overwritten(encoder, tmp_path):
    with Index(["one two"], encoder) as index:
        index.save(tmp_path)
        with pytest.raises(StoreError, match="already"):
            index.save(tmp_path)
    with Index.open(tmp_path, encoder=encoder) as stored:
        stored.add([{"text": "three four", "id": 7}])
        assert {hit.id for hit in stored.search("three", mode="dense")} == {0, 7}
    with pytest.raises(UnknownCollection, match="there is no collection `letters`"):
        Index.open(tmp_path, "letters", encoder)


def test_filters_read_the_keys_of_records(index):
    filtered = index.search(
        "two", limit=10, filter={"must": [{"key": "year", "range": {"gte": 2004, "lt": 2007}}]}
    )
    assert sorted(hit.payload["year"] for hit in filtered) == [2004, 2005, 2006]
    with pytest.raises(InvalidInput, match=r"`filter\.must\[0\]\.ranges"):
        index.search("two", filter={"must": [{"key": "year", "ranges": {"gte": 2004}}]})
    with pytest.raises(
        InvalidInput, match=r'`filter\.year`.*; a filter looks like {"must": \[{"key'
    ):
        index.search("two", filter={"year": 2004})


def test_a_search_explains_its_scores(index):
    (hit,) = index.search("one two", limit=1, explain=True)
    assert {"dense", "sparse", "multivector", "zscore"} <= hit.scores.keys()


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(lambda: (record for record in RECORDS), id="generator"),
        pytest.param(lambda: pandas.DataFrame(RECORDS), id="pandas"),
        pytest.param(lambda: polars.DataFrame(RECORDS), id="polars"),
    ],
)
def test_records_come_in_the_forms_of_their_libraries(index, encoder, records):
    with Index(records(), encoder) as other:
        hits = [side.search(QUERIES[0], limit=3) for side in (index, other)]
    assert hits[0] == hits[1]


def test_saving_again_replaces_only_another_index(encoder, tmp_path):
    with Index(["one two"], encoder) as first, Index(["three", "four"], encoder) as second:
        first.save(tmp_path)
        with pytest.raises(StoreError):
            second.save(tmp_path)
        second.save(tmp_path, overwrite=True)
    link = tmp_path.with_name("link")
    link.symlink_to(tmp_path)
    with Index.open(link, encoder=encoder) as stored:
        assert len(stored) == 2
        with pytest.raises(StoreError, match="is this index"):
            stored.save(tmp_path, overwrite=True)
        assert len(stored) == 2


def test_a_column_of_texts_is_a_list_of_texts(encoder):
    with Index(pandas.Series(TEXTS), encoder) as index:
        hits = index.search(TEXTS[3], limit=len(TEXTS), mode="dense")
        assert sorted(hit.payload["text"] for hit in hits) == sorted(TEXTS)


def test_a_record_with_the_id_of_another_replaces_it(encoder):
    with Index([{"id": "a", "text": "one two"}], encoder) as index:
        index.add([{"id": "a", "text": "seven six"}])
        assert [hit.payload["text"] for hit in index.search("one")] == ["seven six"]
        assert repr(index) == "Index(1 texts: dense, multivector, sparse by encoder)"


def test_an_index_without_records_has_no_hits(encoder):
    with Index(encoder=encoder) as index:
        assert len(index) == 0
        assert index.search("one") == []


@pytest.mark.parametrize(
    ("records", "kind", "message"),
    [
        ("one two", InvalidInput, "`records` is str: should be a list of texts or of mappings"),
        (7, InvalidInput, "`records` is int"),
        (["one", 7], InvalidInput, r"`records\[1\]` is int: should be a text or a mapping"),
        (["one", {"words": "two"}], InvalidInput, r"`records\[1\]\.text` is None"),
        ([{"text": "one", "id": -1}], InvalidPoint, "point -1: `id`"),
        (["one", ""], EmptyInput, r"1"),
    ],
)
def test_a_wrong_record_is_named(encoder, records, kind, message):
    with Index(encoder=encoder) as index, pytest.raises(kind, match=message):
        index.add(records)
    with Index(encoder=encoder) as index, pytest.raises(InvalidInput):
        index.search("one", limit=-1)
