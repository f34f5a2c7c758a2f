"""One evaluation from settings to figures: ingests what is not there yet, opens model and store, shows progress."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tqdm.auto import tqdm

from hybridtei.config import EngineConfig, ModelConfig, StoreConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import StoreError
from hybridtei.evaluate.data import Judged, read_judged
from hybridtei.evaluate.measures import Advance, Evaluation, evaluate, require_measures
from hybridtei.ingest.run import IngestRequest, run_ingest
from hybridtei.search.local import query_model, rank_by
from hybridtei.search.searcher import Searcher
from hybridtei.store.collection import check_name
from hybridtei.store.open import open_store, place_of, with_default

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class EvaluateRequest:
    """What the command was asked. `rerank`: a reranker's folder or hub id."""

    folder: Path
    collection: str
    split: str = "test"
    rerank: str | None = None
    quiet: bool = False


def run_evaluation(
    request: EvaluateRequest, model: ModelConfig, engine: EngineConfig, store: StoreConfig, *, tell: Tell = lambda line: None
) -> Evaluation:
    """Measure a collection, ingested before if it is not there. Raises HybridTeiError or OSError."""
    require_measures()
    check_name(request.collection)
    judged = read_judged(request.folder, request.split)
    store = with_default(store)
    if not asyncio.run(_is_there(store, request.collection)):
        tell(f"{request.collection} is not there yet: ingesting {request.folder}, a point a document")
        # judgements are of whole documents, and published figures of what a model reads of each
        ingesting = IngestRequest(
            str(request.folder), request.collection, chunking=False, quiet=request.quiet, model_named=True
        )
        summary = run_ingest(ingesting, model, engine, store, tell=tell)
        tell(summary.in_words())
        if summary.status:
            raise StoreError("the ingest did not come to its end: run the same command again")
    tell(f"evaluating {request.collection} in {place_of(store)}")
    reranker = None
    if request.rerank is not None:
        reranker = Encoder.load(config=msgspec.structs.replace(model, model_id=request.rerank, revision=None), engine=engine)
    encoder = Encoder.load(config=model, engine=engine)
    return asyncio.run(_evaluate(request, judged, store, encoder=encoder, reranker=reranker, model_id=model.model_id))


async def _is_there(config: StoreConfig, collection: str) -> bool:
    store = open_store(config)
    assert store is not None
    try:
        return await store.describe(collection) is not None and await store.count(collection) > 0
    finally:
        await store.close()


async def _evaluate(
    request: EvaluateRequest,
    judged: Judged,
    config: StoreConfig,
    *,
    encoder: Encoder,
    reranker: Encoder | None,
    model_id: str,
) -> Evaluation:
    store = open_store(config)
    assert store is not None
    try:
        searcher = Searcher(store, query_model(encoder, model_id))
        rank = None if reranker is None else rank_by(reranker)
        with _Bars(len(judged.queries), quiet=request.quiet) as bars:
            return await evaluate(searcher, request.collection, judged, rank=rank, advance=bars.advance)
    finally:
        await store.close()


class _Bars:
    """A bar a mode, one after the other."""

    def __init__(self, queries: int, *, quiet: bool) -> None:
        self._queries, self._quiet = queries, quiet
        self._bar: tqdm[None] | None = None
        self._name = ""
        self.advance: Advance = self._advance

    def _advance(self, name: str, done: int) -> None:
        if name != self._name:
            self.__exit__()
            self._name = name
            self._bar = tqdm(total=self._queries, desc=name, unit="query", disable=self._quiet, file=sys.stderr)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
