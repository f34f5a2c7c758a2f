"""Search in this process without a server: an `Encoder` is the model or the reranker of a
`Searcher`."""

from __future__ import annotations

from copy import copy
from types import TracebackType
from typing import Self

from hybridtei.config import StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput
from hybridtei.retrieval.search.options import SearchOptions, SearchResult
from hybridtei.retrieval.search.searcher import Searcher
from hybridtei.retrieval.store import open_store, with_default
from hybridtei.retrieval.store.base import Store
from hybridtei.system.own_loop import OwnLoop


def query_model(encoder: Encoder, model_id: str) -> Encoder:
    """Return an encoder as the model of a search. `model_id`: the same as when the documents were
    embedded."""
    named = copy(encoder)
    named.model_id = model_id
    return named


def rank_by(encoder: Encoder) -> Encoder:
    """Return a loaded reranker as the last stage of a search. Raises InvalidInput for another kind
    of model."""
    if encoder.spec.role != "reranker":
        raise InvalidInput(
            f"the model is a {encoder.spec.role}, not a reranker; `rescore` ranks by multi-vectors"
        )
    return encoder


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
        self._ranker = None if reranker is None else rank_by(reranker)
        self._loop = loop or OwnLoop()

    def __call__(
        self, collection: str, query: str, options: SearchOptions | None = None
    ) -> SearchResult:
        """Search like `Searcher.search`."""
        searching = self._searcher.search(
            collection,
            query,
            options,
            ranker=self._ranker,
        )
        return self._loop.run(searching)

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
