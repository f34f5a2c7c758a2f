"""The page's files over HTTP, and that other clients get Ollama's answer at `/`, or TEI's."""

import re

import pytest

from hybridtei.server.api.pages import FILES
from tests.server.live import serving

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.mark.parametrize("path", ["/", "/page", "/m/small/", "/m/small/page"])
def test_a_browser_gets_the_page(server, path):
    response = server.get(path, headers=BROWSER)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text.startswith("<!doctype html>")
    assert "default-src 'self'" in response.headers["content-security-policy"]
    assert "accept" in response.headers["vary"]


@pytest.mark.parametrize(
    "accept", ["*/*", "application/json", "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2"]
)
def test_other_clients_get_ollamas_answer_or_teis(server, accept):
    given = server.get("/", headers={"accept": accept})
    assert (given.status_code, given.text) == (200, "Ollama is running")
    assert given.headers["content-type"] == "text/plain; charset=utf-8"
    with serving(server={"only_tei_routes": True}) as running:
        given, tei = (
            running.get("/", headers={"accept": accept}),
            running.get("/health", headers={"accept": accept}),
        )
        assert (given.status_code, given.content) == (200, b"")
        assert [name for name, _ in given.headers.multi_items()] == [
            name for name, _ in tei.headers.multi_items()
        ]
        assert given.headers["vary"] == tei.headers["vary"]


def test_head_and_post_are_no_page_for_browsers_either(server):
    head = server.client.head("/", headers=BROWSER)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len("Ollama is running"))
    assert server.post(
        "/", {"inputs": "one"}, headers={**BROWSER, "content-type": "application/json"}
    ).json()


def test_no_page_where_only_teis_routes_are():
    with serving(server={"only_tei_routes": True}) as running:
        assert running.get("/", headers=BROWSER).content == b""
        assert running.get("/page").status_code == 404
        assert running.get("/page/page.js").status_code == 404


def test_every_file_is_there_and_nothing_else(server):
    assert {"index.html", "page.js", "page.css", "icon.svg"} <= set(FILES)
    for name in FILES:
        if name != "index.html":
            response = server.get(f"/page/{name}")
            assert response.status_code == 200
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["content-type"].startswith(
                ("text/javascript", "text/css", "image/svg+xml", "text/html")
            )
    for name in ("nope.js", "..%2fapp.py", "index.html", "__init__.py"):
        assert server.get(f"/page/{name}").status_code == 404


def test_nothing_is_loaded_from_elsewhere_or_inserted_as_markup(server):
    texts = {name: server.get(f"/page/{name}").text for name in FILES if name != "index.html"} | {
        "/": server.get("/page").text
    }
    for name, text in texts.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage", text
        ), name
    assert not re.search(r"<script(?![^>]*src=)|<style| style=| on[a-z]+=", texts["/"])


def test_the_page_needs_no_key_and_what_it_asks_does():
    with serving(server={"api_key": "s3cret"}) as running:
        assert running.get("/", headers=BROWSER).text.startswith("<!doctype html>")
        assert running.get("/page/page.js").status_code == 200
        assert running.get("/v1/models").status_code == 401
