"""The page for browsers: static files of the package, which ask this server only.

`/page` is what a browser gets at `/`; see `edge`. Its policy lets it load and ask nothing from elsewhere, and run no text as
script or markup. No key is needed for it: what it shows, it asks for with the key that somebody types in.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from litestar import Request, get
from litestar.response.base import ASGIResponse

from hybridtei.server.http.browsers import PAGE

TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept",
}
INDEX = "index.html"
FOLDER = files("hybridtei.server").joinpath("page")
FILES = sorted(file.name for file in FOLDER.iterdir() if file.name.rpartition(".")[2] in TYPES)


@get([PAGE, *(f"{PAGE}/{name}" for name in FILES if name != INDEX)])
async def page(request: Request[Any, Any, Any]) -> ASGIResponse:
    """The page itself, or a file that it loads."""
    name = request.scope["path"].removeprefix(PAGE).strip("/") or INDEX
    return ASGIResponse(body=_read(name), media_type=TYPES[name.rpartition(".")[2]], headers=HEADERS)


@cache
def _read(name: str) -> bytes:
    return FOLDER.joinpath(name).read_bytes()


ROUTES = (page,)
