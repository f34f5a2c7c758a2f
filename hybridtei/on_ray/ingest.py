"""An ingest's reading and embedding on Ray; the driver writes, so one process has the store, the ledger, the quarantine.

Knows no store. What comes out is what one process would have made, in an order that the writer may rely on: within a reader,
the source's. One writer also for a Qdrant server: the ledger says what is stored in the order in which it was, and a batch of
vectors costs a hundred times more to make than to send.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

from hybridtei.batch import Head
from hybridtei.checkpoint.vocabularies import read_raw
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import BackendError, HybridTeiError, InvalidInput
from hybridtei.ingest.chunking import Chunker, ChunkSettings, Rejection
from hybridtei.ingest.files import SourceFile
from hybridtei.ingest.ledger import FinishedFile, Ledger, Quarantine, StoredDocument
from hybridtei.ingest.options import IngestStats
from hybridtei.ingest.prepare import Batch, Preparation
from hybridtei.ingest.records import ReadOptions
from hybridtei.load import find_model, text_model
from hybridtei.on_ray.blocks import BatchMessage, Receiver, Vectors, in_order, message_of
from hybridtei.on_ray.cluster import join
from hybridtei.outputs import Embeddings
from hybridtei.system.machine import require_extra

MAX_WORKERS = 10_000
Block = tuple[BatchMessage, Vectors]


def check(workers: int | None) -> None:
    """Raise InvalidInput for a number of workers that cannot be, LoadError without Ray."""
    if workers is not None and not 1 <= workers <= MAX_WORKERS:
        raise InvalidInput(f"--ray-workers is {workers}, should be between 1 and {MAX_WORKERS}")
    require_extra("ray", "ray")


class RayPipeline:
    """See `ingest.pipeline.Pipeline`. `workers`: actors, of a processor and an engine each; None: as many as the cluster has.

    Raises InvalidInput, LoadError without Ray, ConnectionError where no cluster answers. Make it in the main thread.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        heads: frozenset[Head],
        *,
        workers: int | None = None,
        address: str | None = None,
    ) -> None:
        check(workers)
        from hybridtei.system.machine import available_cores

        self._leave = join(address, workers or available_cores())
        self._workers = workers or _processors()
        self._model, self._engine = model, engine
        self.heads = heads
        self.name = f"Ray, {self._workers} workers of one processor"

    async def embedded(
        self, preparation: Preparation, asked_to_stop: asyncio.Event
    ) -> AsyncGenerator[tuple[Batch, Embeddings, list[str | None]]]:
        """See `ingest.pipeline.Pipeline`. Raises BackendError where the engines fail, or Ray gives up on a block."""
        files = preparation.files
        groups = split_files(files, self._workers)
        received = [Receiver(group) for group in groups]
        done_bytes = [0] * len(groups)
        complete = [False] * len(groups)
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="ray") as thread:
            blocks = in_order(self._arrivals(preparation, groups))
            try:
                while not asked_to_stop.is_set():
                    block = await loop.run_in_executor(thread, _next, blocks)
                    if block is None:
                        break
                    reader, (message, vectors) = block
                    _note(preparation, message)
                    batch = received[reader].batch(message)
                    done_bytes[reader], complete[reader] = batch.done_bytes, message.is_last
                    batch.done_bytes = sum(done_bytes)
                    yield batch, *vectors
            finally:
                await loop.run_in_executor(thread, blocks.close)
        if not asked_to_stop.is_set() and not all(complete):
            raise BackendError("Ray ended before all was read: run the same command again to go on")

    def close(self) -> None:
        """Leave the cluster; one of our own ends."""
        self._leave()

    def _arrivals(self, preparation: Preparation, groups: list[list[SourceFile]]) -> Iterator[tuple[int, int, Block]]:
        from hybridtei.on_ray.dataset import arrivals

        stored, finished = stored_documents(preparation.ledger), preparation.finished_files()
        snapshots = [(group, LedgerSnapshot(stored, _of(group, finished))) for group in groups]
        config = ReaderConfig(
            self._model, self._engine, preparation.options, preparation.chunker.settings, preparation.settings
        )
        return arrivals(config, snapshots, self.heads, self._workers)


def _of(files: list[SourceFile], finished: Mapping[str, FinishedFile]) -> dict[str, FinishedFile]:
    return {file.label: finished[file.label] for file in files if file.label in finished}


