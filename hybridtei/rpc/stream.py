"""Reranking. A stream of texts has one answer, when the client has sent its last: the scores of all, the best first.

Each text of a stream is ranked by the query beside it; those with the same query go through the engine together.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any

import numpy as np

from hybridtei.engine.service import in_order
from hybridtei.errors import NoInputs, RequestRefused, UnsupportedHead, WrongModel
from hybridtei.outputs import Floats, Usage
from hybridtei.rpc import messages
from hybridtei.rpc.answers import side, told
from hybridtei.server.api import rerank as ranking
from hybridtei.server.api.rerank import DocumentsRequest, RerankRequest
from hybridtei.server.context import Context, Reply
from hybridtei.server.http.connection import SMALL_BYTES, Unsent
from hybridtei.tasks.classify import best_first
from hybridtei.tasks.rerank import rerank_task

STREAM_PAYLOADS = 16  # so many bodies of --payload-limit bytes may the texts of one stream hold
GROUPS_INSIDE = 64  # queries of one stream that are worked on at once

Decode = Callable[[bytes], Any]


async def rerank(context: Context, message: Any) -> Reply:
    """`Rerank`. Waits for permits."""
    texts = [*message.texts]
    with context.counting_failures():
        if not texts:
            raise NoInputs("`texts` cannot be empty")
        _check(context)
    request = RerankRequest(
        query=message.query,
        texts=texts,
        truncate=message.truncate,
        truncation_direction=side(message),
        raw_scores=message.raw_scores,
        return_text=message.return_text,
    )
    async with context.service.admission.held(len(texts)):
        reply = await ranking.rerank(context, request)
    ranks = [messages.Rank(index=item["index"], text=item.get("text"), score=item["score"]) for item in reply.answer]
    return told(messages.RerankResponse(ranks=ranks).SerializeToString(), reply.usage)


async def rerank_stream(context: Context, requests: AsyncIterator[bytes], decode: Decode) -> Reply:
    """`RerankStream`. Waits for permits: for one before it reads, and then for those of its texts."""
    with context.counting_failures():
        _check(context)
    admission = context.service.admission
    async with admission.gathering:
        with context.counting_failures():
            async with admission.held(1):  # not longer: those who hold one and wait for many would wait for each other
                given = await _collected(context, requests, decode)
        return await _ranked(context, given)


async def _ranked(context: Context, given: Sequence[Any]) -> Reply:
    began_ns = perf_counter_ns()
    groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, message in enumerate(given):
        groups[message.query, message.truncate, message.truncation_direction].append(place)
    starts = (partial(_group, context, [given[place] for place in places], given[0].raw_scores) for places in groups.values())
    parts = await in_order(starts, GROUPS_INSIDE)
    scores = np.empty(len(given), dtype=np.float32)
    for places, (part, _) in zip(groups.values(), parts, strict=True):
        scores[places] = part
    texts = [message.text for message in given] if given[0].return_text else None
    return told(_ranks(scores, texts), replace(Usage.total([usage for _, usage in parts]), began_ns=began_ns))


def _check(context: Context) -> None:
    """Raises WrongModel if the model cannot rank."""
    spec = context.service.model.spec
    try:
        rerank_task(spec, "", []).check(spec)
    except UnsupportedHead as error:
        raise WrongModel("model is not a classifier model" if spec.kind == "embedding" else str(error)) from None


async def _collected(context: Context, requests: AsyncIterator[bytes], decode: Decode) -> list[Any]:
    """All messages. Raises NoInputs; RequestRefused for more than one answer may be about."""
    most, room = context.server.max_rerank_documents, STREAM_PAYLOADS * context.server.payload_limit
    given: list[Any] = []
    async for data in requests:
        given.append(decode(data))
        room -= len(data)
        if len(given) > most:
            raise RequestRefused(f"a stream of more than {most} texts (max-rerank-documents)")
        if room < 0:
            limit = STREAM_PAYLOADS * context.server.payload_limit
            raise RequestRefused(f"a stream of more than {limit} bytes ({STREAM_PAYLOADS} times payload-limit)")
    if not given:
        raise NoInputs("`texts` cannot be empty")
    return given


def _group(context: Context, given: Sequence[Any], raw_scores: bool) -> Coroutine[Any, Any, tuple[Floats, Usage]]:
    """Scores float32[n] of texts with one query, by place."""
    request = DocumentsRequest(
        query=given[0].query,
        documents=[message.text for message in given],
        truncate=given[0].truncate,
        truncation_direction=side(given[0]),
        raw_scores=raw_scores,
    )

    async def work() -> tuple[Floats, Usage]:
        async with context.service.admission.held(len(given)):
            reply = await ranking.rerank_documents(context, request)
        assert reply.usage is not None
        scores = np.empty(len(given), dtype=np.float32)
        for item in reply.answer["results"]:
            scores[item["index"]] = item["relevance_score"]
        return scores, reply.usage

    return work()


def _ranks(scores: Floats, texts: Sequence[str] | None) -> bytes:
    ranks = [
        messages.Rank(index=place, text=None if texts is None else texts[place], score=scores[place])
        for place in best_first(scores).tolist()
    ]
    return bytes(messages.RerankResponse(ranks=ranks).SerializeToString())


UNSENT_BYTES = 16_000_000  # of answers that are ready and wait for the client, or for an earlier one
DEFAULT_PARALLEL = 1024

Answer = Callable[[bytes], Coroutine[Any, Any, bytes]]
Send = Callable[[bytes], Awaitable[None]]
Enter = Callable[[], Awaitable[Callable[[], None]]]
Estimate = Callable[[int], int]  # bytes of a message -> bytes of its answer, about


def parallel_requests() -> int:
    """Most messages of one stream in the works: TEI's variable GRPC_MAX_PARALLEL_STREAM_REQUESTS."""
    given = os.environ.get("GRPC_MAX_PARALLEL_STREAM_REQUESTS", "")
    return max(int(given), 1) if given.isdecimal() else DEFAULT_PARALLEL


