"""The vector store goes away while we serve: only what needs it fails, says what to do, and works
again once it is back."""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress

import httpx
import psutil
import pytest

from hybridtei.config import StoreConfig
from hybridtei.errors import StoreError
from hybridtei.limits import Deadlines
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.embedded_process import take
from hybridtei.retrieval.store.server import ServerStore
from hybridtei.server.app import close_within
from tests.retrieval.search.small_search import MODEL, TEXTS, spec_in
from tests.retrieval.store.speaking import Failure, Qdrant, serving_grpc, serving_rest
from tests.retrieval.store.stores import plan
from tests.server.live import HANG, commanded, serving, until

POINTS = [
    {"id": place, "text": text}
    for place, text in enumerate(["baka bulo", "bomo", "bake balo baka"])
]
SEARCH = {"collection": "papers", "query": "baka"}
Serve = Callable[[Qdrant, int], AbstractContextManager[int]]


@contextmanager
def served(model, *flags):
    """A client of the real command."""
    with (
        commanded("--model-id", str(model), *flags) as url,
        httpx.Client(base_url=url, timeout=HANG, trust_env=False) as client,
    ):
        yield client


def upsert(client):
    return client.post("/collections/papers/points", json={"points": POINTS, "create": True})


def all_but_the_store_is_well(client):
    assert client.post("/embed", json={"inputs": "baka"}).status_code == 200
    assert client.get("/health").status_code == 200
    # What is wrong is told as ever
    assert client.post("/search", json={**SEARCH, "limit": 0}).status_code == 422


def refused(response, statuses, *words):
    assert response.status_code in statuses, response.text
    told = response.json()
    assert told["error_type"] == "Store"
    assert any(word in told["error"] for word in words), told


def found(client):
    response = client.post("/search", json=SEARCH)
    assert response.status_code == 200, response.text
    return {hit["id"] for hit in response.json()["hits"]}


def owner_of(folder):
    """The process that has the folder."""
    (owner,) = [
        one
        for one in psutil.process_iter(["cmdline"])
        if str(folder) in (one.info["cmdline"] or [])[-1:]
    ]
    return owner


def taken(path):
    """The folder's lock, once its killed owner has let go of it."""
    found = []

    def free():
        with suppress(StoreError):
            found.append(take(path))
        return bool(found)

    until(free)
    return found[0]


def test_a_killed_owner_of_the_folder_is_started_again(hybrid, tmp_path):
    with served(hybrid, "--qdrant-path", str(tmp_path / "store")) as client:
        assert upsert(client).json()["upserted"] == 3
        before = found(client)
        for _ in range(2):
            owner_of(tmp_path / "store").kill()
            # Somebody else has it now
            folder = taken(tmp_path / "store")
            # the first may come before the death was noticed
            told = ("another process has this folder", "the next call starts it again")
            refused(client.post("/search", json=SEARCH), {502, 503}, *told)
            refused(upsert(client), {502, 503}, *told)
            all_but_the_store_is_well(client)
            folder.close()
            assert found(client) == before
            assert upsert(client).json()["upserted"] == 3


@pytest.mark.parametrize("serve", [serving_grpc, serving_rest])
def test_metrics_tell_what_failed(serve, tmp_path):
    state = Qdrant()
    with serve(state, 0) as port:
        scheme = "grpc" if serve is serving_grpc else "http"
        store = ServerStore(StoreConfig(qdrant_url=f"{scheme}://127.0.0.1:{port}"), patient=False)
        with serving(
            spec_in(tmp_path), schemas=CollectionSchemas(store), model_id=MODEL
        ) as running:
            assert (
                'hybridtei_store_errors_total{kind="away"} 0'
                in running.get("/metrics").text.splitlines()
            )
            state.failures += [Failure(503, "away")] * 1_000
            assert running.post("/search", SEARCH).status_code == 503
            assert (
                'hybridtei_store_errors_total{kind="away"} 1'
                in running.get("/metrics").text.splitlines()
            )
    state.local.close()


def test_who_waits_for_a_killed_owner_is_told_at_once_and_who_asks_next_is_answered(
    tmp_path,
):
    store = EmbeddedStore(str(tmp_path / "store"))
    spec = spec_in(tmp_path)
    with (
        serving(spec, schemas=CollectionSchemas(store), model_id=MODEL) as running,
        ThreadPoolExecutor(8) as pool,
    ):
        points = [{"id": place, "text": text} for place, text in enumerate(TEXTS)]
        assert (
            running.post("/collections/papers/points", {"points": points, "create": True}).json()[
                "upserted"
            ]
            == 10
        )
        # One question of the store each
        asked = {
            "collection": "papers",
            "query": TEXTS[0],
            "mode": "dense",
        }
        before = running.post("/search", asked).json()["hits"]
        owner = store.pid
        assert owner is not None
        os.kill(owner, signal.SIGSTOP)
        waiting = [pool.submit(running.post, "/search", asked) for _ in range(4)]
        waiting += [
            pool.submit(running.post, "/collections/papers/points", {"points": points})
            for _ in range(4)
        ]
        until(lambda: len(store._waiting) == 8)
        assert running.post("/embed", {"inputs": "one"}).status_code == 200
        os.kill(owner, signal.SIGKILL)
        for one in waiting:
            refused(one.result(), {503}, "the next call starts it again")
        assert running.post("/search", asked).json()["hits"] == before
        running.is_well()