def _processors() -> int:
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _note(preparation: Preparation, message: BatchMessage) -> None:
    """Adds the reader's counts and rejections."""
    preparation.stats.skipped += message.skipped
    preparation.stats.files += message.files_begun
    preparation.stats.unclear += message.unclear
    preparation.missing.extend(message.missing)
    for rejected in message.rejected:
        preparation.quarantine.add(rejected)


def _next(blocks: Iterator[tuple[int, Block]]) -> tuple[int, Block] | None:
    """Raises what an actor raised, where it is of ours, else BackendError."""
    try:
        return next(blocks, None)
    except HybridTeiError:
        raise
    except Exception as error:
        raise _ours(error) or BackendError(f"Ray gave up: {error}".strip().splitlines()[0]) from error


def _ours(error: BaseException | None) -> HybridTeiError | None:
    """The error of this package within those that Ray wraps around it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, HybridTeiError):
            return error
        seen.add(id(error))
        error = getattr(error, "cause", None) or error.__cause__
    return None


@dataclass(frozen=True, slots=True)
class ReaderConfig:
    """How sources become batches; `settings` as in `Preparation`."""

    model: ModelConfig
    engine: EngineConfig
    options: ReadOptions
    chunks: ChunkSettings
    settings: bytes


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """A ledger's entries when the ingest began: of all documents, and of the files of one reader."""

    documents: Mapping[str, StoredDocument]
    files: Mapping[str, FinishedFile]

    def stored_keys(self) -> Collection[str]:
        return self.documents.keys()

    def get(self, key: str) -> StoredDocument | None:
        return self.documents.get(key)

    def finished(self, file: SourceFile, settings: bytes) -> FinishedFile | None:
        return self.files.get(file.label)


class Rejections:
    """A reader's rejections until they are sent."""

    def __init__(self) -> None:
        self._pending: list[Rejection] = []

    def add(self, rejected: Rejection) -> None:
        self._pending.append(rejected)

    def taken(self) -> list[Rejection]:
        """The rejections since the last call."""
        taken, self._pending = self._pending, []
        return taken


def stored_documents(ledger: Ledger) -> dict[str, StoredDocument]:
    """All documents of a ledger."""
    return {key: stored for key, _ in ledger.items() if (stored := ledger.get(key)) is not None}


def split_files(files: Sequence[SourceFile], readers: int) -> list[list[SourceFile]]:
    """The files in at most so many runs of about as many bytes, in order, none empty; the same for the same files."""
    total, before, groups = max(1, sum(file.size for file in files)), 0, dict[int, list[SourceFile]]()
    for file in files:
        groups.setdefault(min(readers - 1, before * readers // total), []).append(file)
        before += file.size
    return list(groups.values())


def blocks(config: ReaderConfig, files: Sequence[SourceFile], snapshot: LedgerSnapshot) -> Iterator[BatchMessage]:
    """The batches of a reader, in order; the last one says so, and may hold nothing else."""
    spec = find_model(config.model)
    raw = read_raw(spec.folder)
    chunker = Chunker(text_model(spec, config.engine), raw, config.chunks)
    rejections, stats = Rejections(), IngestStats()
    preparation = Preparation(
        files=files,
        options=config.options,
        chunker=chunker,
        ledger=cast(Ledger, snapshot),  # both are only read
        quarantine=cast(Quarantine, rejections),
        settings=config.settings,
        stats=stats,
    )
    try:
        yield from _counted(preparation, rejections)
    finally:
        chunker.close()


def _counted(preparation: Preparation, rejections: Rejections) -> Iterator[BatchMessage]:
    stats, before = preparation.stats, IngestStats()

    def taken(batch: Batch, *, is_last: bool = False) -> BatchMessage:
        nonlocal before
        since, before = before, replace(stats)
        missing = list(preparation.missing)
        preparation.missing.clear()
        return message_of(
            batch,
            preparation.files,
            rejections.taken(),
            skipped=stats.skipped - since.skipped,
            files_begun=stats.files - since.files,
            missing=missing,
            unclear=stats.unclear - since.unclear,
            is_last=is_last,
        )

    for batch in preparation.batches():
        yield taken(batch)
    yield taken(Batch(done_bytes=preparation.total_bytes), is_last=True)