class InOrder:
    """One stream. `enter`: waits for leave to begin with a message, and gives what is to be called when it is done. `unsent`:
    counts the answers of all clients."""

    def __init__(
        self,
        answer: Answer,
        enter: Enter,
        unsent: Unsent,
        *,
        most: int,
        estimate: Estimate = lambda _: 0,
        unsent_bytes: int = UNSENT_BYTES,
    ) -> None:
        self._answer = answer
        self._enter = enter
        self._estimate = estimate
        self._of_all = unsent
        self._most = most
        self._most_unsent = unsent_bytes
        self._running: deque[asyncio.Task[bytes]] = deque()
        self._unsent = 0  # bytes of this stream that `_of_all` counts
        self._ended = False
        self._room, self._news = asyncio.Event(), asyncio.Event()

    async def run(self, requests: AsyncIterator[bytes], send: Send) -> None:
        """Until all is answered. Raises what the first message by place raises; nothing runs on then, or if cancelled. Raises
        AnswersUnsent for a message that comes at the bound of all, while this stream holds nothing."""
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while await self._has_more():
                body = await self._running[0]
                await send(body)
                self._running.popleft()
                self._count(-len(body))
                self._room.set()
            await reader
        finally:
            left = [reader, *self._running]
            for task in left:
                task.cancel()
            self._count(-self._unsent)  # now: gRPC cancels a call twice, and the second one may end what is awaited here
            await asyncio.gather(*left, return_exceptions=True)

    def _count(self, size: int) -> None:
        self._unsent += size
        self._of_all.add(size)

    async def _has_more(self) -> bool:
        while not self._running and not self._ended:
            self._news.clear()
            await self._news.wait()
        return bool(self._running)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        try:
            async for data in requests:
                while self._running and self._is_full:
                    self._room.clear()
                    await self._room.wait()
                reserved = await self._reserve(len(data))
                self._begin(data, reserved, await self._enter())
        finally:
            self._ended = True
            self._news.set()

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= self._most or self._unsent >= self._most_unsent or self._of_all.is_full

    async def _reserve(self, size: int) -> int:
        """How many bytes are counted for the answer to a message of `size` bytes, until it is there."""
        self._of_all.check()
        estimate = self._estimate(size)
        if estimate <= SMALL_BYTES:
            return 0
        reserved = await self._of_all.room(estimate)
        self._unsent += reserved
        return reserved

    def _begin(self, data: bytes, reserved: int, leave: Callable[[], None]) -> None:
        task = asyncio.ensure_future(self._one(data, reserved))
        task.add_done_callback(lambda _: leave())  # also if it is cancelled before it began
        self._running.append(task)
        self._news.set()

    async def _one(self, data: bytes, reserved: int) -> bytes:
        body = await self._answer(data)
        self._count(len(body) - reserved)
        return body
