"""Filling a vector store over HTTP: what is stored, and which points are refused by name while
others are stored."""

import importlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hybridtei.client import Client
from hybridtei.errors import InvalidInput
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.retrieval.store.plan import FINGERPRINT, schema_for
from hybridtei.retrieval.store.points import point_id
from tests.retrieval.search.small_search import MODEL, encoder_of, filled, run, spec_in
from tests.server.api.conftest import POINTS
from tests.server.live import serving


def test_first_uploads_at_once_fill_one_collection(shelf):
    body = {"create": True, "points": [{"text": "one two"}]}
    with ThreadPoolExecutor(8) as pool:
        posted = [pool.submit(shelf.post, "/collections/at-once/points", body) for _ in range(8)]
    answers = [one.result() for one in posted]
    assert [answer.status_code for answer in answers] == [200] * 8, [
        answer.text for answer in answers
    ]
    assert [answer.json()["created"] for answer in answers].count(True) == 1


def test_a_bad_point_is_named_and_harms_no_other(shelf):
    points = [
        {"id": "doc-1", "text": "one two"},
        {"id": 7.5, "text": "one"},
        {"text": "  "},
        {"id": -1, "text": "two"},
        {"text": "three four", "payload": {"kind": "note"}},
        {"id": 50, "text": "five", "payload": {"big": 2**70}},
        "nothing",
        {"id": 51, "text": "six " * 100},
    ]
    body = {"points": points, "create": True, "truncate": False}
    answer = shelf.post("/collections/notes/points", body).json()
    assert (answer["created"], answer["upserted"]) == (True, 2)
    assert [failure["index"] for failure in answer["failed"]] == [1, 2, 3, 5, 6, 7]
    assert [failure["id"] for failure in answer["failed"]] == [None, None, -1, 50, None, 51]
    for failure, word in zip(
        answer["failed"],
        ["id", "`text` is empty", "`id` should be", "big", "object", "tokens"],
        strict=True,
    ):
        assert word in failure["error"]
    hits = shelf.post("/search", {"collection": "notes", "query": "one", "mode": "dense"}).json()[
        "hits"
    ]
    by_text = {hit["payload"]["text"]: hit for hit in hits}
    assert by_text["one two"]["payload"]["document_id"] == "doc-1"
    assert by_text["three four"]["payload"]["kind"] == "note"
    again = shelf.post("/collections/notes/points", body).json()
    assert (again["created"], again["ids"]) == (False, answer["ids"])
    assert (
        len(
            shelf.post("/search", {"collection": "notes", "query": "one", "mode": "dense"}).json()[
                "hits"
            ]
        )
        == 2
    )


def test_more_points_than_a_request_may_have_inputs_go_in_parts(shelf):
    points = [{"id": i, "text": f"one {i}"} for i in range(100)]
    answer = shelf.post("/collections/many/points", {"points": points, "create": True}).json()
    assert answer["upserted"] == 100
    assert shelf.post("/collections/many/points", {"points": points[:1] * 1001}).status_code == 422
    shelf.is_well()


def test_points_need_a_collection(shelf):
    missing = shelf.post("/collections/nowhere/points", {"points": POINTS})
    assert missing.status_code == 404
    assert "`create`: true" in missing.json()["error"]
    assert (
        shelf.post("/collections/a:b/points", {"points": POINTS, "create": True}).status_code == 422
    )
    assert shelf.get("/collections/papers/points").status_code == 405
    names = shelf.get("/collections").json()["collections"]
    assert "papers" in names
    assert names == sorted(names)


def test_a_collection_made_by_other_files_of_the_model_is_refused(tmp_path):
    spec, store = spec_in(tmp_path), MemoryStore()
    schema = schema_for(spec, MODEL)
    run(store.create("old", replace(schema, metadata={**schema.metadata, FINGERPRINT: "old"})))
    with serving(spec, schemas=CollectionSchemas(store), model_id=MODEL) as running:
        assert (
            running.post(
                "/collections/papers/points", {"points": POINTS, "create": True}
            ).status_code
            == 200
        )
        assert running.post("/search", {"collection": "papers", "query": "one"}).status_code == 200
        assert run(store.describe("papers")).metadata[FINGERPRINT] == schema.metadata[FINGERPRINT]
        for path, body in (
            ("/search", {"collection": "old", "query": "one"}),
            ("/collections/old/points", {"points": POINTS}),
        ):
            response = running.post(path, body)
            assert response.status_code == 409
            assert "hybridtei migrate old" in response.json()["error"]


