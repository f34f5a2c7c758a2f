"""`mcp`: a collection as tools of an agent, over standard input and output: by a server that runs,
whose answers are relayed, or in this process.

The relay uses the standard library alone, so that a hundred of them are small and start at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from threading import Lock
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from hybridtei.cli.flags import Commands, add_flags, new_parser, read_engine, read_settings
from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.errors import UsageError
from hybridtei.system.machine import require_extra

# Calls that a relay has in work at once, as many as the server's tools
CALLS = 32
TIMEOUT_S = 300.0
# JSON-RPC's code of an error of the server
SERVER_ERROR = -32_000


def add(commands: Commands) -> None:
    parser = new_parser(commands, "mcp", run, "COLLECTION [--url URL] [--writable] [flags]")
    parser.add_argument("collection", metavar="COLLECTION")
    parser.add_argument(
        "--writable",
        action="store_true",
        help="also offer `store`, which adds texts to the collection, and `forget`",
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
    also add texts to it and delete documents."""
    if arguments.url is not None:
        sender = Relay(address(arguments), arguments.url_api_key)
        if not arguments.writable:
            sender.check(arguments.collection)
        relay(sender)
        return 0
    require_extra("qdrant", "qdrant_client")
    require_extra("mcp", "mcp")
    asyncio.run(_serve(arguments))
    return 0


async def _serve(arguments: argparse.Namespace) -> None:
    from hybridtei.retrieval.agents import CollectionTools, mcp_server
    from hybridtei.server.start import in_process

    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    store = read_settings(arguments, StoreConfig)
    async with in_process([model], engine, store) as client:
        if not arguments.writable:
            # Ends the command if the collection is unknown, or of another model
            await client.search(arguments.collection, "a", limit=1)
        tools = CollectionTools(client, arguments.collection)
        try:
            await mcp_server(tools, writable=arguments.writable).run_stdio_async()
        finally:
            await tools.close()


def address(arguments: argparse.Namespace) -> str:
    """Where the server answers agents of the collection. Raises UsageError."""
    url = arguments.url.rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--url: {url!r} should look like http://127.0.0.1:3000")
    path = f"{url}/collections/{quote(arguments.collection, safe='')}/mcp"
    return f"{path}?writable=true" if arguments.writable else path


def relay(sender: Relay) -> None:
    """Send each line of standard input to a server, and write its answers, until the input ends."""
    with ThreadPoolExecutor(CALLS) as pool:
        for line in sys.stdin.buffer:
            if line.strip():
                pool.submit(sender.pass_on, line)


class Relay:
    """Passes messages of JSON-RPC on, with the version of the protocol that the server has
    chosen."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._headers = {
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
        }
        if key is not None:
            self._headers["authorization"] = f"Bearer {key}"
        self._writing = Lock()

    def check(self, collection: str) -> None:
        """Raises UsageError if the server lists collections without this one, which wakes no model.
        Clients read in the answers to their own messages why a server does not answer."""
        url = self._url.rpartition("/collections/")[0]
        request = Request(f"{url}/collections", headers=self._headers)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as response:
                names = json.loads(response.read())["collections"]
        except (OSError, HTTPException, ValueError, KeyError, TypeError):
            return
        if collection not in names:
            raise UsageError(
                f"there is no collection `{collection}` on the server of --url; there are: "
                f"{', '.join(names) or 'none'}"
            )

    def pass_on(self, line: bytes) -> None:
        """Send a message, and write the answer if it has one. An error of the connection or the
        server becomes the answer."""
        answer = self._answer(line)
        if not answer:
            return
        with self._writing:
            sys.stdout.buffer.write(answer.replace(b"\n", b" ") + b"\n")
            sys.stdout.buffer.flush()

    def _answer(self, line: bytes) -> bytes:
        request = Request(self._url, line, self._headers)
        try:
            with urlopen(request, timeout=TIMEOUT_S) as response:
                answer: bytes = response.read()
        except HTTPError as error:
            return _refusal(line, f"{error.code} {error.reason}: {_words(error.read())}")
        except (OSError, HTTPException) as error:
            return _refusal(line, f"{self._url} gives no answer: {error}")
        if b'"protocolVersion"' in answer:
            result = json.loads(answer).get("result") or {}
            self._headers["mcp-protocol-version"] = result["protocolVersion"]
        return answer


def _words(body: bytes) -> str:
    """The message of an error's body."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return body.decode("utf-8", "replace")[:1000]
    return str(error["message"] if isinstance(error, dict) else error)


def _refusal(line: bytes, message: str) -> bytes:
    """The answer to a message that the server did not answer; b"" for a notification."""
    try:
        number = json.loads(line).get("id")
    except (ValueError, AttributeError):
        number = None
    if number is None:
        return b""
    error = {"code": SERVER_ERROR, "message": message}
    return json.dumps({"jsonrpc": "2.0", "id": number, "error": error}).encode()
