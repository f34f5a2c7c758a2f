"""The page in a real browser: what it shows is what the API answers, and it asks nobody else.

A Chromium of the system is driven by Playwright; where either is missing these tests are skipped. Pictures are left in the
folder of each test.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import httpx
import numpy as np
import pytest

from tests import tiny
from tests.inference.engine import small
from tests.server.live import HANG, Running, process, serving

playwright_api = pytest.importorskip("playwright.sync_api", reason="the package `playwright` is not installed")
expect = playwright_api.expect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser on the PATH: {', '.join(NAMES)}"),
]

QUERY = "hybrid search"
DOCUMENTS = [
    "the search engine finds text",
    "one two three",
    "a hybrid search, by words and meaning",
    "seven <b>zwölf</b> café",
]
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed with the module: while it is open, no other event loop can run in this thread."""
    with playwright_api.sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM) as browser:
        yield browser


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Open:
    """The page, opened. In the end it is photographed, and has complained of nothing but `refused` statuses."""

    @contextmanager
    def opened(
        url: str, *, refused: tuple[int, ...] = (), width: int = 1280, clock: bool = False, **looks: Any
    ) -> Iterator[Any]:
        page = browser.new_page(viewport={"width": width, "height": 800}, **looks)
        page.set_default_timeout(20_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        own = (urljoin(url, "/"), "data:")  # `data:` are pictures of Swagger UI's style sheet
        page.on("request", lambda request: None if request.url.startswith(own) else complaints.append(request.url))
        if clock:
            page.clock.install()
        page.goto(url)
        yield page
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        page.close()
        expected = tuple(f"the server responded with a status of {status}" for status in refused)
        assert [text for text in complaints if not any(one in text for one in expected)] == []

    return opened


def score(page: Any, documents: list[str] = DOCUMENTS, query: str = QUERY, *, is_refused: bool = False) -> None:
    """Ask, and wait until the table shows these documents: none of them is in the example that it showed before."""
    page.locator("#facts").filter(has_text="·").wait_for()
    page.fill("#query", query)
    page.fill("#documents", "\n".join(documents))
    page.click("#score")
    if not is_refused:
        page.locator('#table tr[data-row="0"] .pick').get_by_text(documents[0], exact=True).wait_for()


def column(page: Any, kind: str, rows: int) -> list[float]:
    """As the table shows it, in the documents' order."""
    cells = [page.locator(f'#table tr[data-row="{row}"] td[data-kind="{kind}"]') for row in range(rows)]
    return [float(cell.get_attribute("data-value")) for cell in cells]


def order(page: Any, place: str = "#table tbody tr") -> list[int]:
    return [int(row.get_attribute("data-row")) for row in page.locator(place).all()]


def vectors(server: Running, inputs: list[str], prompt_name: str | None = None) -> Any:
    return server.post("/embed_hybrid", {"inputs": inputs, "prompt_name": prompt_name, "truncate": True}).json()


def weights(entries: list[dict[str, Any]]) -> dict[int, float]:
    return {entry["index"]: entry["value"] for entry in entries}


@pytest.fixture
def expected(server: Running) -> dict[str, Any]:
    """The same from the API, by numpy."""
    (query,), documents = vectors(server, [QUERY], "query"), vectors(server, DOCUMENTS, "passage")
    wanted = weights(query["sparse"])
    alike = [np.array(query["multivector"]) @ np.array(document["multivector"]).T for document in documents]
    return {
        "dense": [float(np.dot(query["dense"], document["dense"])) for document in documents],
        "sparse": [sum(wanted.get(id_, 0) * weight for id_, weight in weights(d["sparse"]).items()) for d in documents],
        "multivector": [float(matrix.max(axis=1).mean()) for matrix in alike],
        "alike": alike,
        "query": wanted,
        "weights": [weights(document["sparse"]) for document in documents],
    }


def test_query_scores_heat_map_rerank(server, visit, expected):
    with visit(server.url) as page:
        assert page.title() == "hybridtei"
        score(page)
        for kind in ("dense", "sparse", "multivector"):
            assert column(page, kind, len(DOCUMENTS)) == pytest.approx(expected[kind], abs=1e-6)
        reciprocal = sum(1 / (60 + competition_ranks(expected[kind])) for kind in ("dense", "sparse", "multivector"))
        assert column(page, "fused", len(DOCUMENTS)) == pytest.approx(reciprocal)
        assert order(page)[0] == int(np.argmax(reciprocal))

        page.locator('#table tr[data-row="2"] button').focus()
        page.keyboard.press("Enter")
        expect(page.locator('#table tr[data-row="2"]')).to_have_class("selected")
        expect(page.locator('#texts article[data-text="2"]')).to_have_class("selected")
        check_weights(page, server, expected["weights"][2], expected["query"])
        check_heat_map(page, server, expected["alike"][2])

        page.click("#rerank-run")
        expect(page.locator("#ranks li")).to_have_count(len(DOCUMENTS))
        ranking = server.post("/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()
        shown = {row: float(page.locator(f'#ranks li[data-row="{row}"]').get_attribute("data-score")) for row in range(4)}
        assert shown == pytest.approx({rank["index"]: rank["score"] for rank in ranking}, abs=1e-6)
        assert [shown[row] for row in order(page, "#ranks li")] == sorted(shown.values(), reverse=True)
        check_moves(page, competition_ranks(reciprocal))
        assert page.locator("img, b").count() == 0  # what was typed is text
        assert page.locator(".error:visible, #search:visible").count() == 0  # there is no store


def competition_ranks(scores: Any) -> Any:
    return np.array([1 + sum(other > one for other in scores) for one in scores])


def check_weights(page: Any, server: Running, document: dict[int, float], query: dict[int, float]) -> None:
    (tokens,) = server.post("/tokenize", {"inputs": [DOCUMENTS[2]], "add_special_tokens": False}).json()
    shown = [token for token in tokens if token["id"] in document]
    marks = page.locator('#texts article[data-text="2"] .spelled mark')
    assert marks.all_inner_texts() == [token["text"] for token in shown]
    found = [float(mark.get_attribute("data-weight")) for mark in marks.all()]
    assert found == pytest.approx([document[token["id"]] for token in shown])
    matched = page.locator('#texts article[data-text="2"] mark.matched').all_inner_texts()
    assert matched == [token["text"] for token in shown if token["id"] in query] != []
    assert page.locator('#texts article[data-text="2"] .spelled').inner_text() == DOCUMENTS[2]


def check_heat_map(page: Any, server: Running, expected: np.ndarray) -> None:
    def names(text: str, prompt_name: str) -> list[str]:
        (tokens,) = server.post("/tokenize", {"inputs": [text], "prompt_name": prompt_name}).json()
        return [token["text"] for token in tokens][1:]  # the first has no vector

    assert page.locator("#heat-map thead th.token").all_inner_texts() == names(DOCUMENTS[2], "passage")
    assert page.locator("#heat-map th[scope=row]").all_inner_texts() == names(QUERY, "query")
    cells = [float(cell.get_attribute("data-value")) for cell in page.locator("#heat-map td.heat").all()]
    np.testing.assert_allclose(np.reshape(cells, expected.shape), expected, atol=1e-6)
    rows = page.locator("#heat-map tbody tr").all()
    best = [[("best" in cell.get_attribute("class")) for cell in row.locator("td.heat").all()].index(True) for row in rows]
    assert best == expected.argmax(axis=1).tolist()


def check_moves(page: Any, fused_ranks: Any) -> None:
    for place, row in enumerate(order(page, "#ranks li"), 1):
        by = int(fused_ranks[row]) - place
        words = page.locator(f'#ranks li[data-row="{row}"] .moved').inner_text()
        assert words == ("=" if by == 0 else f"▲ up {by}" if by > 0 else f"▼ down {-by}")


def test_fusion_and_sorting(server, visit, expected):
    with visit(f"{server.url}/m/small/") as page:
        score(page)
        page.get_by_label("weighted scores").check()
        page.locator('[data-share="dense"]').fill("0.5")
        page.locator('[data-share="sparse"]').fill("2")
        page.locator('[data-share="multivector"]').fill("0")
        low, span = min(expected["sparse"]), np.ptp(expected["sparse"])
        sparse = (np.array(expected["sparse"]) - low) / span
        dense = (np.array(expected["dense"]) - min(expected["dense"])) / np.ptp(expected["dense"])
        fused = (0.5 * dense + 2 * sparse) / 2.5
        assert column(page, "fused", len(DOCUMENTS)) == pytest.approx(fused, abs=1e-5)
        bars = page.locator("#table .bar.fused").evaluate_all(
            "all => all.map(bar => Number(bar.style.getPropertyValue('--part')))"
        )
        assert bars == pytest.approx(np.sort((fused - fused.min()) / np.ptp(fused))[::-1], abs=1e-5)
        for kind in ("dense", "multivector"):
            page.click(f'[data-sort="{kind}"]')
            assert order(page) == sorted(range(4), key=lambda row, kind=kind: -expected[kind][row])
            expect(page.locator("th", has=page.locator(f'[data-sort="{kind}"]'))).to_have_attribute("aria-sort", "descending")
            page.keyboard.press("Enter")  # the heading keeps the focus
            assert order(page) == sorted(range(4), key=lambda row, kind=kind: expected[kind][row])
        page.click('[data-sort="place"]')
        assert order(page) == [0, 1, 2, 3]


def test_live_view_is_of_metrics_and_rests_while_nobody_looks(server, visit):
    asked: list[str] = []
    with visit(server.url, clock=True) as page:
        page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/metrics") else None)
        page.locator("#table tbody tr").first.wait_for()  # what opens the page has read /metrics by then

        def second() -> None:
            with page.expect_response("**/metrics") as answered:
                page.clock.run_for(1000)
            answered.value.finished()

        second()
        for _ in range(3):
            server.post("/embed", {"inputs": ["one two", "three"]})
        second()
        gauge = lambda name: page.locator(f'[data-gauge="{name}"] output')  # noqa: E731
        expect(gauge("p95")).not_to_have_text("–")
        assert float(gauge("requests").inner_text()) >= 1
        assert float(gauge("tokens").inner_text()) >= 1
        assert float(gauge("p50").inner_text()) <= float(gauge("p95").inner_text())
        assert 0 < float(gauge("fill").inner_text()) <= 100
        assert page.locator('[data-gauge="queue"] path').get_attribute("d").startswith("M")

        page.click("#live-pause")
        expect(page.locator("#live-state")).to_have_text("paused")
        page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
        page.click("#live-pause")  # on again, but hidden
        expect(page.locator("#live-state")).to_have_text("paused")
        before = len(asked)
        page.clock.run_for(10_000)
        assert len(asked) == before
        page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
        second()
        assert len(asked) > before


def test_what_a_model_lacks_is_grey_and_why(dense_server, visit):
    with visit(dense_server.url, refused=(424,)) as page:
        score(page)
        assert page.locator("#table tbody td.lacking").count() == 2 * len(DOCUMENTS)
        expect(page.locator("#scores-notes")).to_contain_text("Sparse: small has no sparse output.")
        assert page.locator('[data-share="sparse"]').is_disabled()
        assert page.locator('[data-sort="multivector"]').is_disabled()
        assert not page.locator("#text, #heat").locator("visible=true").count()
        page.click("#rerank-run")
        expect(page.locator("#rerank-error")).to_contain_text("small cannot rerank")
        expect(page.locator("#rerank-error")).to_contain_text("424")


def test_terms_that_splade_adds_are_named(splade_server, visit):
    with visit(splade_server.url) as page:
        score(page, ["one two"], "one")
        added = page.locator('#texts article[data-text="0"] .added mark')
        added.first.wait_for()
        asked = {"inputs": ["one two"], "prompt_name": "passage"}
        (entries,), (tokens,) = (splade_server.post(path, asked).json() for path in ("/embed_sparse", "/tokenize"))
        own = {token["id"] for token in tokens}
        heaviest = sorted((e for e in entries if e["index"] not in own), key=lambda e: -e["value"])[: added.count()]
        names = splade_server.post("/decode", {"ids": [[e["index"]] for e in heaviest], "skip_special_tokens": False}).json()
        assert added.all_inner_texts() == [name.strip() for name in names] != []


def test_a_reranker_ranks_without_vectors(reranker, visit):
    with visit(reranker.url) as page:
        score(page, is_refused=True)
        expect(page.locator("#ask-error")).to_contain_text("gives no vectors (reranker)")
        page.click("#rerank-run")
        expect(page.locator("#ranks li")).to_have_count(len(DOCUMENTS))
        assert page.locator("#ranks .moved").count() == 0


def test_a_key_is_asked_for_and_forgotten(visit):
    with serving(server={"api_key": "s3cret"}) as running, visit(running.url, refused=(401,)) as page:
        page.get_by_label("This server asks for an API key").fill("wrong")
        page.click("#key-form button")
        expect(page.locator("#key-error")).to_have_text("This key was refused.")
        page.fill("#key", "s3cret")
        page.click("#key-form button")
        score(page)
        assert page.locator("#key-form").is_hidden()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.reload()
        expect(page.locator("#key-form")).to_be_visible()
        expect(page.locator("#main")).to_be_hidden()


def test_refusals_are_told_where_they_happened(visit):
    with serving(engine={"max_concurrent_requests": 2}) as running, visit(running.url, refused=(429,)) as page:
        score(page, is_refused=True)
        expect(page.locator("#ask-error")).to_contain_text("429")
        score(page, ["one", "two"])
        expect(page.locator("#ask-error")).to_be_hidden()
        score(page, ["  "], is_refused=True)
        expect(page.locator("#ask-error")).to_contain_text("at least one document")


def test_many_documents_go_in_parts_and_long_ones_are_cut(visit):
    documents = [*(f"{word} text" for word in small.WORDS), "seven " * 100]
    with serving(server={"max_client_batch_size": 8}) as running, visit(running.url) as page:
        score(page, documents)
        expect(page.locator("#scores-notes")).to_contain_text(f"1 texts were cut to {small.LONGEST} tokens.")
        (query,) = vectors(running, [QUERY], "query")
        (last,) = vectors(running, documents[-1:], "passage")
        assert column(page, "dense", len(documents))[-1] == pytest.approx(np.dot(query["dense"], last["dense"]), abs=1e-6)
        page.locator("#table .pick", has_text="seven seven").click()
        expect(page.locator("#heat-map thead th.token")).to_have_count(len(last["multivector"]))
        page.click("#rerank-run")
        expect(page.locator("#ranks li")).to_have_count(len(documents))


def test_several_models_one_embeds_another_ranks(hybrid, visit, tmp_path):
    ranker = tiny.write_classifier(tmp_path / "ranker", "bert")
    flags = [word for folder in (ranker, hybrid) for word in ("--model-id", str(folder))]
    with process(["-m", "hybridtei", "serve", *flags, "--port", "0", "--hostname", "127.0.0.1"]) as running:
        url = running.wait_ready()
        with visit(url) as page, httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            score(page, ["baka bulo", "bomo", "bake balo baka"], "baka")
            assert (page.input_value("#model"), page.input_value("#ranker")) == (hybrid.name, "ranker")
            page.click("#rerank-run")
            expect(page.locator("#ranks li")).to_have_count(3)
            asked = {"query": "baka", "texts": ["baka bulo", "bomo", "bake balo baka"]}
            ranking = client.post("/m/ranker/rerank", json=asked).json()
            shown = [float(row.get_attribute("data-score")) for row in page.locator("#ranks li").all()]
            assert shown == pytest.approx([rank["score"] for rank in ranking], abs=1e-6)
            page.select_option("#model", "ranker")
            expect(page.locator("#scores-notes")).to_contain_text("ranker has no dense output")
            expect(page.locator("#table tbody tr")).to_have_count(0)


def test_an_address_holds_the_question(server, visit):
    with visit(server.url) as page:
        score(page)
        page.get_by_label("weighted scores").check()
        page.locator('[data-share="dense"]').fill("0.5")
        page.locator('[data-share="dense"]').dispatch_event("change")
        address, fused = page.url, column(page, "fused", len(DOCUMENTS))
    with visit(address) as page:
        expect(page.locator("#table tbody tr")).to_have_count(len(DOCUMENTS))  # scored without a click
        assert page.input_value("#query") == QUERY
        assert page.input_value("#documents").split("\n") == DOCUMENTS
        assert page.input_value("#example") == ""
        assert column(page, "fused", len(DOCUMENTS)) == pytest.approx(fused)
        page.select_option("#example", index=1)
        expect(page.locator("#verdict")).to_contain_text("answers the query")
        assert page.url.partition("#")[2].startswith("example=")
        page.fill("#documents", "x" * 9_000)
        page.click("#score")
        expect(page.locator("#ask-hint")).to_contain_text("Too long for an address")
        assert "#" not in page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_by_keyboard_only(server, visit, width, scheme):
    """Without a pointer: choose an example, score, sort, select a document, fuse anew, rerank."""
    with visit(server.url, width=width, color_scheme=scheme) as page:
        page.locator("#facts").filter(has_text="·").wait_for()
        reach(page, "#example")
        page.keyboard.press("ArrowDown")
        page.locator("#table .pick").get_by_text("E4031: the disk quota").wait_for()
        expect(page.locator("#verdict")).to_contain_text("Document 3 answers the query")
        reach(page, "#query")
        page.keyboard.press("Control+A")
        page.keyboard.type("one two")
        page.keyboard.press("Enter")
        expect(page.locator("#table")).to_be_visible()
        expect(page.locator("#verdict")).to_be_hidden()
        reach(page, '[name="fusion"]')
        page.keyboard.press("ArrowDown")
        assert page.get_by_label("weighted scores").is_checked()
        reach(page, '[data-share="sparse"]')
        page.keyboard.press("End")
        assert page.input_value('[data-share="sparse"]') == "2"
        reach(page, '[data-sort="dense"]')
        page.keyboard.press("Enter")
        expect(page.locator('th[aria-sort="descending"]')).to_contain_text("Dense")
        reach(page, '#table tr[data-row="1"] button')
        page.keyboard.press("Space")
        expect(page.locator('#table tr[data-row="1"]')).to_have_class("selected")
        reach(page, "#rerank-run")
        page.keyboard.press("Enter")
        page.locator("#ranks li").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for control in page.locator("input, select, textarea").all():
            assert control.evaluate("one => one.labels.length") == 1


def reach(page: Any, selector: str) -> None:
    """Press Tab until an element that matches has the focus, which is seen."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none"
            return
    raise AssertionError(f"no Tab leads to {selector}")


def test_a_collection_is_searched(hybrid, visit, tmp_path):
    texts = ["baka bulo", "bomo", "bake balo baka"]
    flags = ["--model-id", str(hybrid), "--qdrant-path", str(tmp_path / "store"), "--port", "0", "--hostname", "127.0.0.1"]
    with process(["-m", "hybridtei", "serve", *flags]) as running:
        url = running.wait_ready()
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            body = {"points": [{"id": i, "text": text} for i, text in enumerate(texts)], "create": True}
            assert client.post("/collections/papers/points", json=body).json()["upserted"] == 3
            asked = {"collection": "papers", "query": "baka", "explain": True, "highlights": True}
            wanted = client.post("/search", json=asked).json()["hits"]
        with visit(url, refused=(404,)) as page:
            page.fill("#query", "baka")
            page.select_option("#collection", "papers")
            page.click("#search-form button")
            expect(page.locator("#hits li")).to_have_count(len(wanted))
            shown = [int(hit.get_attribute("data-id")) for hit in page.locator("#hits li").all()]
            assert shown == [hit["id"] for hit in wanted]
            expect(page.locator("#hits li").first).to_contain_text(texts[shown[0]])
            expect(page.locator("#hits li").first).to_contain_text("dense #1")
            without = sum(score["rank"] is None for hit in wanted for score in hit["scores"].values())
            assert page.locator("#hits").inner_text().count(" rescored (") == without > 0
            marked = [mark["text"] for hit in wanted for mark in hit["highlights"]]
            assert page.locator("#hits mark").all_inner_texts() == marked
            page.goto(page.url.replace("papers", "nothing"))  # a link to what was deleted
            expect(page.locator("#search-error")).to_contain_text("404")
            expect(page.locator("#hits li")).to_have_count(0)
            page.go_back()
            expect(page.locator("#hits li")).to_have_count(len(wanted))


def test_an_errors_section_is_scrolled_to(server, visit):
    with visit(server.url + "/page/errors.html#overloaded", width=390) as page:
        assert page.locator("#overloaded").evaluate("one => one.getBoundingClientRect().top") < 800
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_docs_show_every_operation(server: Running, visit: Open) -> None:
    paths = server.get("/api-doc/openapi.json").json()["paths"]
    with visit(f"{server.url}/docs/") as page:
        page.locator(".opblock").first.wait_for()
        shown = zip(page.locator(".opblock-summary-method").all_inner_texts(), page.locator("[data-path]").all(), strict=True)
        assert {(method.lower(), one.get_attribute("data-path")) for method, one in shown} == {
            (method, path) for path, operations in paths.items() for method in operations
        }
        page.locator(".opblock-summary-control", has_text="/health").click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        expect(page.locator(".live-responses-table .response-col_status").last).to_have_text("200")


def test_the_first_example_is_scored_when_the_page_opens_unless_the_server_works(visit: Open) -> None:
    holds, free = threading.Event(), threading.Event()
    with serving() as running, ThreadPoolExecutor(1) as pool:
        running.backend.gate = lambda _: (holds.set(), free.wait(HANG))
        pool.submit(running.post, "/embed", {"inputs": ["one"]})
        assert holds.wait(HANG)
        with visit(running.url) as page:
            expect(page.locator('[data-gauge="queue"] output')).not_to_have_text("–")  # a second after it opened
            assert page.locator("#table tbody tr").count() == 0
        free.set()
        with visit(running.url) as page:
            expect(page.locator("#table tbody tr")).to_have_count(6)
            expect(page.locator("#verdict")).to_contain_text("Document 3 answers the query")
            assert "#" not in page.url
