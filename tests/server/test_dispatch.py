"""What holds for every path: CORS, OPTIONS, HEAD, 404, 405."""

import pytest

from tests.server.conftest import labelled
from tests.server.live import POSTS, serving

VARY = "origin, access-control-request-method, access-control-request-headers"


@pytest.fixture(scope="module")
def tei():
    with serving(server={"only_tei_routes": True}) as running:
        yield running


def refusal(response, method):
    """The message of a 404 or 405 of the default face, which HEAD has no room for."""
    assert response.headers["content-type"] == "application/json"
    if method == "HEAD":
        assert response.content == b""
        return ""
    content = response.json()
    message = content.get("message") or content["error"]
    if "message" in content:
        assert content["error"]["message"] == message
    return message


@pytest.mark.parametrize("path", POSTS)
def test_a_post_route_allows_post(server, tei, path):
    for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH"):
        response = server.client.request(method, path)
        assert response.status_code == 405
        assert response.headers["allow"] == "POST"
        assert refusal(response, method) in ("", f"{method} is not a method of this path")
        if path in ("/embed_hybrid", "/embed_multivector"):
            continue
        of_tei = tei.client.request(method, path)
        assert (of_tei.status_code, of_tei.content) == (405, b"")
        assert of_tei.headers["allow"] == "POST"
        assert "content-type" not in of_tei.headers


@pytest.mark.parametrize(
    "path",
    ["/nope", "/embed/", "/health/", "/v1/embeddings/", "/v1", "/v1/nope", "/EMBED", "/embed/x"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
def test_unknown_paths_and_trailing_slashes(server, tei, method, path):
    response = server.client.request(method, path)
    assert response.status_code == 404
    meant = path.rstrip("/").lower()
    advice = "/docs lists the paths" if meant == path else f"{meant} exists"
    assert refusal(response, method) == f"there is no path {path}; {advice}"
    assert response.headers["vary"] == VARY
    of_tei = tei.client.request(method, path)
    assert (of_tei.status_code, of_tei.content) == (404, b"")
    assert "content-type" not in of_tei.headers
    assert of_tei.headers["vary"] == VARY


@pytest.mark.parametrize(
    ("listed", "named"),
    [
        (("http://a", "*"), {"http://b": "*"}),
        (
            ("http://a",),
            {"http://a": "http://a", "http://a/": None, "http://A": None, "null": None},
        ),
    ],
)
def test_origins_are_compared_letter_by_letter_and_a_star_is_any(listed, named):
    with serving(server={"cors_allow_origin": listed}) as running:
        for path in ("/health", "/nope"):
            told = {
                origin: running.get(path, headers={"origin": origin}).headers for origin in named
            }
            assert {
                origin: headers.get("access-control-allow-origin")
                for origin, headers in told.items()
            } == named
            assert {headers["vary"] for headers in told.values()} == {VARY}


@pytest.mark.parametrize("path", ["/rerank", "/"])
def test_documents_to_rank_are_no_field_of_teis(path):
    body = {"query": "one", "documents": ["two"]}
    with serving(labelled("LABEL_0")) as running:
        assert running.post("/rerank", body).status_code == 200
    with serving(labelled("LABEL_0"), server={"only_tei_routes": True}) as running:
        refused = running.post(path, body)
        assert (refused.status_code, "texts" in refused.text) == (422, True)
        assert (
            running.post(path, {"query": "one", "texts": ["two"], "documents": ["x"]}).json()[0][
                "index"
            ]
            == 0
        )
        document = running.get("/api-doc/openapi.json").json()
        assert "DocumentsRequest" not in document["components"]["schemas"]
