"""`mcp`: a collection as tools of an agent, over standard input and output or HTTP, by a server or
in this process."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from hybridtei.cli.flags import Commands, add_flags, new_parser, read_engine, read_settings
from hybridtei.cli.serve import check_key
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig, StoreConfig
from hybridtei.errors import NoKey, OtherOrigin, UsageError
from hybridtei.retrieval.store import with_default
from hybridtei.server.http.body import first_fields
from hybridtei.server.http.security import Keyring, check_origin
from hybridtei.system.machine import require_extra

PATH = "/mcp"
DRAIN_SECONDS = 5.0


def add(commands: Commands) -> None:
    parser = new_parser(commands, "mcp", run, "COLLECTION [--http] [--writable] [flags]")
    parser.add_argument("collection", metavar="COLLECTION")
    parser.add_argument(
        "--writable",
        action="store_true",
        help="also offer `store`, which adds texts to the collection",
    )
    parser.add_argument(
        "--http",
        action="store_true",
        help=f"listen for streamable HTTP at {PATH}, instead of standard input",
    )
    parser.add_argument(
        "--hostname",
        default="127.0.0.1",
        metavar="IP",
        help="address of --http; one that other machines reach needs a key",
    )
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port of --http")
    parser.add_argument(
        "--api-key", metavar="KEY", help="key of --http: 'Authorization: Bearer KEY' [env: API_KEY]"
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose pages may call --http; repeatable",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="server that searches and stores [default: one in this process]",
    )
    parser.add_argument("--url-api-key", metavar="KEY", help="key of --url")
    add_flags(parser, (StoreConfig, ModelConfig, EngineConfig))


def run(arguments: argparse.Namespace) -> int:
    """Let agents search a collection, over the Model Context Protocol; with --writable, they may
    also add texts to it."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    store = with_default(read_settings(arguments, StoreConfig))
    key = os.environ.get("API_KEY") if arguments.api_key is None else arguments.api_key
    if arguments.http:
        check(arguments.hostname, key)
    if arguments.url is None:
        require_extra("qdrant", "qdrant_client")
    require_extra("mcp", "mcp")
    from hybridtei.client import AsyncClient
    from hybridtei.retrieval.agents import CollectionTools, mcp_server
    from hybridtei.server.start import in_process

    async def serve() -> None:
        connection: AbstractAsyncContextManager[AsyncClient]
        if arguments.url is None:
            connection = in_process([model], engine, store)
        else:
            connection = AsyncClient(arguments.url, api_key=arguments.url_api_key)
        async with connection as client:
            tools = CollectionTools(client, arguments.collection)
            server = mcp_server(tools, arguments.collection, writable=arguments.writable)
            try:
                if arguments.http:
                    await _listen(
                        server, arguments.hostname, arguments.port, key, arguments.allow_origin
                    )
                else:
                    await server.run_stdio_async()
            finally:
                await tools.close()

    asyncio.run(serve())
    return 0


def check(hostname: str, key: str | None) -> None:
    """Raises UsageError if the address is invalid, or if other machines could reach it without a
    key."""
    try:
        address = ipaddress.ip_address(hostname)
    except ValueError:
        raise UsageError(f"--hostname: {hostname!r} is not an IP address") from None
    if key is None and not address.is_loopback:
        raise UsageError(
            f"--hostname {hostname}: other machines can reach this address: give --api-key too"
        )
    check_key(key)


async def _listen(
    server: Any, hostname: str, port: int, key: str | None, origins: Sequence[str]
) -> None:
    """Serve HTTP until a signal. Raises OSError if the port is taken."""
    from hybridtei.server.http.connection import ConnectionLimits
    from hybridtei.server.run import DrainingServer, settings_of
    from hybridtei.system.metrics import Registry

    config = ServerConfig(hostname=hostname, port=port, drain_seconds=DRAIN_SECONDS)
    settings = settings_of(
        application(server, hostname, key, origins), config, ConnectionLimits(config, Registry())
    )
    listening = DrainingServer(settings, DRAIN_SECONDS)
    await listening.serve()
    if not listening.started:
        raise OSError(f"cannot listen on {hostname}:{port}")


def application(server: Any, hostname: str, key: str | None, origins: Sequence[str] = ()) -> Any:
    """The SDK's ASGI application with checks of origin and key."""
    from mcp.server.transport_security import TransportSecuritySettings

    local = ipaddress.ip_address(hostname).is_loopback
    names = ("127.0.0.1", "localhost", "[::1]") if local else ()
    own = [f"{scheme}://{name}:*" for scheme in ("http", "https") for name in names]
    inner = server.streamable_http_app(
        streamable_http_path=PATH,
        # The tools remember nothing, and a client could hold all sessions of a server
        stateless_http=True,
        # A tool has one answer, so it needs no stream of events
        json_response=True,
        transport_security=TransportSecuritySettings(
            enable_dns_rebinding_protection=local,
            allowed_hosts=[f"{name}:*" for name in names],
            allowed_origins=[*own, *origins],
        ),
    )
    return guarded(inner, Keyring(key), origins)


def guarded(app: Any, keys: Keyring, origins: Sequence[str]) -> Any:
    """Return the application that answers 403 to pages of other origins and 401 without the key,
    before it reads a body."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers: list[tuple[bytes, bytes]] = [(b"content-length", b"0")]
        try:
            if scope["type"] == "http":
                check_origin(scope, origins)
                keys.check(first_fields(scope).get(b"authorization", b""), None)
        except OtherOrigin:
            status = 403
        except NoKey:
            status, headers = 401, [*headers, (b"www-authenticate", b"Bearer")]
        else:
            await app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    return answer