def test_a_server_that_goes_away_is_searched_again_when_it_is_back(hybrid):
    state, serve = Qdrant(), serving_rest
    with serve(state, 0) as port:
        # A free port, where nobody listens at first
        pass
    with served(hybrid, "--qdrant-url", f"http://127.0.0.1:{port}") as client:
        down = "it does not answer: check that it runs and that the address is right"
        refused(upsert(client), {503}, down)
        refused(client.post("/search", json=SEARCH), {503}, down)
        all_but_the_store_is_well(client)
        with serve(state, port):
            # A channel looks for it again within two seconds
            until(lambda: upsert(client).status_code == 200)
            before = found(client)
            # It hangs
            state.held.clear()
            refused(client.post("/search", json=SEARCH), {503}, "has not answered for 1.8 s")
            refused(upsert(client), {503}, "has not answered for 1.8 s")
            all_but_the_store_is_well(client)
            state.held.set()
            until(lambda: client.post("/search", json=SEARCH).status_code == 200)
        for _ in range(2):
            refused(client.post("/search", json=SEARCH), {503}, down)
            refused(upsert(client), {503}, down)
            all_but_the_store_is_well(client)
            with serve(state, port):
                until(lambda: client.post("/search", json=SEARCH).status_code == 200)
                assert found(client) == before
                assert upsert(client).json()["upserted"] == 3
    state.local.close()


@contextmanager
def hanging(tmp_path, **engine):
    """A server whose collection is there, and the owner of its embedded engine, which is
    stopped."""
    store = EmbeddedStore(str(tmp_path / "store"))
    with serving(
        spec_in(tmp_path), schemas=CollectionSchemas(store), model_id=MODEL, engine=engine
    ) as running:
        points = [{"id": place, "text": text} for place, text in enumerate(TEXTS)]
        assert (
            running.post("/collections/papers/points", {"points": points, "create": True}).json()[
                "upserted"
            ]
            == 10
        )
        assert (
            running.post("/search", {"collection": "papers", "query": TEXTS[0]}).status_code == 200
        )
        owner = store.pid
        assert owner is not None
        os.kill(owner, signal.SIGSTOP)
        try:
            yield running, store
        finally:
            os.kill(owner, signal.SIGCONT)


async def test_a_server_ends_although_its_store_has_stopped(tmp_path, caplog):
    store = EmbeddedStore(str(tmp_path))
    await store.create("papers", plan())
    owner = store.pid
    os.kill(owner, signal.SIGSTOP)
    try:
        await close_within(store, 0.2)
    finally:
        os.kill(owner, signal.SIGCONT)
    assert "has not answered for 0.2 s" in caplog.text
    await store.close()


@pytest.mark.parametrize("path", ["/search", "/collections/papers/points"])
def test_the_time_of_a_request_holds_for_the_stores_part_too(tmp_path, path):
    body = (
        {"collection": "papers", "query": "one"}
        if path == "/search"
        else {"points": [{"id": 1, "text": "one"}]}
    )
    with hanging(tmp_path) as (running, _):
        # Starting the engine may take longer
        running.service.deadlines = Deadlines(0.5)
        response = running.post(path, body)
        assert (response.status_code, response.json()["error_type"]) == (503, "Overloaded")
        assert "no answer within 0.5 seconds (request-timeout)" in response.json()["error"]
        running.is_well()


def test_a_store_that_hangs_holds_no_more_searches_than_there_are_permits_and_none_of_the_models(
    tmp_path,
):
    # One question of the store each
    asked = {
        "collection": "papers",
        "query": "one",
        "mode": "dense",
    }
    with (
        hanging(tmp_path, max_concurrent_requests=2) as (running, owner),
        ThreadPoolExecutor(2) as pool,
    ):
        waiting = [pool.submit(running.post, "/search", asked) for _ in range(2)]
        until(lambda: len(owner._waiting) == 2)
        for path, body in (("/search", asked), ("/collections/papers/points", {"points": POINTS})):
            assert running.post(path, body).status_code == 429
        assert running.post("/embed", {"inputs": ["one", "two"]}).status_code == 200
        assert owner.pid is not None
        os.kill(owner.pid, signal.SIGCONT)
        assert [one.result().status_code for one in waiting] == [200, 200]
        running.is_well()
