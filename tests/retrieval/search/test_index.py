"""`Index`: a list of texts is searched as a collection of Qdrant with the same texts."""

import random

import pandas
import polars
import pytest

from hybridtei import Encoder, Index, StoreError, UnknownCollection
from hybridtei.errors import EmptyInput, InvalidInput, InvalidPoint
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.plan import FINGERPRINT
from tests.retrieval.search.small_search import TEXTS, run

QUERIES = ("the search engine", "one two", "words and meaning", "five")
RECORDS = [{"text": text, "year": 2000 + place} for place, text in enumerate(TEXTS)]


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
    with pytest.raises(
        InvalidInput, match=r'`filter\.year`.*; a filter looks like {"must": \[{"key'
    ):
        index.search("two", filter={"year": 2004})


@pytest.mark.parametrize(
    "records",
    [
        pytest.param(lambda: (record for record in RECORDS), id="generator"),
        pytest.param(lambda: pandas.DataFrame(RECORDS), id="pandas"),
        pytest.param(lambda: polars.DataFrame(RECORDS), id="polars"),
        pytest.param(lambda: pandas.Series(TEXTS), id="column"),
    ],
)
def test_records_come_in_the_forms_of_their_libraries(index, encoder, records):
    with Index(records(), encoder) as other:
        expected, found = (side.search(QUERIES[0], limit=3) for side in (index, other))
    for hit in found:
        # A column has nothing but texts
        hit.payload.setdefault("year", 2000 + hit.id)
    assert found == expected


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


def test_a_record_with_the_id_of_another_replaces_it(encoder):
    with Index([{"id": "a", "text": "one two"}], encoder) as index:
        index.add([{"id": "a", "text": "seven six"}])
        assert [hit.payload["text"] for hit in index.search("one")] == ["seven six"]
        assert repr(index) == "Index(1 texts: dense, multivector, sparse by encoder)"


def texts_by_id(index):
    return {hit.id: hit.payload["text"] for hit in index.search("one", limit=5_000, mode="dense")}


def test_ids_that_are_made_are_above_all_others(encoder, tmp_path):
    """Also after `open`, beside ids of the caller's, and where a generator gives an id late."""
    with Index(
        ["one", {"id": 1, "text": "two"}, "three", {"id": 4, "text": "four"}], encoder
    ) as index:
        assert texts_by_id(index) == {1: "two", 4: "four", 5: "one", 6: "three"}
        index.add(["five"])
        index.save(tmp_path)
    for added in ("six", "seven"):
        with Index.open(tmp_path, encoder=encoder) as stored:
            stored.add([added, {"id": "1", "text": "one one"}])
    with Index.open(tmp_path, encoder=encoder) as stored:
        texts = texts_by_id(stored)
    assert len(texts) == 8
    assert " ".join(texts[number] for number in range(4, 10)) == "four one three five six seven"
    late = [*({"text": f"one {place}"} for place in range(1030)), {"id": 3, "text": "two"}]
    with Index((record for record in late), encoder) as index:
        assert len(index) == len(late)
        texts = texts_by_id(index)
    assert texts[3] == "two"
    assert sorted(texts.values()) == sorted(record["text"] for record in late)


def test_records_of_data_frames_are_stored_as_the_client_sends_them(encoder):
    frame = pandas.DataFrame(
        {
            "text": ["one", "two", "three"],
            "year": [2024, float("nan"), 2025],
            "day": pandas.to_datetime(["2024-05-01", None, "2024-05-02"]),
            "id": [None, 3.0, 0],
        }
    )
    with Index(frame, encoder) as index:
        hits = {hit.payload["text"]: hit for hit in index.search("one", mode="dense")}
    assert {text: (hit.id, hit.payload["year"]) for text, hit in hits.items()} == {
        "one": (4, 2024),
        "two": (3, None),
        "three": (0, 2025),
    }
    assert [hits[text].payload["day"] for text in ("one", "two")] == ["2024-05-01T00:00:00", None]


def test_records_of_one_document_are_hits_of_their_own(encoder):
    records = [{"text": text, "document_id": "book"} for text in TEXTS]
    with Index(records, encoder) as index:
        assert len(index.search("one", limit=5)) == 5
        assert len(index.search("one", group_by="document_id")) == 1


PLACES = [
    {"lat": 52.5, "lon": 13.4},
    {"lat": None, "lon": 13.4},
    {"lat": "52.5", "lon": "13.4"},
    {"lat": True, "lon": 13.4},
    {"lat": 95.0, "lon": 13.4},
    {"lat": 52.5},
    "52.5,13.4",
    None,
    [{"lat": "north", "lon": 13.4}, {"lat": 52.5, "lon": 13.4}],
]


