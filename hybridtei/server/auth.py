"""Who may ask: `Authorization: Bearer KEY`, byte for byte, of a key that `keys` knows. Knows of keys only their names."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler

from hybridtei.metrics import Registry
from hybridtei.server.keys import FLAG_NAME, Keyring
from hybridtei.spans import CALLER


class Door:
    """A keyring, and the count of who came in by which key."""

    def __init__(self, keys: Keyring, registry: Registry) -> None:
        self.keys = keys
        self._counter = registry.counter("hybridtei_key_requests")

    def let_in(self, owner: str | None) -> None:
        """Counts a key's owner, and has the log name it with what it asked for. Raises NotAuthorizedException for nobody."""
        if owner is None:
            raise NotAuthorizedException
        self._counter.add(key=owner)
        if owner != FLAG_NAME:
            CALLER.set(owner)


def door_of(scope: Any) -> Door:
    """The application's."""
    return scope["app"].state.door  # type: ignore[no-any-return]


async def require_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """A guard. A coroutine, because the framework sends guards that are none to a thread."""
    check_key(connection.scope)


def is_keyless(scope: Any) -> bool:
    """Whether a key is needed, and the header carries none that opens."""
    keys = door_of(scope).keys
    return not keys.is_open and keys.owner_of_header(_authorization(scope)) is None


def check_key(scope: Any, token: str | None = None) -> None:
    """To be called before the body is looked at, in the request's own task. `token`: a key that came elsewhere, and will do as
    well. Raises NotAuthorizedException, which is written without a body."""
    door = door_of(scope)
    if door.keys.is_open:
        return
    owner = None if token is None else door.keys.owner(token.encode("utf-8", "replace"))
    door.let_in(door.keys.owner_of_header(_authorization(scope)) or owner)


def _authorization(scope: Any) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"authorization"), b"")
