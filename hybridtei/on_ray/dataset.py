"""Readers and encoders as a Ray Data pipeline: blocks of one row, which is one batch of chunks; actors that hold an `Encoder`.

Ray Data starts actors again that died and gives their blocks to the next one; its rows are numbered, so the driver knows what
is missing and what came twice. It joins small blocks until they hold 128 MB, which would be one block for one
actor; with a target of one byte, each row stays a block. A text may end its actor's process: see `attempts`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import ray
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridtei.batch import Head
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.ingest.files import SourceFile
from hybridtei.on_ray.blocks import (
    MAX_TRIES,
    Attempts,
    BatchMessage,
    Vectors,
    decode_batch,
    decode_vectors,
    embed_block,
    encode_batch,
    encode_vectors,
)
from hybridtei.on_ray.cluster import limit_threads
from hybridtei.on_ray.ingest import LedgerSnapshot, ReaderConfig, blocks
from hybridtei.outputs import Embeddings

READER, NUMBER, BATCH, VECTORS = "reader", "number", "batch", "vectors"
AHEAD = 2  # blocks that an actor has beside the one in hand
PROCESSORS = 1  # of an actor
Arrival = tuple[int, int, tuple[BatchMessage, Vectors]]


class Sources(Datasource):  # type: ignore[misc]
    """A read task for each share of the files."""

    def __init__(self, config: ReaderConfig, shares: Sequence[tuple[list[SourceFile], LedgerSnapshot]]) -> None:
        super().__init__()
        self._tasks = [partial(_tables, config, number, *_by_reference(share)) for number, share in enumerate(shares)]

    def estimate_inmemory_data_size(self) -> int | None:
        """See `Datasource`: nobody knows."""
        return None

    def get_read_tasks(self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None) -> list[Any]:
        """See `Datasource`; always as many, whatever parallelism is thought good."""
        unknown = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        return [ReadTask(task, unknown) for task in self._tasks]


def _by_reference(share: tuple[list[SourceFile], LedgerSnapshot]) -> tuple[list[SourceFile], Any]:
    """What a ledger knows may be large, and Ray copies the arguments of a task several times."""
    files, snapshot = share
    return files, ray.put(snapshot)


def _tables(config: ReaderConfig, reader: int, files: list[SourceFile], snapshot: Any) -> Iterator[pa.Table]:
    for number, block in enumerate(blocks(config, files, ray.get(snapshot))):
        yield pa.table({READER: [reader], NUMBER: [number], BATCH: pa.array([encode_batch(block)], pa.large_binary())})


class Embedding:
    """An actor's work: it holds the engine, and gives each batch its vectors."""

    def __init__(self, model: ModelConfig, engine: EngineConfig, heads: frozenset[Head], attempts: Any) -> None:
        limit_threads(PROCESSORS)  # before anything counts them
        from hybridtei.encoder import Encoder

        encoder = Encoder.load(config=model, engine=engine)
        self._encode = partial(encoder.encode, outputs=heads, input_type="document")
        self._attempts = _Remote(attempts)

    def __call__(self, table: pa.Table) -> pa.Table:
        """A row with its batch -> the row with vectors too."""
        names = zip(table[READER].to_pylist(), table[NUMBER].to_pylist(), strict=True)
        rows = [
            encode_vectors(self._vectors(name, decode_batch(row.as_py())))
            for name, row in zip(names, table[BATCH], strict=True)
        ]
        return table.append_column(VECTORS, pa.array(rows, pa.large_binary()))

    def _vectors(self, name: tuple[int, int], block: BatchMessage) -> Vectors:
        return embed_block(self._attempts, name, self._encode, block.texts) if block.texts else (Embeddings(), [])


class _Remote:
    """`Attempts` in an actor of their own, which outlives those that embed. Every call waits until it is noted."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def begin(self, block: tuple[int, int]) -> tuple[int, list[int]]:
        begun: tuple[int, list[int]] = ray.get(self._actor.begin.remote(block))
        return begun

    def note(self, block: tuple[int, int], place: int) -> None:
        ray.get(self._actor.note.remote(block, place))

    def end(self, block: tuple[int, int]) -> None:
        ray.get(self._actor.end.remote(block))


def arrivals(
    config: ReaderConfig,
    shares: Sequence[tuple[list[SourceFile], LedgerSnapshot]],
    heads: frozenset[Head],
    workers: int,
) -> Iterator[Arrival]:
    """(reader, number, what it is) of every block, in no order, embedded by so many actors. Raises what Ray raises."""
    data = _quietly(lambda: _pipeline(config, shares, heads, workers))
    for table in data.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
        for row in table.to_pylist():
            yield row[READER], row[NUMBER], (decode_batch(row[BATCH]), decode_vectors(row[VECTORS]))


def _pipeline(
    config: ReaderConfig, shares: Sequence[tuple[list[SourceFile], LedgerSnapshot]], heads: frozenset[Head], workers: int
) -> ray.data.Dataset:
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    attempts = ray.remote(num_cpus=0, scheduling_strategy=here)(Attempts).remote()
    context = ray.data.DataContext.get_current().copy()
    context.target_max_block_size = 1
    context.enable_progress_bars = False
    with ray.data.DataContext.current(context):
        source = ray.data.read_datasource(
            Sources(config, shares), num_cpus=0, scheduling_strategy=here, override_num_blocks=len(shares)
        )
        return source.map_batches(
            Embedding,
            fn_constructor_args=(config.model, config.engine, heads, attempts),
            batch_size=None,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1 + AHEAD),
            num_cpus=PROCESSORS,
            max_restarts=-1,
            max_task_retries=MAX_TRIES - 1,
        )


def _quietly(work: Callable[[], Any]) -> Any:
    """Without what Ray Data says of itself: notices of what it will drop one day, and how a run went."""
    for name in ("ray.data", "ray.data._internal.execution.streaming_executor"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return work()
