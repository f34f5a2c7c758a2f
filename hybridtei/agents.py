"""A collection as tools of an agent, over the Model Context Protocol: `find`, and `store` where that is allowed.

Calls of the tools are finished even if the client leaves: a pass in a thread cannot be stopped, and what is stored should be
stored whole. So they are bounded, and one call too many is refused at once. Needs the extra `mcp`.
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
from hybridtei.batch import EMBEDDINGS
from hybridtei.encoder import Encoder
from hybridtei.errors import HybridTeiError, InvalidPoint, UnknownCollection
from hybridtei.ingest.chunking import DOCUMENT_ID, METADATA, TEXT
from hybridtei.search.local import query_model
from hybridtei.search.options import Mode, SearchOptions
from hybridtei.search.query import filter_from
from hybridtei.search.searcher import Searcher
from hybridtei.store import CollectionPlan
from hybridtei.store.base import CollectionSchema, PayloadBudget, Store
from hybridtei.store.collection import CollectionSchemas, common_heads
from hybridtei.store.plan import budget_of_plan, plan_of, planned_schema, settled, signed
from hybridtei.store.points import check_points, fit_to_schema, point_id, to_points

MAX_CALLS = 32  # at work or waiting for the model
MAX_HITS = 50
MAX_QUERY_CHARACTERS = 10_000
MAX_TEXT_CHARACTERS = 1_000_000
MAX_METADATA_BYTES = 100_000
MAX_ANSWER_BYTES = 1_000_000  # of payloads: all of an answer is read by a language model

Query = Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARACTERS, description="What to look for, in plain words.")]
Limit = Annotated[int, Field(ge=1, le=MAX_HITS, description="How many hits at most.")]
Conditions = Annotated[
    dict[str, Any] | None,
    Field(description='Qdrant\'s filter of payloads, as {"must": [{"key": "metadata.year", "match": {"value": 2024}}]}.'),
]
Ranking = Annotated[Mode | None, Field(description="How hits are found and scored; by default all kinds of vectors together.")]
Passage = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS, description="The text to keep.")]
Metadata = Annotated[dict[str, Any] | None, Field(description="Facts about the text, for filters: `metadata.NAME`.")]
Name = Annotated[str | None, Field(max_length=1000, description="A later text of the same id replaces this one.")]


class CollectionTools:
    """The tools over one collection; for one event loop."""

    def __init__(self, encoder: Encoder, model_id: str, store: Store, collection: str) -> None:
        self._encoder, self._model_id, self._store, self._collection = encoder, model_id, store, collection
        self._schemas = CollectionSchemas(store)
        self._model = query_model(encoder, model_id)
        self._writing = asyncio.Lock()
        self._calls: set[asyncio.Task[dict[str, Any]]] = set()

    async def find(
        self,
        query: Query,
        limit: Limit = 10,
        filter: Conditions = None,
        mode: Ranking = None,
    ) -> dict[str, Any]:
        """Search the collection by meaning and by words. The best hits come first; `highlights` mark the shared terms."""
        return await self._finished(self._find(query, limit, filter, mode))

    async def store(self, text: Passage, metadata: Metadata = None, id: Name = None) -> dict[str, Any]:
        """Keep a text in the collection, so that `find` finds it. A text that is too long for the model is refused."""
        return await self._finished(self._store_text(text, metadata or {}, id))

    async def close(self) -> None:
        """Wait for the calls at work, and close the store."""
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._store.close()

    async def _finished(self, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """The result of a call, which goes on if its client leaves. Raises ToolError."""
        if len(self._calls) >= MAX_CALLS:
            work.close()
            raise ToolError(f"{MAX_CALLS} calls are at work already: try again later")
        task = asyncio.create_task(work)
        self._calls.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except HybridTeiError as error:
            raise ToolError(str(error)) from error

    def _ended(self, task: asyncio.Task[dict[str, Any]]) -> None:
        self._calls.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, whether or not its client is still there

    async def _find(self, query: str, limit: int, conditions: dict[str, Any] | None, mode: Mode | None) -> dict[str, Any]:
        options = SearchOptions(limit=limit, mode=mode, query_filter=filter_from(conditions), highlights=True)
        budget = PayloadBudget(MAX_ANSWER_BYTES)
        found = await Searcher(self._store, self._model, schemas=self._schemas, budget=budget).search(
            self._collection, query, options
        )
        fields = found.as_dict()
        return {"mode": fields["mode"], "hits": fields["hits"]}

    async def _store_text(self, text: str, metadata: dict[str, Any], name: str | None) -> dict[str, Any]:
        if not text.strip():
            raise InvalidPoint("`text` is empty")
        size = len(orjson.dumps(metadata, default=str))
        if size > MAX_METADATA_BYTES:
            raise InvalidPoint(f"`metadata` holds {size} bytes > maximum allowed {MAX_METADATA_BYTES}")
        payload = {TEXT: text, DOCUMENT_ID: name or point_id(text, 0), **({METADATA: metadata} if metadata else {})}
        async with self._writing:  # one pass at a time, and a collection is made once
            identity = point_id(name or text, 0)
            while not await self._stored(identity, text, payload):
                pass  # a migration has switched the collection's name meanwhile
        return {"id": identity, "collection": self._collection}

    async def _stored(self, identity: str, text: str, payload: dict[str, Any]) -> bool:
        schema = await self._schema()
        heads = common_heads(schema, self._encoder.spec)
        budget = budget_of_plan(plan_of(schema))
        embedded = await asyncio.to_thread(
            self._encoder.encode, [text], sorted(heads), input_type="document", multivector=budget, truncate=False
        )
        points = check_points(to_points(fit_to_schema(embedded, schema), [identity], [payload]), schema)
        return await self._schemas.upsert(self._collection, schema, points)

    async def _schema(self) -> CollectionSchema:
        """The collection's, which is made where it is not there. Raises CollectionMismatch."""
        try:
            return await Searcher(self._store, self._model, schemas=self._schemas).schema(self._collection)
        except UnknownCollection:
            spec = self._encoder.spec
            heads = spec.heads & EMBEDDINGS
            width = 0 if spec.multivector is None else spec.multivector.dim
            plan = settled(CollectionPlan(), None, heads, self._collection, width=width)
            planned = await asyncio.to_thread(signed, planned_schema(plan, spec, self._model_id, heads), spec)
            await self._schemas.create(self._collection, planned)
            return await self._schemas.of(self._collection)


def mcp_server(tools: CollectionTools, collection: str, *, writable: bool) -> MCPServer[Any]:
    """The SDK's server of these tools; `store` is not among them unless `writable`."""
    server: MCPServer[Any] = MCPServer(
        "hybridtei",
        version=__version__,
        instructions=f"Searches the collection {collection!r} by meaning and by words.",
        log_level="WARNING",
        subscriptions=False,
    )
    server.add_tool(tools.find, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))
    if writable:
        hints = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
        server.add_tool(tools.store, annotations=hints)
    return server
