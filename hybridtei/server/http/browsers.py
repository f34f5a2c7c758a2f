"""Tells a browser, which gets the page at `/`, from a client of the API, which gets TEI's empty answer there.

The surprise: some clients ask for HTML without reading any. Java's says `text/html, image/gif, image/jpeg, *; q=.2`, so that a
tie is a browser's only where it names XHTML, too, as browsers do.
"""

from __future__ import annotations

from collections.abc import Iterable

PAGE = "/page"
HTML, XHTML = "text/html", "application/xhtml+xml"
BROWSERS_OWN = (HTML, XHTML, "image/", "*/*")  # what may be valued as much as HTML


def wants_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether `accept` names HTML, and nothing that is no browser's before it or beside it."""
    accept = b",".join(value for name, value in headers if name == b"accept")
    if b"text/html" not in accept.lower():  # health probes end here
        return False
    qualities = dict(_quality(item) for item in accept.decode("latin-1").lower().split(","))
    html = qualities.get(HTML, 0.0)
    rivals = [name for name, quality in qualities.items() if quality >= html and name not in (HTML, XHTML)]
    if not rivals:
        return html > 0
    return html > 0 and XHTML in qualities and all(name.startswith(BROWSERS_OWN) and qualities[name] <= html for name in rivals)


def _quality(item: str) -> tuple[str, float]:
    name, *parameters = (part.strip() for part in item.split(";"))
    value = next((part[2:] for part in parameters if part.startswith("q=")), "1")
    try:
        return name, float(value)
    except ValueError:
        return name, 0.0
