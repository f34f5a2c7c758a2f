"""The page in a real browser: keys, refusals, addresses, keyboard, searches, metrics; and it asks
nobody else."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.server.live import HANG, process, serving
from tests.server.page.browser import DOCUMENTS, QUERY, column, score

expect = pytest.importorskip(
    "playwright.sync_api", reason="the package `playwright` is not installed"
).expect
pytestmark = pytest.mark.slow


def test_live_view_is_of_metrics_and_rests_while_nobody_looks(server, visit):
    asked = []
    with visit(server.url, clock=True) as page:
        page.on(
            "request",
            lambda request: asked.append(request.url) if request.url.endswith("/metrics") else None,
        )
        # What opens the page has read /metrics by then
        page.locator("#table tbody tr").first.wait_for()

        def second():
            with page.expect_response("**/metrics") as answered:
                page.clock.run_for(1000)
            answered.value.finished()

        second()
        for _ in range(3):
            server.post("/embed", {"inputs": ["one two", "three"]})
        second()
        gauge = lambda name: page.locator(f'[data-gauge="{name}"] output')  # noqa: E731
        # The page writes thousands with a comma
        number = lambda name: float(gauge(name).inner_text().replace(",", ""))  # noqa: E731
        # The page may draw the answer later
        expect(gauge("requests")).to_have_text(re.compile("[1-9]"))
        expect(gauge("p95")).not_to_have_text("–")
        assert number("requests") >= 1
        assert number("tokens") >= 1
        assert number("p50") <= number("p95")
        assert 0 < number("fill") <= 100
        assert page.locator('[data-gauge="queue"] path').get_attribute("d").startswith("M")

        page.click("#live-pause")
        expect(page.locator("#live-state")).to_have_text("paused")
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true})"
        )
        # On again, but hidden
        page.click("#live-pause")
        expect(page.locator("#live-state")).to_have_text("paused")
        before = len(asked)
        page.clock.run_for(10_000)
        assert len(asked) == before
        page.evaluate(
            "delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))"
        )
        second()
        assert len(asked) > before


def test_a_key_is_asked_for_and_forgotten(visit):
    with (
        serving(server={"api_key": "s3cret"}) as running,
        visit(running.url, refused=(401,)) as page,
    ):
        page.get_by_label("This server asks for an API key").fill("wrong")
        page.click("#key-form button")
        expect(page.locator("#key-error")).to_have_text("This key was refused.")
        page.fill("#key", "s3cret")
        page.click("#key-form button")
        score(page)
        assert page.locator("#key-form").is_hidden()
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [
            0,
            0,
            "",
        ]
        page.reload()
        expect(page.locator("#key-form")).to_be_visible()
        expect(page.locator("#main")).to_be_hidden()


def test_refusals_are_told_where_they_happened(visit):
    with (
        serving(engine={"max_concurrent_requests": 2}) as running,
        visit(running.url, refused=(429,)) as page,
    ):
        score(page, is_refused=True)
        expect(page.locator("#ask-error")).to_contain_text("429")
        score(page, ["one", "two"])
        expect(page.locator("#ask-error")).to_be_hidden()
        score(page, ["  "], is_refused=True)
        expect(page.locator("#ask-error")).to_contain_text("at least one document")


def test_an_address_holds_the_question(server, visit):
    with visit(server.url) as page:
        score(page)
        page.get_by_label("weighted scores").check()
        page.locator('[data-share="dense"]').fill("0.5")
        page.locator('[data-share="dense"]').dispatch_event("change")
        address, fused = page.url, column(page, "fused", len(DOCUMENTS))
    with visit(address) as page:
        # Scored without a click
        expect(page.locator("#table tbody tr")).to_have_count(len(DOCUMENTS))
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
        assert page.get_by_label("reciprocal ranks").is_checked()
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


def reach(page, selector):
    """Press Tab until an element that matches has the focus, which is seen."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none"
            return
    raise AssertionError(f"no Tab leads to {selector}")


def test_a_collection_is_searched(hybrid, visit, tmp_path):
    table = "bomo\n| baka | bomo |\n| --- | --- |\n| bulo | bake |"
    texts = ["baka bulo", table, "bake balo baka"]
    flags = [
        "--model-id",
        str(hybrid),
        "--qdrant-path",
        str(tmp_path / "store"),
        "--port",
        "0",
        "--hostname",
        "127.0.0.1",
    ]
    with process(["-m", "hybridtei", "serve", *flags]) as running:
        url = running.wait_ready()
        with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
            body = {
                "points": [{"id": i, "text": text} for i, text in enumerate(texts)],
                "create": True,
            }
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
            texts_shown = page.locator("#hits li").all_inner_texts()
            assert any(texts[0] in text for text in texts_shown)
            assert page.locator("#hits td").all_inner_texts() == ["baka", "bomo", "bulo", "bake"]
            expect(page.locator("#hits li").first).to_contain_text("dense #")
            without = sum(
                score["rank"] is None for hit in wanted for score in hit["scores"].values()
            )
            assert page.locator("#hits").inner_text().count(" rescored (") == without > 0
            marked = [mark["text"] for hit in wanted for mark in hit["highlights"]]
            assert page.locator("#hits mark").all_inner_texts() == marked
            # A link to what was deleted
            page.goto(page.url.replace("papers", "nothing"))
            expect(page.locator("#search-error")).to_contain_text("404")
            expect(page.locator("#hits li")).to_have_count(0)
            page.go_back()
            expect(page.locator("#hits li")).to_have_count(len(wanted))


def test_an_errors_section_is_scrolled_to(server, visit):
    with visit(server.url + "/page/errors.html#overloaded", width=390) as page:
        assert page.locator("#overloaded").evaluate("one => one.getBoundingClientRect().top") < 800
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_first_example_is_scored_when_the_page_opens_unless_the_server_works(
    visit,
):
    holds, free = threading.Event(), threading.Event()
    with serving() as running, ThreadPoolExecutor(1) as pool:
        running.backend.gate = lambda _: (holds.set(), free.wait(HANG))
        pool.submit(running.post, "/embed", {"inputs": ["one"]})
        assert holds.wait(HANG)
        with visit(running.url) as page:
            # A second after it opened
            expect(page.locator('[data-gauge="queue"] output')).not_to_have_text("–")
            assert page.locator("#table tbody tr").count() == 0
        free.set()
        with visit(running.url) as page:
            expect(page.locator("#table tbody tr")).to_have_count(6)
            expect(page.locator("#verdict")).to_contain_text("Document 3 answers the query")
            assert "#" not in page.url
