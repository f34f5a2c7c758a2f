"""Pages for browsers, `/` and `/docs`, and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable

import msgspec
from litestar import Litestar
from litestar.exceptions import NotFoundException

from hybridtei.server.context import Reply
from hybridtei.server.models import Models
from hybridtei.server.openapi import document
from hybridtei.server.routing import PAGE, get
from hybridtei.server.serve import HttpRequest

TEXT = b"text/plain; charset=utf-8"
TYPES = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "png": b"image/png",
}
POLICY = (
    b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src "
    b"'none'; "
)
PAGE_POLICY = POLICY + b"require-trusted-types-for 'script'"
# Swagger UI inserts inline styles, and its style sheet contains images
DOCS_POLICY = POLICY + b"img-src 'self' data:"
HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept"),
)
INDEX = "index.html"
FOLDER = files("hybridtei.server").joinpath("page")


def _served(folder: Traversable) -> list[str]:
    return sorted(file.name for file in folder.iterdir() if file.name.rpartition(".")[2] in TYPES)


FILES, DOCS_FILES = _served(FOLDER), _served(FOLDER.joinpath("docs"))


PATHS = [f"{PAGE}/{name}" for name in FILES if name != INDEX]


@get(
    [PAGE, *PATHS],
    in_schema=False,
    role=None,
    source="models",
)
async def page(models: Models, request: HttpRequest) -> Reply:
    """The page itself, or a file that it loads."""
    return file_of_page(request.path.removeprefix(PAGE).strip("/") or INDEX)


@get("/docs", in_schema=False, role=None, source="models", is_tei=True)
async def docs(models: Models, request: HttpRequest) -> Reply:
    """Swagger UI, from files of this package, so that it works without a network. Its relative
    links work below `/docs/`."""
    if request.scope["raw_path"].endswith(b"/"):
        return file_of_page(f"docs/{INDEX}", DOCS_POLICY)
    return Reply(b"", headers=((b"location", b"/docs/"),), status=303, media_type=TEXT)


@get("/docs/{name:str}", in_schema=False, role=None, source="models", is_tei=True)
async def docs_file(models: Models, request: HttpRequest) -> Reply:
    """A file that Swagger UI loads."""
    name = request.scope["path_params"]["name"]
    if name not in DOCS_FILES:
        raise NotFoundException
    return file_of_page(f"docs/{name}", DOCS_POLICY)


@get("/api-doc/openapi.json", in_schema=False, role=None, source="models", is_tei=True)
async def openapi(models: Models, request: HttpRequest) -> Reply:
    """The document that Swagger UI shows."""
    return Reply(_document(request.app))


@lru_cache(maxsize=1)
def _document(app: Litestar) -> bytes:
    return msgspec.json.encode(document(app))


def file_of_page(name: str, policy: bytes = PAGE_POLICY) -> Reply:
    """Return the page or one of its files."""
    headers = ((b"content-security-policy", policy), *HEADERS)
    return Reply(_read(name), headers=headers, media_type=TYPES[name.rpartition(".")[2]])


@cache
def _read(name: str) -> bytes:
    return FOLDER.joinpath(name).read_bytes()


def wants_page(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """True if `accept` is a browser's: HTML first, then XHTML or nothing."""
    accept = (
        b",".join(value for name, value in headers if name == b"accept").replace(b" ", b"").lower()
    )
    return accept == b"text/html" or accept.startswith(b"text/html,application/xhtml+xml,")
