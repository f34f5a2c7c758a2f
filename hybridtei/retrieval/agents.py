"""A server's collection as tools of an agent, over the Model Context Protocol: `find`, `read`, and
`store` if it is allowed.

A call is finished even if the client leaves, so that a text is stored whole. The number of calls is
bounded, and further calls are refused at once. Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

import orjson
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from hybridtei import __version__
from hybridtei.client import AsyncClient
from hybridtei.errors import HybridTeiError
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
Cursor = Annotated[int, Field(ge=0, description="The `cursor` of the answer before: further hits.")]
Document = Annotated[
    str, Field(min_length=1, max_length=1000, description="The `document_id` of a hit.")
]
Number = Annotated[int | None, Field(ge=0, description="The `chunk` of the hit.")]
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
Passage = Annotated[
    str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS, description="The text to keep.")
]
Metadata = Annotated[
    dict[str, Any] | None, Field(description="Facts about the text, for filters: `metadata.NAME`.")
]
Name = Annotated[
    str | None, Field(max_length=1000, description="A later text of the same id replaces this one.")
]


class CollectionTools:
    """The tools over one collection; for one event loop."""

    def __init__(self, client: AsyncClient, collection: str) -> None:
        self._client, self._collection = client, collection
        self._calls: set[asyncio.Task[dict[str, Any]]] = set()

    async def find(
        self,
        query: Query,
        limit: Limit = 10,
        filter: Conditions = None,
        mode: Ranking = None,
        cursor: Cursor = 0,
    ) -> dict[str, Any]:
        """Search the collection by meaning and by words. The best hits come first, each with the
        part of its text around the words of the query, which `highlights` names; `read` gives all
        of it."""
        return await self._finished(self._find(query, limit, filter, mode, cursor))

    async def read(self, document_id: Document, chunk: Number = None) -> dict[str, Any]:
        """Read a hit's text in full, with the chunks before and after it."""
        return await self._finished(self._read(document_id, chunk))

    async def store(
        self, text: Passage, metadata: Metadata = None, id: Name = None
    ) -> dict[str, Any]:
        """Keep a text in the collection, so that `find` finds it. A text that is too long for the
        model is refused."""
        return await self._finished(self._store(text, metadata or {}, id))

    async def close(self) -> None:
        """Wait for the running calls."""
        await asyncio.gather(*self._calls, return_exceptions=True)

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

    async def _find(
        self,
        query: str,
        limit: int,
        conditions: dict[str, Any] | None,
        mode: Mode | None,
        cursor: int,
    ) -> dict[str, Any]:
        _check_size("`filter`", conditions, MAX_FILTER_BYTES)
        result = await self._client.search(
            self._collection,
            query,
            filter=conditions,
            limit=limit,
            offset=cursor,
            mode=mode,
            highlights=True,
        )
        answer: dict[str, Any] = {"mode": result.mode, "hits": list(map(_entry, result.hits))}
        if len(result.hits) == limit:
            answer["cursor"] = cursor + limit
        _check_size("the hits", answer, MAX_ANSWER_BYTES)
        return answer

    async def _read(self, document_id: str, chunk: int | None) -> dict[str, Any]:
        conditions: list[dict[str, Any]] = [
            {"key": DOCUMENT_ID, "match": {"value": document_id}},
        ]
        if chunk is not None:
            conditions.append({"key": CHUNK, "range": {"gte": chunk - 1, "lte": chunk + 1}})
        result = await self._client.search(
            self._collection,
            document_id[:MAX_QUERY_CHARACTERS],
            filter={"must": conditions},
            limit=MAX_HITS,
            group_by=None,
        )
        chunks = sorted(map(_shown, result.hits), key=lambda payload: payload.get(CHUNK, 0))
        if not chunks:
            raise ToolError(f"there is no document {document_id!r}, or no chunk {chunk} of it")
        answer = {"chunks": chunks}
        _check_size("the chunks", answer, MAX_ANSWER_BYTES)
        return answer

    async def _store(self, text: str, metadata: dict[str, Any], name: str | None) -> dict[str, Any]:
        _check_size("`metadata`", metadata, MAX_METADATA_BYTES)
        stored = await self._client.upsert(
            self._collection, [{"text": text, "metadata": metadata, "id": name}], truncate=False
        )
        if stored.failed:
            raise ToolError(stored.failed[0]["error"])
        return {"id": stored.ids[0], "collection": self._collection}


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
        ends = ("…" if start else "", "…" if stop < len(text) else "")
        payload[TEXT] = text[start:stop].join(ends)
    words = dict.fromkeys(highlight.text.lower() for highlight in highlights)
    entry = {"score": round(hit.score, 3), "payload": payload, "highlights": list(words)}
    if DOCUMENT_ID not in payload:
        entry["id"] = hit.id
    return entry


def _check_size(what: str, value: Any, most: int) -> None:
    """Raises ToolError for texts that are too large."""
    if (size := len(orjson.dumps(value, default=str))) > most:
        raise ToolError(f"{what} hold {size} bytes > maximum allowed {most}")


def mcp_server(tools: CollectionTools, collection: str, *, writable: bool) -> MCPServer[Any]:
    """Make the SDK's server of these tools. It has `store` only if `writable`."""
    server: MCPServer[Any] = MCPServer(
        "hybridtei",
        version=__version__,
        instructions=f"Searches the collection {collection!r} by meaning and by words.",
        log_level="WARNING",
        subscriptions=False,
    )
    server.add_tool(
        tools.find, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False)
    )
    server.add_tool(
        tools.read, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False)
    )
    if writable:
        hints = ToolAnnotations(
            read_only_hint=False,
            destructive_hint=False,
            idempotent_hint=True,
            open_world_hint=False,
        )
        server.add_tool(tools.store, annotations=hints)
    return server
