"""Playwright and a Chromium of the system. Where either is missing, tests are skipped; each leaves
a picture in its folder."""

import shutil
from contextlib import contextmanager
from urllib.parse import urljoin

import pytest

from tests.server.page.browser import OVERFLOWING

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# How long a page may take on a busy machine
MOST_MS = 60_000
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser():
    """Closed with the module: while it is open, no other event loop can run in this thread."""
    playwright_api = pytest.importorskip(
        "playwright.sync_api", reason="the package `playwright` is not installed"
    )
    if CHROMIUM is None:
        pytest.skip(f"no browser on the PATH: {', '.join(NAMES)}")
    playwright_api.expect.set_options(timeout=MOST_MS)
    with (
        playwright_api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM) as browser,
    ):
        yield browser


@pytest.fixture
def visit(browser, tmp_path):
    """Open a page, and all that it opens. In the end it has asked no other host, nothing reaches
    beyond its right edge, and the console holds nothing but `refused` statuses. A picture of it is
    in the test's folder."""

    @contextmanager
    def opened(
        url,
        *,
        refused=(),
        width=1280,
        height=800,
        clock=False,
        **looks,
    ):
        # `data:` are pictures of Swagger UI's style sheet
        own = (urljoin(url, "/"), "data:")
        expected = tuple(f"the server responded with a status of {status}" for status in refused)
        complaints = []

        def complain(text):
            if not any(sentence in text for sentence in expected):
                complaints.append(text)

        def check_host(request):
            if not request.url.startswith(own):
                complaints.append(f"asked {request.url}")

        with browser.new_context(viewport={"width": width, "height": height}, **looks) as context:
            context.set_default_timeout(MOST_MS)
            context.on("console", lambda message: complain(message.text))
            context.on("weberror", lambda error: complain(str(error.error)))
            context.on("request", check_host)
            page = context.new_page()
            if clock:
                page.clock.install()
            page.goto(url)
            try:
                yield page
            except Exception:
                # A page that is dead fails the test by its symptom; pytest shows the cause.
                print("the page's complaints:", complaints)
                raise
            page.screenshot(path=tmp_path / "page.png", full_page=True)
            for each in context.pages:
                complaints += [f"overflows: {text}" for text in each.evaluate(OVERFLOWING)]
        assert complaints == []

    return opened
