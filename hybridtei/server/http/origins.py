"""Which pages in browsers may write to the vector store where no key is set.

A page of any site can send requests to whatever server its visitor reaches, and without a key nothing else tells them from
those of a client. Clients that are no browsers send neither header.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hybridtei.server.http.errors import OtherOrigin

OWN = (b"same-origin", b"none")  # none: the user's own doing, such as a bookmark


def check_origin(scope: Any, allowed: Collection[str]) -> None:
    """`allowed`: of `--cors-allow-origin`; beside these, only the server's own pages. Raises OtherOrigin."""
    headers = dict(scope["headers"])
    origin: bytes | None = headers.get(b"origin")
    if origin is None:
        fits = headers.get(b"sec-fetch-site", b"none") in OWN
    else:
        fits = origin.partition(b"://")[2] == headers.get(b"host") or not {"*", origin.decode("latin-1")}.isdisjoint(allowed)
    if not fits:
        raise OtherOrigin
