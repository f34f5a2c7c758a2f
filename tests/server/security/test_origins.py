"""Pages of other origins, or of a name that leads here, do not read or write the vector store,
unless a key or the settings say that they may."""

from contextlib import contextmanager

import pytest

from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from tests.retrieval.search.small_search import MODEL, spec_in
from tests.server.live import JSON, serving

BODY = {"points": [{"id": 1, "text": "one two"}], "create": True}
OTHERS = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:1"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"origin": "https://evil.example", "sec-fetch-site": "same-origin"},
]
OWN = [{}, {"origin": "http://{host}", "sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return spec_in(tmp_path_factory.mktemp("model"))


@contextmanager
def stored(spec, **server):
    with serving(
        spec, server=server, schemas=CollectionSchemas(MemoryStore()), model_id=MODEL
    ) as running:
        yield running


def write(running, headers, path="/collections/papers/points"):
    host = f"127.0.0.1:{running.port}"
    return running.post(
        path,
        BODY,
        headers={**JSON, **{name: value.format(host=host) for name, value in headers.items()}},
    )


def test_without_a_key_only_its_own_pages_and_clients_write(spec):
    with stored(spec) as running:
        for headers in OTHERS:
            for path in ("/collections/papers/points", f"/m/{MODEL}/collections/papers/points"):
                refused = write(running, headers, path)
                assert (refused.status_code, refused.json()["error_type"]) == (403, "Forbidden")
                assert "--cors-allow-origin" in refused.json()["error"]
                # Its own page may read why
                assert refused.headers["access-control-allow-origin"] == "*"
        assert running.post("/search", {"collection": "papers", "query": "one"}).status_code == 404
        for headers in OWN:
            assert write(running, headers).status_code == 200
        for headers in OTHERS:
            assert search(running, headers).status_code == 403
            assert embed(running, headers).status_code == 200


def embed(running, headers):
    return running.post("/embed", {"inputs": "one"}, headers={**JSON, **headers})


def search(running, headers):
    query = {"collection": "papers", "query": "one"}
    return running.post("/search", query, headers={**JSON, **headers})


@pytest.mark.parametrize("name", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example"])
def test_a_page_whose_name_was_rebound_reads_and_writes_nothing(spec, name):
    with stored(spec) as running:
        host = name.format(port=running.port)
        headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
        for refused in (
            write(running, headers),
            search(running, headers),
            running.client.get("/collections", headers={"host": host}),
        ):
            assert refused.status_code == 403
            assert "--allowed-host" in refused.json()["error"]
        assert embed(running, headers).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:80",
        "127.0.0.1:8080",
        "[::1]:80",
        "[::1]",
        "192.0.2.7",
        "hybridtei:80",
        "search.default.svc",
        "vectors.example.org",
    ],
)
def test_addresses_local_names_and_allowed_ones_pass(spec, host):
    with stored(spec, allowed_host=("vectors.example.org",)) as running:
        assert write(running, {"host": host}).status_code == 200


@pytest.mark.parametrize("allowed", ["https://evil.example", "*"])
def test_an_origin_that_is_named_writes(spec, allowed):
    with stored(spec, cors_allow_origin=(allowed,)) as running:
        assert write(running, OTHERS[0]).status_code == 200
        assert write(running, {"origin": "null"}).status_code == (200 if allowed == "*" else 403)


COMPUTING = ["/embed", "/v1/embeddings", "/v1/rerank", "/score", "/predict", "/tokenize"]


@pytest.mark.parametrize("path", COMPUTING)
def test_pages_of_origins_that_are_not_named_compute_nothing(spec, path):
    """Of no content type: a browser sends text/plain without asking first."""
    with stored(spec, cors_allow_origin=("https://friend.example",)) as running:
        for content_type in ("application/json", "text/plain"):
            for headers in OTHERS:
                head = {"content-type": content_type, **headers}
                refused = running.post(path, {"inputs": "one"}, headers=head)
                assert (refused.status_code, "--cors-allow-origin" in refused.text) == (403, True)
        for headers in ({}, {"origin": "https://friend.example"}, {"origin": "http://{host}"}):
            host = f"127.0.0.1:{running.port}"
            head = {name: value.format(host=host) for name, value in headers.items()}
            assert embed(running, head).status_code == 200


@pytest.mark.parametrize(
    "origin", ["app://obsidian.md", "chrome-extension://abc", "tauri://localhost", "null"]
)
def test_without_the_flag_every_origin_computes(spec, origin):
    with stored(spec) as running:
        assert embed(running, {"origin": origin}).status_code == 200


def test_a_key_is_enough(spec):
    with stored(spec, api_key="secret") as running:
        assert write(running, {**OTHERS[0], "authorization": "Bearer secret"}).status_code == 200
        assert write(running, OTHERS[0]).status_code == 401
