"""Pictures of the page at `/`, for eyes: 1,440 and 390 pixels wide, light and dark; scored, searched, reranked, under load.

    hybridtei serve & python conformance/page/screenshots.py --url http://127.0.0.1:3000 --out shots --readme notebooks/pictures

`--readme` writes the two of the README, light and dark: what a window shows first, as WebP. Needs a Chromium on the
PATH and the package `playwright`, which drives it; downloads nothing. Fails if the page logs anything, asks another
host for anything, or is wider than its window.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import threading
from pathlib import Path

import httpx
from playwright.sync_api import Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZES = {"wide": (1440, 900), "narrow": (390, 844)}
MAX_README_BYTES = 150_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:3000")
    parser.add_argument("--out", type=Path, default=Path("shots"))
    parser.add_argument("--readme", type=Path, help="folder for the README's two pictures")
    parser.add_argument("--key", help="the server's API key")
    parser.add_argument("--load-seconds", type=float, default=6, help="how long the live view watches requests of ours")
    settings = parser.parse_args()
    settings.out.mkdir(parents=True, exist_ok=True)
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        parser.error(f"no Chromium on the PATH: {', '.join(NAMES)}")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=executable) as browser:
        for scheme in ("light", "dark"):
            for size, (width, height) in SIZES.items():
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                complaints = watched(page, settings.url)
                drive(page, settings)
                page.evaluate("window.scrollTo(0, 0)")
                if settings.readme is not None and size == "wide":
                    write_webp(page, settings.readme / f"page-{scheme}.webp")
                page.screenshot(path=settings.out / f"{size}-{scheme}.png", full_page=True)
                overflow = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
                assert not complaints, complaints
                assert overflow <= 0, f"{size}: {overflow} px too wide"
                page.close()
    print(f"{len(SIZES) * 2} pictures in {settings.out}")


def write_webp(page: Page, path: Path) -> None:
    """What the window shows, which Playwright itself writes as PNG or JPEG only."""
    taken = page.context.new_cdp_session(page).send("Page.captureScreenshot", {"format": "webp", "quality": 80})
    content = base64.b64decode(taken["data"])
    assert len(content) <= MAX_README_BYTES, len(content)
    path.write_bytes(content)


def watched(page: Page, url: str) -> list[str]:
    """What will have gone wrong."""
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith(url) else complaints.append(request.url))
    return complaints


def drive(page: Page, settings: argparse.Namespace) -> None:
    """Score, search where there is a collection, rerank, and watch for a while."""
    page.goto(settings.url)
    if settings.key:
        page.fill("#key", settings.key)
        page.click("#key-form button")
    page.wait_for_selector(".share")
    page.click("#score")
    page.wait_for_selector("#table tbody tr, #ask-error:not([hidden])")
    if page.locator("#collection option").count():
        page.click("#search-form button")
        page.wait_for_selector("#hits li, #search-error:not([hidden])")
    page.click("#rerank-run")
    page.wait_for_selector("#ranks li, #rerank-error:not([hidden])")
    stop = threading.Event()
    load = threading.Thread(target=ask_much, args=(settings.url, settings.key, stop))
    load.start()
    page.wait_for_timeout(settings.load_seconds * 1000)
    stop.set()
    load.join()


def ask_much(url: str, key: str | None, stop: threading.Event) -> None:
    """Requests of different lengths, one after the other."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
        number = 0
        while not stop.is_set():
            number += 1
            client.post(
                "/embed", json={"inputs": [f"text {number} " * (1 + number % 20)] * (1 + number % 8)}
            ).raise_for_status()


if __name__ == "__main__":
    main()
