"""Search in this process, without a server: an `Encoder` becomes what a `Searcher` asks, and a rank function.

The encoder blocks, so it runs in a thread, one call at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from types import TracebackType
from typing import Self

import numpy as np

from hybridtei.batch import Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.config import EngineConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput
from hybridtei.load import text_model
from hybridtei.outputs import Embeddings, Floats
from hybridtei.search.searcher import Found, QueryModel, Rank, Searcher, SearchOptions
from hybridtei.store.base import Store
from hybridtei.store.default_store import with_default
from hybridtei.store.own_loop import OwnLoop
from hybridtei.store.stores import open_store
from hybridtei.text.tokenizer import Token, Tokenizer


def query_model(encoder: Encoder, model_id: str) -> QueryModel:
    """An encoder as the model of a search; `model_id`: as it was when documents were embedded."""
    alone = asyncio.Lock()

    async def embed(queries: Sequence[str], heads: frozenset[Head]) -> Embeddings:
        async with alone:
            return await asyncio.to_thread(encoder.encode, list(queries), sorted(heads), input_type="query")

    return QueryModel(model_id, encoder.spec, embed, tokens_of=_Tokens(encoder.spec))


class _Tokens:
    """A text's tokens with their places, without prompts. The tokenizer is read when first needed."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return text_model(self._spec, EngineConfig()).reader.tokenizer

    def __call__(self, text: str) -> Sequence[Token]:
        read = text.lower() if self._spec.lowercase else text
        return self._tokenizer.tokens([read], add_special_tokens=False)[0]


def rank_by(encoder: Encoder) -> Rank:
    """A loaded reranker as the last stage of a search. Raises InvalidInput if the model is none."""
    if encoder.spec.kind != "reranker":
        raise InvalidInput(f"the model is a {encoder.spec.kind}, not a reranker; `rescore` ranks by multi-vectors")
    alone = asyncio.Lock()

    async def rank(query: str, documents: Sequence[str]) -> Floats:
        async with alone:
            ranked = await asyncio.to_thread(encoder.rerank, query, documents)
        scores = np.zeros(len(documents), np.float32)
        scores[[one.index for one in ranked]] = [one.score for one in ranked]
        return scores

    return rank


class LocalSearch:
    """Searches from plain code; it owns the store, and a thread with an event loop in which both work.

    So it also works in a notebook, or inside a coroutine, whose loop stands still until the answer is there: there, rather
    `await Searcher(store, query_model(encoder, model_id)).search(…)`.

    >>> with LocalSearch(Encoder.load(), "minilm-hybrid") as search:   # doctest: +SKIP
    ...     search("papers", "lift of a thin wing").hits[0].payload["text"]
    """

    def __init__(
        self, encoder: Encoder, model_id: str, store: Store | StoreConfig | None = None, *, reranker: Encoder | None = None
    ) -> None:
        """`store`: an open one, or where it is; by default the folder `./qdrant`."""
        if store is None or isinstance(store, StoreConfig):
            opened = open_store(with_default(store or StoreConfig()))
            assert opened is not None
            store = opened
        self.store = store
        self._searcher = Searcher(store, query_model(encoder, model_id))
        self._rank = None if reranker is None else rank_by(reranker)
        self._loop = OwnLoop()

    def __call__(self, collection: str, query: str, options: SearchOptions | None = None) -> Found:
        """See `Searcher.search`."""
        return self._loop.run(self._searcher.search(collection, query, options, rank=self._rank))

    def close(self) -> None:
        """Close the store."""
        try:
            self._loop.run(self.store.close())
        finally:
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
