"""Who may ask for what: `Authorization: Bearer KEY`, byte for byte, of a key that `keys` knows. Knows keys only by name."""

from __future__ import annotations

from typing import Any

from litestar.connection import ASGIConnection
from litestar.exceptions import NotAuthorizedException
from litestar.handlers import BaseRouteHandler

from hybridtei.observability.metrics import Registry
from hybridtei.observability.spans import CALLER
from hybridtei.server.http.errors import RoleNeeded
from hybridtei.server.http.keys import FLAG_NAME, Key, Keyring, Role
from hybridtei.server.http.origins import check_origin


class Door:
    """A keyring, and the count of who came in by which key."""

    def __init__(self, keys: Keyring, registry: Registry) -> None:
        self.keys = keys
        self._counter = registry.counter("hybridtei_key_requests")

    def let_in(self, key: Key | None, role: Role | None) -> None:
        """Counts a key, and has the log name it with what it asked for. `role`: that it should have; None: any key will do.
        Raises NotAuthorizedException without a key, RoleNeeded."""
        if key is None:
            raise NotAuthorizedException
        self._counter.add(key=key.name)
        if key.name != FLAG_NAME:
            CALLER.set(key.name)
        if role is not None and role not in key.roles:
            raise RoleNeeded(role, key.name, key.roles)


def door_of(scope: Any) -> Door:
    """The application's."""
    return scope["app"].state.door  # type: ignore[no-any-return]


async def require_key(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """A guard. A coroutine, because the framework sends guards that are none to a thread."""
    check_key(connection.scope, None)


def is_keyless(scope: Any) -> bool:
    """Whether a key is needed, and the header carries none that opens."""
    keys = door_of(scope).keys
    return not keys.is_open and keys.find_in_header(_authorization(scope)) is None


def check_key(scope: Any, role: Role | None, token: str | None = None) -> None:
    """To be called before the body is looked at, in the request's own task. `role`: that the key should have; None: any key
    will do. `token`: a key that came elsewhere, and will do as well. Raises NotAuthorizedException, which is written without a
    body, and RoleNeeded; where there are no keys, OtherOrigin."""
    door = door_of(scope)
    if door.keys.is_open:
        if role == "write":
            check_origin(scope, scope["app"].state.server.cors_allow_origin)
        return
    key = None if token is None else door.keys.find(token.encode("utf-8", "replace"))
    door.let_in(door.keys.find_in_header(_authorization(scope)) or key, role)


def _authorization(scope: Any) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"authorization"), b"")
