"""OpenAI's own package in a page of another origin: the server decides by `--cors-allow-origin`
whether it may embed."""

import functools
import http.server
import threading
from contextlib import contextmanager
from typing import ClassVar

import pytest

from hybridtei import Encoder
from tests.conformance.test_clients import environments
from tests.near import near
from tests.server.live import commanded
from tests.server.page.conftest import MOST_MS

KEY = "a-key"
TEXTS = ["hybrid search", "a bicycle"]
EMBED = """async ([url, key, input]) => {
  const { default: OpenAI } = await import("/node_modules/openai/index.mjs");
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, dangerouslyAllowBrowser: true, maxRetries: 0 });
  try {
    const answer = await client.embeddings.create({ model: "minilm-hybrid", input });
    return { vectors: answer.data.map((item) => [...item.embedding]) };
  } catch (error) {
    return { error: error.constructor.name, message: error.message };
  }
}"""


class Files(http.server.SimpleHTTPRequestHandler):
    """Files of a folder, without a line for each request. A module needs its media type."""

    extensions_map: ClassVar = {".html": "text/html", ".mjs": "text/javascript"}

    def log_message(self, *_): ...


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """The origin of a page that has the package."""
    home = environments.ready(environments.NODE)
    if home is None:
        pytest.skip("not made: python conformance/clients/environments.py node")
    folder = tmp_path_factory.mktemp("shop")
    (folder / "index.html").write_text("<!doctype html><title>shop</title>")
    (folder / "node_modules").symlink_to(home / "node_modules")
    handler = functools.partial(Files, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def opened(browser, url):
    with browser.new_context() as context:
        context.set_default_timeout(MOST_MS)
        page = context.new_page()
        page.goto(url)
        yield page


@pytest.mark.parametrize("is_listed", [True, False])
def test_an_allowed_page_embeds_with_a_key(browser, shop, is_listed):
    """Without the flag every origin is allowed, as in TEI."""
    flags = ("--cors-allow-origin", shop) if is_listed else ()
    with (
        commanded("--offline", "--api-key", KEY, *flags) as url,
        opened(browser, shop) as page,
    ):
        requests = []
        page.on("request", lambda request: requests.append(request.headers))
        answer = page.evaluate(EMBED, [url, KEY, TEXTS])
        refused = page.evaluate(EMBED, [url, "another-key", TEXTS])
        empty = page.evaluate(EMBED, [url, KEY, ["a", ""]])
    sent = {name for headers in requests for name in headers}
    assert {"authorization", "x-stainless-lang", "x-stainless-retry-count"} <= sent
    encoder = Encoder.load()
    near(answer["vectors"], encoder.encode(TEXTS).dense, 1e-5)
    encoder.close()
    assert refused["error"] == "AuthenticationError"
    assert "`input[1]` cannot be empty" in empty["message"]


def test_a_page_that_is_not_listed_is_refused_by_the_browser(browser, shop):
    flags = ("--api-key", KEY, "--cors-allow-origin", "http://example.com")
    with commanded("--offline", *flags) as url, opened(browser, shop) as page:
        answer = page.evaluate(EMBED, [url, KEY, TEXTS])
    assert answer == {"error": "APIConnectionError", "message": "Connection error."}
