"""A server's collections as tools of an agent, over the Model Context Protocol: `collections`,
`find`, `read`, and `store` if it is allowed.

A call is finished even if the client leaves, so that a text is stored whole. The number of calls is
bounded, and further calls are refused at once. Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Annotated, Any

import httpx
import orjson
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.transport_security import TransportSecuritySettings
from mcp.types import ToolAnnotations
from pydantic import Field

from hybridtei import __version__
from hybridtei.asking import IN_PROCESS
from hybridtei.client import AsyncClient
from hybridtei.errors import HybridTeiError
from hybridtei.keywords import check_names
from hybridtei.retrieval.ingest.chunking import (
    CHUNK,
    CHUNKS,
    DIGEST,
    DOCUMENT_ID,
    FILE,
    SETTINGS,
    SOURCE,
    START,
    TEXT,
)
from hybridtei.retrieval.search.options import Mode, SearchHit
from hybridtei.retrieval.store.query import MAX_FILTER_BYTES
from hybridtei.system.own_loop import started

# Running or waiting for the server
MAX_CALLS = 32
MAX_HITS = 50
MAX_QUERY_CHARACTERS = 10_000
MAX_TEXT_CHARACTERS = 1_000_000
MAX_METADATA_BYTES = 100_000
# Of a hit's text: ten hits take 5 kB.
EXCERPT_CHARACTERS = 300
OWN_KEYS = (DIGEST, SETTINGS, FILE, START, CHUNKS)
# Bound, since a language model reads the whole answer
MAX_ANSWER_BYTES = 1_000_000

Query = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_QUERY_CHARACTERS,
        description="What to look for, in plain words.",
    ),
]
Collection = Annotated[
    str | None,
    Field(
        max_length=255,
        description="One of `collections` [default: the one of the server's address].",
    ),
]
Cursor = Annotated[int, Field(ge=0, description="The `cursor` of the answer before: further hits.")]
Document = Annotated[
    str, Field(min_length=1, max_length=1000, description="The `document_id` of a hit.")
]
Number = Annotated[
    int | None, Field(ge=0, description="The `chunk` of the hit: only it, and those beside it.")
]
First = Annotated[int, Field(ge=0, description="The `cursor` of the answer before.")]
File = Annotated[
    str | None,
    Field(max_length=1000, description="The `source` of the hit, if it has one."),
]
EveryChunk = Annotated[
    bool, Field(description="Several hits of one document, instead of its best with `more`.")
]
Limit = Annotated[int, Field(ge=1, le=MAX_HITS, description="How many hits at most.")]
Conditions = Annotated[
    dict[str, Any] | None,
    Field(
        description=(
            'Qdrant\'s filter of payloads, as {"must": [{"key": "metadata.year", "match": '
            '{"value": 2024}}]}.'
        )
    ),
]
Ranking = Annotated[
    Mode | None,
    Field(description="How hits are found and scored; by default all kinds of vectors together."),
]
Beside = Annotated[
    dict[str, int] | None,
    Field(
        description='Give each hit a `passage`: its chunk with those beside it, as {"before": 1, '
        '"after": 1}, or {"tokens": 500}.'
    ),
]
Passage = Annotated[
    str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS, description="The text to keep.")
]
Metadata = Annotated[
    dict[str, Any] | None, Field(description="Facts about the text, for filters: `metadata.NAME`.")
]
Name = Annotated[
    str | None, Field(max_length=1000, description="A later text of the same id replaces this one.")
]


# The collection of the address that the running request names
COLLECTION: ContextVar[str] = ContextVar("mcp_collection", default="")
# The field that it sends, for the calls of its tools
AUTHORIZATION: ContextVar[str] = ContextVar("mcp_authorization", default="")


class _OwnRoutes(httpx.ASGITransport):
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if AUTHORIZATION.get():
            request.headers["authorization"] = AUTHORIZATION.get()
        return await super().handle_async_request(request)


def own_client(app: Any) -> AsyncClient:
    """A client of an application in this process, with the key of the running request."""
    return AsyncClient(IN_PROCESS, transport=_OwnRoutes(app))


class CollectionTools:
    """The tools over a server's collections; for one event loop. `collection`: the default of
    calls; None: the address names it."""

    def __init__(self, client: AsyncClient, collection: str | None = None) -> None:
        self._client, self._collection = client, collection
        self._calls: set[asyncio.Task[dict[str, Any]]] = set()

    async def collections(self) -> dict[str, Any]:
        """List the collections that `find` searches."""
        return await self._finished(self._collections())

    async def find(
        self,
        query: Query,
        limit: Limit = 10,
        filter: Conditions = None,
        mode: Ranking = None,
        cursor: Cursor = 0,
        *,
        every_chunk: EveryChunk = False,
        neighbours: Beside = None,
        collection: Collection = None,
    ) -> dict[str, Any]:
        """Search a collection by meaning and by words. The best hits come first, each with the
        part of its text around the words of the query, which `highlights` names; `read` gives all
        of it. A document is one hit, and `more` counts its other chunks; where there are fewer
        documents than `limit`, each chunk is a hit."""
        name = self._name(collection)
        options: dict[str, Any] = {
            "limit": limit,
            "offset": cursor,
            "mode": mode,
            "highlights": True,
        }
        if every_chunk:
            options["group_by"] = None
        if neighbours is not None:
            options["neighbours"] = neighbours
        return await self._finished(self._find(name, query, filter, options))

    async def read(
        self,
        document_id: Document,
        chunk: Number = None,
        cursor: First = 0,
        *,
        source: File = None,
        collection: Collection = None,
    ) -> dict[str, Any]:
        """Read a document's chunks in their order, from its beginning or around one chunk. If the
        answer has a `cursor`, there are more. If it has `sources`, several files have a document
        of this id, and the chunks are the first one's."""
        name = self._name(collection)
        work = self._read(
            name,
            document_id,
            source,
            chunk=chunk,
            begin=cursor,
        )
        return await self._finished(work)

    async def store(
        self,
        text: Passage,
        metadata: Metadata = None,
        id: Name = None,
        *,
        collection: Collection = None,
    ) -> dict[str, Any]:
        """Keep a text in a collection, so that `find` finds it. A text that is too long for the
        model is refused."""
        name = self._name(collection)
        return await self._finished(self._store(name, text, metadata or {}, id))

    async def forget(
        self, document_id: Document, *, source: File = None, collection: Collection = None
    ) -> dict[str, Any]:
        """Delete a document with all its chunks, or a kept text by its id: `find` finds it no
        more. If several files have a document of this id, `source` says which."""
        name = self._name(collection)
        return await self._finished(self._forget(name, document_id, source))

    async def close(self) -> None:
        """Wait for the running calls."""
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _name(self, collection: str | None) -> str:
        name = collection or self._collection or COLLECTION.get()
        if not name:
            raise ToolError("`collection` is missing: name one of `collections`")
        return name

    async def _finished(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Return a call's result. The call continues if its client leaves. Raises ToolError."""
        if len(self._calls) >= MAX_CALLS:
            work.close()
            raise ToolError(f"{MAX_CALLS} calls are at work already: try again later")
        task = started(work)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await asyncio.shield(task)
        except HybridTeiError as error:
            raise ToolError(str(error)) from error

    async def _collections(self) -> dict[str, Any]:
        return {"collections": await self._client.collections()}

    async def _find(
        self,
        name: str,
        query: str,
        conditions: dict[str, Any] | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        _check_size("`filter`", conditions, MAX_FILTER_BYTES)
        search = partial(self._client.search, name, query, filter=conditions)
        result = await search(**options)
        count, offset = options["limit"], options["offset"]
        if len(result.hits) < count and not (offset and result.hits):
            # Few documents: their chunks are hits, on the next pages too
            result = await search(**{**options, "group_by": None})
        answer: dict[str, Any] = {"mode": result.mode, "hits": list(map(_entry, result.hits))}
        if len(result.hits) == count:
            answer["cursor"] = offset + count
        if result.note is not None:
            answer["note"] = result.note
        _check_size("the hits", answer, MAX_ANSWER_BYTES)
        return answer

    async def _read(
        self, name: str, document_id: str, source: str | None, *, chunk: int | None, begin: int
    ) -> dict[str, Any]:
        is_own = [{"key": DOCUMENT_ID, "match": {"value": document_id}}]
        if source is not None:
            is_own.append({"key": SOURCE, "match": {"value": source}})
        within = {"gte": begin, "lt": begin + MAX_HITS}
        if chunk is not None:
            within = {"gte": chunk - 1, "lte": chunk + 1}
        search = partial(
            self._client.search,
            name,
            document_id[:MAX_QUERY_CHARACTERS],
            limit=MAX_HITS,
            group_by=None,
        )
        hits = (await search(filter={"must": [*is_own, {"key": CHUNK, "range": within}]})).hits
        has_chunks = bool(hits)
        if not hits and chunk is None:
            # Texts that were not cut have no number
            unnumbered = [*is_own, {"is_empty": {"key": CHUNK}}]
            hits = (await search(filter={"must": unnumbered}, offset=begin)).hits
        sources = sorted({str(hit.payload.get(SOURCE, document_id)) for hit in hits})
        if len(sources) > 1:
            chosen = self._read(
                name,
                document_id,
                sources[0],
                chunk=chunk,
                begin=begin,
            )
            return {**await chosen, "sources": sources}
        if not hits and not begin:
            raise ToolError(f"there is no document {document_id!r}, or no chunk {chunk} of it")
        hits = sorted(hits, key=lambda hit: hit.payload.get(CHUNK, 0))
        page = hits
        # As many as an answer may hold, but one at least
        while len(page) > 1 and _size_of(list(map(_shown, page))) > MAX_ANSWER_BYTES // 2:
            page = page[: len(page) // 2]
        answer: dict[str, Any] = {"chunks": list(map(_shown, page))}
        following, end = begin + len(page), begin + len(hits) + (len(hits) == MAX_HITS)
        if has_chunks:
            following, end = page[-1].payload[CHUNK] + 1, hits[-1].payload.get(CHUNKS, 0)
        if chunk is None and following < end:
            answer["cursor"] = following
        _check_size("the chunks", answer, MAX_ANSWER_BYTES)
        return answer

    async def _store(
        self, name: str, text: str, metadata: dict[str, Any], document_id: str | None
    ) -> dict[str, Any]:
        _check_size("`metadata`", metadata, MAX_METADATA_BYTES)
        stored = await self._client.upsert(
            name, [{"text": text, "metadata": metadata, "id": document_id}], truncate=False
        )
        if stored.failed:
            raise ToolError(stored.failed[0]["error"])
        return {"id": stored.ids[0], "collection": name}

    async def _forget(self, name: str, document_id: str, source: str | None) -> dict[str, Any]:
        return {"deleted": await self._client.delete(name, [document_id], source=source)}


def _shown(hit: SearchHit) -> dict[str, Any]:
    """The payload without what only ingests need, and without a source that is the id."""
    payload = {name: value for name, value in hit.payload.items() if name not in OWN_KEYS}
    if payload.get(SOURCE) == payload.get(DOCUMENT_ID):
        payload.pop(SOURCE, None)
    return payload


def _entry(hit: SearchHit) -> dict[str, Any]:
    """A hit with an excerpt of its text around the heaviest highlight."""
    payload = _shown(hit)
    highlights = hit.highlights or []
    text = payload.get(TEXT)
    if isinstance(text, str) and len(text) > EXCERPT_CHARACTERS:
        best = max(highlights, key=lambda highlight: highlight.weight, default=None)
        middle = 0 if best is None else best.start
        start = max(0, min(middle - EXCERPT_CHARACTERS // 2, len(text) - EXCERPT_CHARACTERS))
        stop = start + EXCERPT_CHARACTERS
        before = "…" if start else ""
        after = "…" if stop < len(text) else ""
        payload[TEXT] = f"{before}{text[start:stop]}{after}"
    words = dict.fromkeys(highlight.text.lower() for highlight in highlights)
    entry = {"score": round(hit.score, 3), "payload": payload, "highlights": list(words)}
    if DOCUMENT_ID not in payload:
        entry["id"] = hit.id
    if hit.more:
        entry["more"] = hit.more
    if hit.passage is not None:
        entry["passage"] = hit.passage
    return entry


def _check_size(what: str, value: Any, most: int) -> None:
    """Raises ToolError for texts that are too large."""
    if (size := _size_of(value)) > most:
        raise ToolError(f"{what} hold {size} bytes > maximum allowed {most}")


class _Server(MCPServer[Any]):
    """The SDK's server, which ignores arguments that a tool does not have; here they are errors."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        tool = self._tool_manager.get_tool(name)
        if tool is not None:
            try:
                check_names(name, arguments, tool.parameters["properties"])
            except TypeError as error:
                raise ToolError(str(error)) from None
        return await super().call_tool(name, arguments, context)


def _size_of(value: Any) -> int:
    return len(orjson.dumps(value, default=str))


def mcp_server(tools: CollectionTools, *, writable: bool) -> MCPServer[Any]:
    """Make the SDK's server of these tools. It has `store` and `forget` only if `writable`."""
    server = _Server(
        "hybridtei",
        version=__version__,
        instructions="Searches collections of documents by meaning and by words.",
        log_level="WARNING",
        subscriptions=False,
    )
    reading = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in (tools.collections, tools.find, tools.read):
        server.add_tool(tool, annotations=reading)
    if writable:
        hints = ToolAnnotations(
            read_only_hint=False,
            destructive_hint=False,
            idempotent_hint=True,
            open_world_hint=False,
        )
        server.add_tool(tools.store, annotations=hints)
        hints = hints.model_copy(update={"destructive_hint": True})
        server.add_tool(tools.forget, annotations=hints)
    return server


def http_app(server: MCPServer[Any], path: str) -> Any:
    """The SDK's ASGI application of a server, for a caller that has checked origin and key."""
    return server.streamable_http_app(
        streamable_http_path=path,
        # The tools remember nothing, and a client could hold all sessions of a server
        stateless_http=True,
        # A tool has one answer, so it needs no stream of events
        json_response=True,
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
