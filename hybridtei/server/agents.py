"""The Model Context Protocol over HTTP: the SDK's server inside this one. Its tools call this
server's own routes with the caller's key, so keys, roles, limits and metrics are theirs.

The SDK is an extra, and imports pydantic: both are imported at the first call.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hybridtei.system.machine import require_extra

if TYPE_CHECKING:
    from litestar import Litestar

PATH = "/mcp"


class Agents:
    """The SDK's servers of one application: one that reads, and one that stores texts too."""

    def __init__(self) -> None:
        self._apps: dict[bool, Any] = {}
        self._running: list[asyncio.Task[None]] = []
        self._starting = asyncio.Lock()

    async def call(
        self, app: Litestar, scope: Any, body: bytes, collection: str, *, writable: bool
    ) -> tuple[int, bytes | None, bytes]:
        """Answer a message: status, media type, body. `collection`: the default of
        calls. Raises LoadError without the SDK."""
        require_extra("mcp", "mcp")
        agents = await asyncio.to_thread(_agents)
        async with self._starting:
            if writable not in self._apps:
                tools = agents.CollectionTools(agents.own_client(app))
                server = agents.mcp_server(tools, writable=writable)
                self._apps[writable] = agents.http_app(server, PATH)
                ready = asyncio.Event()
                self._running.append(asyncio.create_task(_hold(server.session_manager, ready)))
                await ready.wait()
        headers = dict(scope["headers"])
        agents.AUTHORIZATION.set(headers.pop(b"authorization", b"").decode("latin-1"))
        agents.COLLECTION.set(collection)
        inner = {
            "type": "http",
            "asgi": scope["asgi"],
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [*headers.items()],
            "client": scope.get("client"),
            "server": scope.get("server"),
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        status, media_type, parts = 500, None, list[bytes]()

        async def receive() -> Any:
            if messages:
                return messages.pop()
            # The client is there until this call is cancelled
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            nonlocal status, media_type
            if message["type"] == "http.response.start":
                status = message["status"]
                media_type = dict(message["headers"]).get(b"content-type")
            else:
                parts.append(message.get("body", b""))

        await self._apps[writable](inner, receive, send)
        return status, media_type, b"".join(parts)

    async def stop(self) -> None:
        """End the SDK's servers."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


def _agents() -> Any:
    from hybridtei.retrieval import agents

    return agents


async def _hold(manager: Any, ready: asyncio.Event) -> None:
    async with manager.run():
        ready.set()
        await asyncio.Event().wait()