def test_a_value_that_is_no_place_is_passed_over_as_qdrant_does(encoder, tmp_path):
    circle = {"center": {"lat": 52.5, "lon": 13.4}, "radius": 10_000}
    near = {"must": [{"key": "place", "geo_radius": circle}]}
    with Index([{"text": "one", "place": place} for place in PLACES], encoder) as index:
        index.save(tmp_path)
        hits = index.search("one", filter=near)
    with Index.open(tmp_path, encoder=encoder) as stored:
        assert [hit.id for hit in stored.search("one", filter=near)] == [hit.id for hit in hits]
    assert {hit.id for hit in hits} == {0, 8}


def test_an_index_without_records_has_no_hits(encoder):
    with Index(encoder=encoder) as index:
        assert len(index) == 0
        assert index.search("one") == []


@pytest.mark.parametrize(
    ("records", "kind", "message"),
    [
        ("one two", InvalidInput, "`records` is str: should be a list of texts or of mappings"),
        (["one", 7], InvalidInput, r"`records\[1\]` is int: should be a text or a mapping"),
        (["one", {"words": "two"}], InvalidInput, r"`records\[1\]\.text` is None"),
        ([{"text": "one", "id": -1}], InvalidInput, r"`records\[0\]\.id` is -1: should be a text"),
        (["one", {"text": "two", "id": True}], InvalidInput, r"`records\[1\]\.id` is True"),
        (
            ["one", {"text": "two", "of": {1}}],
            InvalidInput,
            r"`records\[1\]` should be what JSON has",
        ),
        (
            ["one", {"text": "two", "of": 2**63}],
            InvalidPoint,
            r"`records\[1\]`: point 1: .*integers",
        ),
        (["one"] * 1024 + [""], EmptyInput, r"`records\[1024\]`"),
        (
            [{"text": "one", "id": 7}, "two", {"text": "three", "id": 7.0}],
            InvalidInput,
            r"`records\[0\]` and `records\[2\]` have one id, 7",
        ),
    ],
)
def test_a_wrong_record_is_named(encoder, records, kind, message):
    with Index(encoder=encoder) as index, pytest.raises(kind, match=message):
        index.add(records)


WRONG = {
    "query` is None": lambda index: index.search(None),
    "query` is empty": lambda index: index.search(""),
    "id` is": lambda index: index.get([0]),
    "ids` is": lambda index: index.delete("abc"),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_value_of_another_type_is_an_error_that_names_the_field(index, field):
    with pytest.raises(InvalidInput, match=f"^`{field}"):
        WRONG[field](index)


def test_the_structs_own_field_of_the_filter_is_no_keyword(index):
    with pytest.raises(TypeError, match="write `filter`"):
        index.search("a", query_filter={"must": []})


def test_the_embedded_model_finds_identifiers():
    """README has both numbers."""
    draw = random.Random(0)
    things = [
        "pump",
        "valve",
        "filter",
        "bearing",
        "sensor",
        "gasket",
        "motor",
        "hose",
        "relay",
        "switch",
    ]
    ends = ("", "-A", "-B", "/2")
    names = [
        f"{draw.choice('ABCDEFGHKLMNP')}{draw.choice('XYZQRS')}-{number}{draw.choice(ends)}"
        for number in draw.sample(range(1000, 10_000), 100)
    ]
    texts = [
        f"Part {name} is a {draw.choice(things)} for the {draw.choice(things)} of line "
        f"{draw.randrange(9)}."
        for name in names
    ]
    with Encoder.load() as encoder, Index(texts, encoder) as index:

        def first(mode):
            hits = [index.search(name, limit=1, mode=mode)[0] for name in names]
            return sum(hit.payload["text"] == text for hit, text in zip(hits, texts, strict=True))

        assert first(None) == 100
        assert first("dense") == pytest.approx(90, abs=3)


def test_an_index_without_a_fingerprint_gets_one_when_it_grows(encoder, tmp_path):
    """Version 0.3 saved none."""
    with Index(["one two"], encoder) as index:
        index.save(tmp_path, "papers")

    async def fingerprint(**changes):
        store = EmbeddedStore(str(tmp_path))
        if changes:
            await store.annotate("papers", changes)
        schema = await store.describe("papers")
        await store.close()
        return schema.metadata.get(FINGERPRINT)

    saved = run(fingerprint())
    assert saved is not None
    assert run(fingerprint(**{FINGERPRINT: None})) is None
    with Index.open(tmp_path, "papers", encoder) as stored:
        stored.add(["three four"])
    assert run(fingerprint()) == saved
