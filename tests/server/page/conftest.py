"""Playwright and a Chromium of the system. Where either is missing, tests are skipped; each leaves a picture in its folder."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from tests.server.page.browser import Open

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed with the module: while it is open, no other event loop can run in this thread."""
    playwright_api = pytest.importorskip(
        "playwright.sync_api", reason="the package `playwright` is not installed"
    )
    if CHROMIUM is None:
        pytest.skip(f"no browser on the PATH: {', '.join(NAMES)}")
    with (
        playwright_api.sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=CHROMIUM) as browser,
    ):
        yield browser


@pytest.fixture
def visit(browser: Any, tmp_path: Path) -> Open:
    """The page, opened. In the end it is photographed, and has complained of nothing but `refused` statuses."""

    @contextmanager
    def opened(
        url: str,
        *,
        refused: tuple[int, ...] = (),
        width: int = 1280,
        clock: bool = False,
        **looks: Any,
    ) -> Iterator[Any]:
        page = browser.new_page(viewport={"width": width, "height": 800}, **looks)
        page.set_default_timeout(20_000)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        own = (urljoin(url, "/"), "data:")  # `data:` are pictures of Swagger UI's style sheet
        page.on(
            "request",
            lambda request: None if request.url.startswith(own) else complaints.append(request.url),
        )
        if clock:
            page.clock.install()
        page.goto(url)
        yield page
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        page.close()
        expected = tuple(f"the server responded with a status of {status}" for status in refused)
        assert [text for text in complaints if not any(one in text for one in expected)] == []

    return opened
