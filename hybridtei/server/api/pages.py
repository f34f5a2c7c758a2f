"""Pages for browsers, `/` and `/docs`, and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec
from litestar import Litestar, Response
from litestar.exceptions import NotFoundException
from litestar.params import FromPath

from hybridtei.server.endpoint import ApiRequest, get
from hybridtei.server.openapi import document
from hybridtei.server.routing import PAGE

TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "png": "image/png",
}
POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
PAGE_POLICY = POLICY + "require-trusted-types-for 'script'"
DOCS_POLICY = (
    POLICY + "img-src 'self' data:"
)  # Swagger UI inserts inline styles, and its style sheet contains images
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept",
}
INDEX = "index.html"
FOLDER = files("hybridtei.server").joinpath("page")


def _served(folder: Traversable) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES)


FILES, DOCS_FILES = _served(FOLDER), _served(FOLDER.joinpath("docs"))


@get([PAGE, *(f"{PAGE}/{name}" for name in FILES if name != INDEX)], in_schema=False, role=None)
async def page(http: ApiRequest) -> Response[bytes]:
    """The page itself, or a file that it loads."""
    return file_of_page(http.scope["path"].removeprefix(PAGE).strip("/") or INDEX)


@get("/docs", in_schema=False, role=None, is_tei=True)
async def docs(http: ApiRequest) -> Response[bytes]:
    """Swagger UI, from files of this package, so that it works without a network. Its relative links work below `/docs/`."""
    if http.scope["raw_path"].endswith(b"/"):
        return file_of_page(f"docs/{INDEX}", DOCS_POLICY)
    return Response(b"", status_code=303, media_type="text/plain", headers={"location": "/docs/"})


@get("/docs/{name:str}", in_schema=False, role=None, is_tei=True)
async def docs_file(name: FromPath[str]) -> Response[bytes]:
    """A file that Swagger UI loads."""
    if name not in DOCS_FILES:
        raise NotFoundException
    return file_of_page(f"docs/{name}", DOCS_POLICY)


@get("/api-doc/openapi.json", in_schema=False, role=None, is_tei=True)
async def openapi(http: ApiRequest) -> Response[bytes]:
    """The document that Swagger UI shows."""
    return Response(_document(http.app), media_type="application/json")


@lru_cache(maxsize=1)
def _document(app: Litestar) -> bytes:
    return msgspec.json.encode(document(app))


def file_of_page(name: str, policy: str = PAGE_POLICY) -> Response[bytes]:
    """Return the page or one of its files."""
    headers = {"content-security-policy": policy, **HEADERS}
    return Response(_read(name), media_type=TYPES[name.rpartition(".")[2]], headers=headers)


@cache
def _read(name: str) -> bytes:
    return FOLDER.joinpath(name).read_bytes()


def wants_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if `accept` is a browser's: HTML first, then XHTML or nothing."""
    accept = (
        b",".join(value for name, value in headers if name == b"accept").replace(b" ", b"").lower()
    )
    return accept == b"text/html" or accept.startswith(b"text/html,application/xhtml+xml,")
