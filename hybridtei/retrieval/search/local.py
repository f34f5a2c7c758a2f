"""Search in this process without a server: an `Encoder` is the model or the reranker of a
`Searcher`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import cache
from types import TracebackType
from typing import Self

import numpy as np

from hybridtei.batch import Head
from hybridtei.config import EngineConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput
from hybridtei.inference.load import text_model
from hybridtei.models.fingerprint import begin, model_hash
from hybridtei.models.text.tokenizer import Token, Tokenizer
from hybridtei.outputs import Embeddings, Floats
from hybridtei.retrieval.search.options import SearchOptions, SearchResult
from hybridtei.retrieval.search.searcher import NamedRank, QueryModel, Rank, Searcher
from hybridtei.retrieval.store import open_store, with_default
from hybridtei.retrieval.store.base import Store
from hybridtei.system.own_loop import OwnLoop


def query_model(encoder: Encoder, model_id: str) -> QueryModel:
    """Use an encoder as the model of a search. `model_id`: the same as when the documents were
    embedded."""

    # A function, since the fingerprint is read when first needed
    @cache
    def tokenizer() -> Tokenizer:
        return text_model(encoder.spec, EngineConfig()).reader.tokenizer

    def tokens_of(text: str) -> Iterable[Token]:
        return tokenizer().tokens(text, add_special_tokens=False)

    async def look_up(queries: Sequence[str]) -> Embeddings:
        return await encoder.aencode(
            list(queries), ("sparse",), input_type="query", query_encoder="table"
        )

    async def files() -> str | None:
        return await model_hash(begin(encoder, encoder.spec))

    async def embed(queries: Sequence[str], heads: frozenset[Head]) -> Embeddings:
        return await encoder.aencode(list(queries), sorted(heads), input_type="query")

    return QueryModel(model_id, encoder.spec, embed, tokens_of, look_up=look_up, fingerprint=files)


def rank_by(encoder: Encoder) -> Rank:
    """Use a loaded reranker as the last stage of a search. Raises InvalidInput for another kind of
    model."""
    if encoder.spec.kind != "reranker":
        raise InvalidInput(
            f"the model is a {encoder.spec.kind}, not a reranker; `rescore` ranks by multi-vectors"
        )
    lock = asyncio.Lock()

    async def rank(query: str, documents: Sequence[str]) -> Floats:
        async with lock:
            ranked = await asyncio.to_thread(encoder.rerank, query, documents)
        scores = np.zeros(len(documents), np.float32)
        scores[[document.index for document in ranked]] = [document.score for document in ranked]
        return scores

    return NamedRank(encoder.model_id, rank)


class LocalSearch:
    """Searches from synchronous code. It owns the store, and a thread with the event loop of store
    and search. `Index.open` replaces it; version 0.4 removes this name.

    It also works in a notebook or inside a coroutine, but blocks the caller's event loop until the
    result is there. In a coroutine prefer `await Searcher(store, query_model(encoder,
    model_id)).search(…)`.

    >>> with LocalSearch(Encoder.load(), "minilm-hybrid") as search:   # doctest: +SKIP
    ...     search("notes", "how do I rotate the keys").hits[0].payload["text"]
    """

    def __init__(
        self,
        encoder: Encoder,
        model_id: str,
        store: Store | StoreConfig | None = None,
        *,
        reranker: Encoder | None = None,
        loop: OwnLoop | None = None,
    ) -> None:
        """`store`: an open store, or its settings; default: the folder `./qdrant`. `loop`: the loop
        that already runs the store's client."""
        if store is None or isinstance(store, StoreConfig):
            opened = open_store(with_default(store or StoreConfig()))
            assert opened is not None
            store = opened
        self.store = store
        self._searcher = Searcher(store, query_model(encoder, model_id))
        self._rank = None if reranker is None else rank_by(reranker)
        self._loop = loop or OwnLoop()

    def __call__(
        self, collection: str, query: str, options: SearchOptions | None = None
    ) -> SearchResult:
        """Search like `Searcher.search`."""
        return self._loop.run(self._searcher.search(collection, query, options, rank=self._rank))

    def close(self) -> None:
        """Close the store and end the thread. A second call does nothing."""
        try:
            if self._loop.is_open:
                self._loop.run(self.store.close())
        finally:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
