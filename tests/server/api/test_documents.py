"""Documents over HTTP, by `Client`, `Index`, the command and MCP's tool."""

import pytest

from hybridtei import Client, Index
from hybridtei.errors import InvalidInput, UnknownDocument
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from tests.retrieval.search.small_search import MODEL, encoder_of, spec_in
from tests.server.live import serving

POINTS = [
    {"id": 1, "text": "one two", "metadata": {"lang": "en"}},
    {"id": "mine", "text": "three four", "metadata": {"lang": "de"}},
    {"id": "a/b.md", "text": "search engine", "metadata": {"lang": "de"}},
    {"text": "hybrid search"},
]
GERMAN = {"must": [{"key": "metadata.lang", "match": {"value": "de"}}]}


@pytest.fixture
def notes(tmp_path):
    store = MemoryStore()
    spec = spec_in(tmp_path)
    with serving(spec, schemas=CollectionSchemas(store), model_id=MODEL) as running:
        body = {"points": POINTS, "create": True}
        assert running.post("/collections/notes/points", body).json()["upserted"] == len(POINTS)
        yield running


def asked(running, method, path, **more):
    return running.client.request(method, f"/collections/notes/points/{path}", **more)


def texts(running):
    body = {"collection": "notes", "query": "search", "limit": 10}
    return {hit["payload"]["text"] for hit in running.post("/search", body).json()["hits"]}


def test_the_first_three_lines_of_a_user(notes):
    found = asked(notes, "GET", "mine")
    assert [point["payload"]["text"] for point in found.json()["points"]] == ["three four"]
    assert asked(notes, "DELETE", "mine").json() == {"points": 1}
    assert asked(notes, "GET", "mine").status_code == 404
    assert asked(notes, "DELETE", "1").json() == {"points": 1}
    assert asked(notes, "DELETE", "a/b.md").json() == {"points": 1}
    assert texts(notes) == {"hybrid search"}


def test_1_in_quotes_is_the_text(notes):
    with Client(notes.url) as client:
        client.upsert("notes", [{"id": "1", "text": "a text's id"}])
        assert [client.get("notes", one)[0].payload["text"] for one in (1, "1")] == [
            "one two",
            "a text's id",
        ]
        with pytest.raises(InvalidInput, match="collection 'a/b'"):
            client.upsert("a/b", ["a text"])


def test_many_by_ids_or_by_a_filter(notes):
    changed = asked(
        notes,
        "POST",
        "payload",
        json={"filter": GERMAN, "set": {"checked": True, "metadata": None}},
    )
    assert changed.json() == {"points": 2}
    (point,) = asked(notes, "GET", "mine").json()["points"]
    assert (point["payload"]["checked"], "metadata" in point["payload"]) == (True, False)
    assert asked(notes, "POST", "delete", json={"ids": [1, "nobody"]}).json() == {"points": 1}
    where = {"must": [{"key": "checked", "match": {"value": True}}]}
    assert asked(notes, "POST", "delete", json={"filter": where}).json() == {"points": 2}
    assert texts(notes) == {"hybrid search"}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "`ids` or `filter`"),
        ({"ids": None, "filter": None}, "`ids` or `filter`"),
        ({"filter": {}}, "`filter` is empty"),
        ({"filter": {"must": []}}, "`filter` is empty"),
        ({"filter": "x"}, "`filter`"),
        ({"ids": []}, "length >= 1"),
        ({"ids": [1], "filter": GERMAN}, "not both"),
        ({"id": 1}, "unknown field `id`"),
    ],
)
def test_what_would_delete_too_much_is_refused(notes, body, word):
    answer = asked(notes, "POST", "delete", json=body)
    assert (answer.status_code, word in answer.text) == (422, True), answer.text
    assert len(texts(notes)) == len(POINTS)


def test_deletion_needs_the_role_write(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("reader roles=search:read-key\nwriter roles=search,write:write-key\n")
    schemas = CollectionSchemas(MemoryStore())
    flags = {"api_key_file": str(keys)}
    with serving(spec_in(tmp_path), schemas=schemas, model_id=MODEL, server=flags) as running:
        for key, expected in (("read-key", 403), ("write-key", 404)):
            headers = {"authorization": f"Bearer {key}"}
            answers = [
                asked(running, "DELETE", "1", headers=headers),
                asked(running, "POST", "delete", json={"ids": [1]}, headers=headers),
                asked(running, "POST", "payload", json={"ids": [1], "set": {}}, headers=headers),
            ]
            assert [answer.status_code for answer in answers] == [expected] * 3


def test_by_client(notes):
    with Client(notes.url) as client:
        (point,) = client.get("notes", "mine")
        assert point.payload["text"] == "three four"
        values = {"year": 2024, "metadata": None}
        assert client.set_payload("notes", values, ["mine", 1]) == 2
        assert client.get("notes", 1)[0].payload["year"] == 2024
        assert client.delete("notes", ["mine", "nobody"]) == 1
        assert client.delete("notes", filter=GERMAN) == 1
        with pytest.raises(UnknownDocument):
            client.get("notes", "mine")
        with pytest.raises(InvalidInput, match="`filter` is empty"):
            client.delete("notes", filter={})


def test_by_index(tmp_path):
    records = [{"text": "one two", "id": "a", "n": 1}, {"text": "three four", "n": 2}, "five"]
    with Index(records, encoder_of(spec_in(tmp_path))) as index:
        assert index.get("a")[0].payload["text"] == "one two"
        assert index.delete(["a", 99]) == 1
        assert index.delete(filter={"must": [{"key": "n", "range": {"gte": 2}}]}) == 1
        assert len(index) == 1
        index.save(tmp_path / "store")
        assert [hit.payload["text"] for hit in index.search("five")] == ["five"]


def test_the_fields_that_searches_name_are_not_all_kept(monkeypatch, tmp_path):
    monkeypatch.setattr("hybridtei.retrieval.store.collection.MAX_FITS", 3)
    schemas = CollectionSchemas(MemoryStore())
    with serving(spec_in(tmp_path), schemas=schemas, model_id=MODEL) as running:
        running.post("/collections/notes/points", {"points": POINTS, "create": True})
        for place in range(8):
            body = {"collection": "notes", "query": "search", "text_field": f"text{place}"}
            assert len(running.post("/search", body).json()["hits"]) == len(POINTS)
        assert len(schemas._fits) <= 3
        assert running.post("/search", {**body, "collection": "none"}).status_code == 404
        assert schemas._fits
