"""Health, facts, metrics, documentation."""

import re

import pytest

from hybridtei import __version__
from tests.inference.engine import small
from tests.server.live import serving


def test_health_says_so_and_recovers():
    broken = [True]

    def gate(_):
        if broken:
            raise RuntimeError("no device")

    with serving(gate=gate) as running:
        assert running.get("/health").status_code == 200
        failed = running.post("/embed", {"inputs": "one"})
        assert failed.status_code == 424
        assert failed.json() == {
            "error": "Backend error: RuntimeError: no device",
            "error_type": "Backend",
        }
        for path in ("/", "/health", "/ping"):
            sick = running.get(path)
            assert sick.status_code == 503
            assert sick.json() == {"error": "unhealthy", "error_type": "Unhealthy"}
        broken.clear()
        assert running.get("/health").status_code == 200
        running.is_well()


def test_info_has_facts_of_ours_beside_teis(server):
    facts = server.get("/info", params={"ignored": "query"}).json()
    assert (facts["version"], facts["model_id"], facts["model_sha"]) == (__version__, "small", None)
    assert facts["hybridtei"]["outputs"] == ["dense", "multivector", "sparse", "tokens"]
    assert facts["hybridtei"]["adapters"] == []
    assert facts["hybridtei"]["dimensions"] == {
        "dense": small.HIDDEN,
        "sparse": len(small.PIECES),
        "multivector": small.DIM,
    }


def test_docs_are_a_swagger_ui_that_reads_openapi_3_1_and_asks_no_other_host(server):
    redirect = server.get("/docs", follow_redirects=False)
    assert (redirect.status_code, redirect.headers["location"]) == (303, "/docs/")
    page = server.get("/docs", follow_redirects=True)
    assert page.headers["content-type"].startswith("text/html")
    assert server.get("/docs/index.html").text == page.text
    names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {"../api-doc/openapi.json", "swagger-ui.css", "swagger-ui-bundle.js"} < set(names)
    for name in names:
        assert server.get(f"/docs/{name}").status_code == 200, name
    assert "default-src 'self'" in page.headers["content-security-policy"]
    # From 5 on it reads OpenAPI 3.1
    assert 'PACKAGE_VERSION:"5.' in server.get("/docs/swagger-ui-bundle.js").text


@pytest.mark.parametrize(
    "name", ["nope", "../info", "%2e%2e/pyproject.toml", "swagger-ui.css/x", "LICENSE", "%00"]
)
def test_docs_serve_nothing_else(server, name):
    response = server.client.send(server.client.build_request("GET", f"/docs/{name}"))
    assert response.status_code == 404 or response.url.path == "/info"


def test_every_documented_route_is_there(server):
    for path, operations in server.get("/api-doc/openapi.json").json()["paths"].items():
        for method in operations:
            response = server.client.request(method.upper(), path)
            # a route that wants a vector store says so in a body; what is not there has none
            assert response.status_code not in (404, 405) or response.content, path


def test_models_are_listed_for_openais_clients_and_for_infinitys(server, reranker):
    answer = server.get("/v1/models").json()
    assert answer["object"] == "list"
    item, *sides = answer["data"]
    assert [side["id"] for side in sides] == ["small:query", "small:document"]
    assert (item["id"], item["object"], item["owned_by"]) == ("small", "model", "infinity")
    assert isinstance(item["created"], int)
    assert server.get("/models").json() == answer
    assert item["stats"] == {}
    assert item["capabilities"] == ["embed", "rerank"]
    assert reranker.get("/models").json()["data"][0]["capabilities"] == ["rerank", "classify"]