def test_a_payload_with_the_key_of_packed_multivectors_is_refused(spec):
    store = run(filled(encoder_of(spec), multivector_dtype="int8"))
    points = [
        {"id": place, "text": "one", "payload": {key: "mine"}}
        for place, key in enumerate(("key", "multivector_base64"))
    ]
    with serving(spec, server={}, schemas=CollectionSchemas(store), model_id=MODEL) as running:
        answer = running.post("/collections/papers/points", {"points": points}).json()
    assert answer["ids"] == [0]
    assert "`payload.multivector_base64`" in answer["failed"][0]["error"]


def test_an_id_that_equals_the_text_of_another_point_replaces_nothing(shelf):
    path, text = "/collections/names/points", "one two"
    assert shelf.post(path, {"points": [{"text": text}], "create": True}).json()["upserted"] == 1
    assert (
        shelf.post(path, {"points": [{"id": text, "text": "three four"}]}).json()["upserted"] == 1
    )
    hits = shelf.post("/search", {"collection": "names", "query": text, "mode": "dense"}).json()[
        "hits"
    ]
    assert {hit["payload"]["text"] for hit in hits} == {text, "three four"}


@pytest.mark.parametrize(
    "work",
    ["hybridtei.retrieval.store.embedded.unframe", "hybridtei.retrieval.store.points.check_points"],
)
def test_long_payloads_are_decoded_and_checked_beside_the_event_loop(
    spec, tmp_path, work, monkeypatch
):
    module, _, name = work.rpartition(".")
    plain = getattr(importlib.import_module(module), name)
    threads = []

    def noting(given, *others):
        size = len(given) if isinstance(given, bytes | memoryview) else len(str(given[0].payload))
        threads.append((size > 1_000_000, threading.current_thread().name))
        return plain(given, *others)

    store = EmbeddedStore(str(tmp_path / "store"))
    with serving(spec, schemas=CollectionSchemas(store), model_id=MODEL) as running:
        monkeypatch.setattr(work, noting)
        points = [{"text": "one two", "payload": {"long": "x" * 1_500_000}}]
        assert (
            running.post(
                "/collections/papers/points", {"points": points, "create": True}
            ).status_code
            == 200
        )
        assert (
            len(running.post("/search", {"collection": "papers", "query": "one"}).content)
            > 1_500_000
        )
    long = [thread for is_long, thread in threads if is_long]
    assert long, "nothing long was seen"
    assert not any(thread.endswith("(run)") for thread in long), "the thread of the event loop"


def test_a_text_with_two_payloads_is_two_points_and_the_same_request_one(shelf):
    answer = "Yes, within two weeks."
    points = [{"text": answer, "payload": {"product": name}} for name in ("boots", "oilskins")]
    points += [{"text": answer, "metadata": {"product": "boots"}}, {"text": answer}]
    ids = []
    for _ in range(2):
        body = {"points": points, "create": True}
        ids.append(shelf.post("/collections/answers/points", body).json()["ids"])
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 4
    # As 0.3 made it
    assert ids[0][3] == point_id(answer, -1)
    found = shelf.post("/search", {"collection": "answers", "query": "two weeks"}).json()["hits"]
    assert {hit["id"] for hit in found} == set(ids[0])


def test_two_points_of_one_call_with_one_id_are_errors_that_name_both(shelf):
    uuid = "6F1D2C64-0A55-5D0E-9A4E-3C1F5B7E2D90"
    ids = [7, "a", 7, "7", "a", uuid, uuid.lower(), 8]
    points = [{"text": f"one {place}", "id": each} for place, each in enumerate(ids)]
    path = "/collections/twins/points"
    answer = shelf.post(path, {"points": points, "create": True}).json()
    assert answer["ids"] == [point_id("7", 0), 8]
    assert [failed["error"] for failed in answer["failed"][:2]] == [
        "points[0]: `id` 7 is also that of points[2]: give each its own",
        "points[1]: `id` 'a' is also that of points[4]: give each its own",
    ]
    assert [failed["index"] for failed in answer["failed"]] == [0, 1, 2, 4, 5, 6]
    both = r"`points\[0\]` and `points\[1200\]` have one id"
    points = [{"text": "one", "id": 5}, *["two"] * 1199, {"text": "three", "id": 5}]
    with Client(shelf.url) as client, pytest.raises(InvalidInput, match=both):
        client.upsert("twins", points)
