"""Who gets the page at `/`: what browsers and clients of the API really send."""

import pytest

from hybridtei.server.api.pages import wants_page

BROWSERS = {
    "chrome": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,image/apng,*/*;q=0.8",
    "firefox": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "lynx": "text/html, application/xhtml+xml, */*;q=0.01",
    "by hand": "text/html",
    "by hand, in another spelling": "Text/HTML",
}
CLIENTS = {
    "curl, requests, httpx": "*/*",
    "none": "",
    "json": "application/json",
    "axios": "application/json, text/plain, */*",
    "java": "text/html, image/gif, image/jpeg, *; q=.2, */*; q=.2",
    "json first": "application/json, text/html;q=0.9",
    "json as much": "application/json, text/html",
    "anything rather": "text/html;q=0.1, application/xhtml+xml;q=0.1, */*",
    "not at all": "text/html;q=0",
    "nonsense": "text/html;q=high",
    "another type": "text/html-sandboxed",
}


@pytest.mark.parametrize("accept", BROWSERS.values(), ids=BROWSERS)
def test_browsers_get_the_page(accept):
    assert wants_page([(b"host", b"a"), (b"accept", accept.encode())])


@pytest.mark.parametrize("accept", CLIENTS.values(), ids=CLIENTS)
def test_clients_get_teis_answer(accept):
    assert not wants_page([(b"accept", accept.encode())])


def test_without_the_header_and_in_several():
    assert not wants_page([])
    assert wants_page(
        [
            (b"accept", b"text/html"),
            (b"accept", b"application/xhtml+xml"),
            (b"accept", b"*/*;q=0.8"),
        ]
    )
    assert not wants_page([(b"accept", b"text/html"), (b"accept", b"application/json")])
