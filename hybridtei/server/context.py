"""What handlers share: the engine, the settings, the counters; and the one way a request goes through the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any

from hybridtei.batch import Head
from hybridtei.config import ModelConfig, ServerConfig
from hybridtei.engine.service import Answered, EngineService
from hybridtei.errors import HybridTeiError
from hybridtei.metrics import Registry
from hybridtei.outputs import Embeddings
from hybridtei.server.errors import RequestRefused
from hybridtei.server.observe import RequestMetrics, Usage, usage_of
from hybridtei.server.wire.tei import Inputs
from hybridtei.tasks.embed import Embed

OFFLOAD_NUMBERS = 200_000  # an answer of more numbers is written outside the event loop


@dataclass(frozen=True, slots=True)
class Reply:
    """A body of JSON, and what it cost where that is told."""

    body: bytes
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Context:
    """One served model behind one HTTP server."""

    service: EngineService
    server: ServerConfig
    model: ModelConfig
    registry: Registry
    metrics: RequestMetrics

    @property
    def served_name(self) -> str:
        return self.server.served_model_name or self.model.model_id

    @property
    def is_splade(self) -> bool:
        return self.service.model.spec.is_splade

    @property
    def heads(self) -> frozenset[Head]:
        return self.service.model.spec.heads

    def truncate(self, wanted: bool | None) -> bool:
        """The request's wish, or the server's default."""
        return self.service.config.auto_truncate if wanted is None else wanted

    def check_batch(self, inputs: int) -> None:
        """Raises RequestRefused if a request holds too many inputs."""
        limit = self.server.max_client_batch_size
        if inputs > limit:
            raise RequestRefused(f"batch size {inputs} > maximum allowed batch size {limit}")

    @contextmanager
    def counting_failures(self) -> Iterator[None]:
        """Counts what is refused or fails within; all that TEI counts of some routes."""
        try:
            yield
        except HybridTeiError as error:
            self.metrics.failed(error)
            raise

    async def embed(
        self,
        task: Embed,
        inputs: Inputs,
        write: Callable[[Embeddings, Usage], bytes],
        *,
        refusal: HybridTeiError | None = None,
        numbers: int = 0,
    ) -> Reply:
        """Run a task and write its answer. Raises HybridTeiError; counts and times whatever happens.

        `refusal`: why this model cannot do it; raised in its turn, after the batch size and the permits. `numbers`: how many
        will be written, where that is more than the answer holds.
        """
        began_ns = perf_counter_ns()
        self.metrics.began(len(inputs.items), is_batch=inputs.is_batch)
        with self.counting_failures():
            if inputs.is_batch:
                self.check_batch(len(inputs.items))
            if refusal is not None:
                with self.service.admission.inside(len(inputs.items)):
                    raise refusal
            answered = await self._run(task, inputs)
        usage = usage_of(answered, inputs.characters, began_ns)
        self.metrics.succeeded(usage, is_batch=inputs.is_batch)
        if max(numbers, _numbers(answered.answer)) > OFFLOAD_NUMBERS:
            return Reply(await asyncio.to_thread(write, answered.answer, usage), usage)
        return Reply(write(answered.answer, usage), usage)

    async def _run(self, task: Embed, inputs: Inputs) -> Answered[Embeddings]:
        try:
            return await self.service.run(task, inputs=len(inputs.items))
        except asyncio.CancelledError:
            self.metrics.dropped()
            raise


def _numbers(answer: Embeddings) -> int:
    columns: list[Any] = [answer.dense, answer.sparse, answer.multivector, answer.tokens]
    return sum(getattr(column, "values", column).size for column in columns if column is not None)
