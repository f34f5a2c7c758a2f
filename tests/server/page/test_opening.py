"""The page as users open it first: the embedded model, with and without a store, with a key, with
two models."""

import base64
import os
from pathlib import Path

import pytest

from conformance.small import tiny
from tests.sampled import paired
from tests.server.live import process

expect = pytest.importorskip(
    "playwright.sync_api", reason="the package `playwright` is not installed"
).expect
pytestmark = pytest.mark.slow

KEY = "s3cret"
SERVERS = ("plain", "store", "key", "two models", "all of them")
LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]


@pytest.fixture
def kind_and_url(request, tmp_path_factory):
    """A server of the embedded model, started as users do."""
    kind = request.param
    folder = tmp_path_factory.mktemp("opening")
    flags = ["--port", "0", "--hostname", "127.0.0.1"]
    if kind in ("store", "all of them"):
        flags += ["--qdrant-path", str(folder / "store")]
    if kind in ("key", "all of them"):
        flags += ["--api-key", KEY]
    if kind in ("two models", "all of them"):
        ranker = tiny.write_classifier(folder / "ranker", "bert")
        flags += ["--model-id", str(ranker), "--model-id", "minilm-hybrid"]
    with process(["-m", "hybridtei", "serve", *flags]) as running:
        yield kind, running.wait_ready()


@pytest.mark.parametrize(
    ("kind_and_url", "look"), paired(SERVERS, LOOKS), indirect=["kind_and_url"]
)
def test_the_first_example_is_scored_without_a_click(kind_and_url, visit, look):
    width, scheme = look
    kind, url = kind_and_url
    has_key = kind in ("key", "all of them")
    with visit(url, refused=(401,) if has_key else (), width=width, color_scheme=scheme) as page:
        if has_key:
            page.fill("#key", KEY)
            page.keyboard.press("Enter")
        expect(page.locator("#verdict")).to_have_text(
            "Document 3 answers the query. Its rank: Dense #2, Sparse #2, MaxSim #2, Fused #1."
        )
        expect(page.locator("#table tbody tr")).to_have_count(6)
        expect(page.locator("#texts article")).to_have_count(7)
        expect(page.locator("#heat-map tbody tr").first).to_be_visible()
        expect(page.locator("#facts")).to_contain_text("minilm-hybrid")
        expect(page.locator("#search")).to_be_visible(visible=kind in ("store", "all of them"))
        expect(page.locator("#model")).to_be_visible(visible=kind in ("two models", "all of them"))
        assert page.locator(".error:visible").count() == 0
        is_dark = (
            page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        )
        assert is_dark == (scheme == "dark")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_of_the_readme(visit, tmp_path, scheme):
    """With PICTURES=notebooks/pictures the README's pictures are written anew."""
    with (
        process(["-m", "hybridtei", "serve", "--port", "0", "--hostname", "127.0.0.1"]) as running,
        visit(running.wait_ready(), width=1440, height=900, color_scheme=scheme) as page,
    ):
        expect(page.locator("#verdict")).to_contain_text("Document 3 answers the query")
        expect(page.locator('[data-gauge="p95"] output')).not_to_have_text("–")
        # Playwright itself writes PNG and JPEG only
        devtools = page.context.new_cdp_session(page)
        picture = devtools.send("Page.captureScreenshot", {"format": "webp", "quality": 80})
        content = base64.b64decode(picture["data"])
        assert content[8:12] == b"WEBP"
        folder = Path(os.environ.get("PICTURES", tmp_path))
        (folder / f"page-{scheme}.webp").write_bytes(content)


@pytest.mark.parametrize(
    "script",
    [
        "setTimeout(() => undefined.planted)",
        "Promise.reject(new Error('planted'))",
        "console.error('planted')",
        "open().console.error('planted')",
        "document.body.append(Object.assign(document.createElement('p'), "
        "{style: 'width: 2000px', textContent: 'planted'}))",
    ],
)
def test_a_page_that_complains_fails_its_test(server, visit, script):
    with pytest.raises(AssertionError, match="planted"), visit(server.url) as page:
        page.evaluate(f"() => {{ {script}; return new Promise((then) => setTimeout(then, 200)); }}")
