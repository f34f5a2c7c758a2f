"""The context that handlers get: a model's engine, settings and counters. Every task enters the
engine through it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import inf
from time import perf_counter_ns
from typing import Any, Literal, Self, TypeVar, get_args

from msgspec import Struct, structs

from hybridtei.batch import UNKNOWN, Characters, Head
from hybridtei.config import ModelConfig, NamedModel, ServerConfig
from hybridtei.errors import (
    HybridTeiError,
    InvalidInput,
    RequestError,
    TooManyInputs,
    TooManyTexts,
)
from hybridtei.inference.engine.chunks import Answered
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.tasks.base import Task
from hybridtei.inference.tasks.embed import MAX_WINDOWS, Embed, prompt_of
from hybridtei.inference.tasks.pooling import budget_of
from hybridtei.inference.tasks.rerank import Ranking, rerank_task
from hybridtei.inference.tasks.windows import windows_of
from hybridtei.limits import Bounds
from hybridtei.models.fingerprint import Fingerprint, begin
from hybridtei.options import (
    SIDES,
    EmbedOptions,
    InputType,
    MultivectorBudget,
    Options,
    RankOptions,
)
from hybridtei.outputs import Cut, Embeddings, Load, Usage
from hybridtei.system.metrics import (
    Histogram,
    Registry,
    duration_buckets,
    observe_pairs,
    powers_of_two,
)
from hybridtei.system.tracing import CURRENT

CHUNK_DOCUMENTS = 64
# The cost of building and writing one ranked item, in numbers
NUMBERS_A_RANK = 40
# Length of the instruction times the number of documents
MAX_INSTRUCTION_CHARACTERS = 8_000_000
# An answer of more numbers is written outside the event loop
OFFLOAD_NUMBERS = 200_000

log = logging.getLogger(__name__)

T = TypeVar("T")
Chosen = TypeVar("Chosen", bound=Options)
Write = Callable[[T, Usage], Any]
Check = Callable[[], object]
# The name of the input at a place
NameOf = Callable[[int], str]


class Reply(Struct, frozen=True):
    """What a route's function returns."""

    # For `answers.to_json`; bytes are sent as they are
    answer: Any
    # For timing headers, if a model ran
    usage: Usage | None = None
    # The approximate count of its numbers
    numbers: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    status: int = 200
    media_type: bytes | None = b"application/json"
    # A body that is sent as it is made, instead of `answer`
    lines: AsyncGenerator[bytes] | None = None


NOTHING = Reply(b"", media_type=None)


@dataclass(slots=True, eq=False)
class Context:
    """One served model behind one HTTP server."""

    service: EngineService
    server: ServerConfig
    model: ModelConfig
    registry: Registry
    metrics: RequestMetrics
    # True: for routes of other servers than TEI, which take more texts, a part at a time
    for_peers: bool = False
    # How texts are read if their request does not say: the side that the model's name ends with
    side: InputType | None = None
    # True if the model has prompts that differ for queries and documents
    has_sides: bool = field(init=False)
    # The default of documents' multi-vectors
    budget: MultivectorBudget | None = field(init=False)
    _fingerprint_header: tuple[bytes, bytes] | None = field(default=None, init=False)
    _peers: Context | None = field(default=None, init=False)
    _sides: dict[InputType, Context] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.budget = budget_of(self.model)
        table = self.service.reader.prompts.table or {}
        prompts = [table.get(prompt_of(side, table) or "", "") for side in SIDES]
        self.has_sides = prompts[0] != prompts[1]

    def on_side(self, side: InputType | None) -> Context:
        """This model, which reads a request's texts as queries or as documents."""
        if side is None:
            return self
        if side not in self._sides:
            self._sides[side] = replace(self, side=side)
        return self._sides[side]

    @property
    def peers(self) -> Context:
        """This model, for routes of other servers than TEI."""
        if self._peers is None:
            self._peers = replace(self, for_peers=True)
        return self._peers

    @property
    def served_name(self) -> str:
        if isinstance(self.model, NamedModel):
            # `served_model_name` would name all models of the process
            name = self.model.alias
        else:
            name = self.server.served_model_name or self.model.model_id
        return name if self.side is None else f"{name}:{self.side}"

    @property
    def is_splade(self) -> bool:
        return self.service.model.spec.is_splade

    @property
    def heads(self) -> frozenset[Head]:
        return self.service.model.spec.heads

    @property
    def fingerprint(self) -> Future[Fingerprint | None]:
        service, config = self.service, self.service.config
        prompt = config.default_prompt or config.default_prompt_name
        return begin(
            service, service.model.spec, dtype=service.backend.dtype, default_prompt=prompt
        )

    @property
    def fingerprint_header(self) -> tuple[bytes, bytes] | None:
        """`x-hybridtei-fingerprint`; None until the weights have been read."""
        if self._fingerprint_header is None:
            reading = self.fingerprint
            facts = reading.result() if reading.done() else None
            if facts is not None and facts["id"] is not None:
                self._fingerprint_header = (b"x-hybridtei-fingerprint", facts["id"].encode())
        return self._fingerprint_header

    def settled(self, options: Chosen) -> Chosen:
        """The options, with the server's defaults for what a request leaves open."""
        changes: dict[str, Any] = {}
        if options.truncate is None and not self.service.config.auto_truncate:
            changes["truncate"] = options.max_tokens is not None
        if isinstance(options, EmbedOptions):
            if options.input_type is None and self.side is not None:
                changes["input_type"] = self.side
            if options.multivector is None and self.budget is not None:
                changes["multivector"] = self.budget
        return structs.replace(options, **changes) if changes else options

    def ranking(self, query: str, documents: Sequence[str], options: RankOptions) -> Ranking:
        """The task of ranking. All documents of a request have at most --max-rerank-documents
        windows in all. Raises InvalidInput, UnsupportedHead."""
        options, count = self.settled(options), len(documents)
        if options.relevant_spans is not None and Head.MULTIVECTOR not in self.heads:
            raise InvalidInput("`relevant_spans` needs a model that ranks by multi-vectors")
        windows = options.max_chunks_per_doc or self.server.rerank_windows
        if windows > 1:
            windows = min(windows, max(self.server.max_rerank_documents // max(count, 1), 1))
            # Sentences are listed of documents that are read whole
            if options.relevant_spans is None:
                options = structs.replace(options, max_chunks_per_doc=windows)
            else:
                options = structs.replace(options, max_chunks_per_doc=None)
        if options.instruction is not None:
            check_instruction(options.instruction, count * windows)
        task = rerank_task(
            self.service.model.spec,
            query,
            documents,
            options,
        )
        task.check(self.service.model.spec)
        return task

    def check_batch(self, inputs: int) -> None:
        """Raises TooManyInputs if a request is above TEI's limit and the server does not split
        TEI's requests; TooManyTexts above the limit of the other APIs, which are split."""
        limit = self.server.max_client_batch_size
        if inputs <= limit:
            return
        if not self.for_peers:
            if not self.server.split_large_batches:
                raise TooManyInputs(f"batch size {inputs} > maximum allowed batch size {limit}")
            return
        limit = max(limit, self.server.max_split_texts)
        if inputs > limit:
            raise TooManyTexts(
                f"the request holds {inputs} texts > maximum allowed {limit} (max-split-texts)"
            )

    def splits(self, inputs: int) -> bool:
        """True if a request of `inputs` inputs is above the limit and the server splits it."""
        splits = self.for_peers or self.server.split_large_batches
        return splits and inputs > self.server.max_client_batch_size

    def bounds(self, inputs: int, largest: int | None = None) -> Bounds:
        """The bounds of a request's chunks: `largest` inputs each. Without `largest` the request is
        one chunk, or chunks of `--max-client-batch-size` if the server splits it."""
        limit = self.server.max_client_batch_size
        if largest is None and not self.splits(inputs):
            return Bounds.whole(inputs)
        return Bounds.of(
            inputs, largest=largest or limit, permits=self.service.config.max_concurrent_requests
        )

    def bounds_of_windows(
        self, texts: Sequence[Any], limit: int, largest: int | None = None
    ) -> Bounds:
        """The bounds of a request that reads each text in at most `limit` windows, each of which is
        a permit. `largest`: windows of a chunk; default: `--max-client-batch-size`."""
        windows = windows_of(texts, self.service.reader.max_input_length, limit)
        largest = largest or self.server.max_client_batch_size
        return self.bounds(windows, largest).of_inputs(len(texts))

    def bounds_of_ranking(self, task: Ranking, largest: int | None = CHUNK_DOCUMENTS) -> Bounds:
        """The bounds of a request that ranks: of its documents, or of their windows."""
        windows = task.options.max_chunks_per_doc or 1
        if windows > 1:
            bounds = self.bounds_of_windows(task.inputs, windows, CHUNK_DOCUMENTS)
        else:
            bounds = self.bounds(len(task.inputs), largest)
        return bounds.in_chunks(CHUNK_DOCUMENTS)

    def counting_failures(self) -> Counted:
        """A context manager that counts an error raised inside it. On some routes TEI counts only
        errors."""
        return Counted(self.metrics)

    async def embed(
        self,
        task: Embed,
        write: Write[Embeddings],
        *,
        is_batch: bool = True,
        check: Check | None = None,
        numbers: int = 0,
        field: str | None = None,
    ) -> Reply:
        """Embed the task's inputs, and write the answer. Counts and times success and failure.
        Raises HybridTeiError.

        `check`, `field`: as for `run`. `numbers`: the count of numbers to write, if larger than the
        answer's.
        """
        is_mean = self.server.long_inputs == "mean" and task.options.long_inputs is None
        if is_mean and task.reads_windows(self.service.model.spec):
            task = replace(task, options=structs.replace(task.options, long_inputs="mean"))
        # A text counts its characters, a list of ids its ids
        load = Load(len(task.inputs), sum(map(len, task.inputs)), is_batch)
        bounds: Bounds | None = None
        if task.options.long_inputs == "mean":
            self.check_batch(load.inputs if is_batch else 1)
            bounds = self.bounds_of_windows(task.inputs, MAX_WINDOWS)
        answer, usage = await self.run(
            task, load, bounds, check=check, numbers=numbers, field=field
        )
        return await self.reply(write, answer, usage, max(numbers, answer.numbers))

    async def run(
        self,
        task: Task[T],
        load: Load,
        bounds: Bounds | None = None,
        *,
        scope: Scope = "embed",
        check: Check | None = None,
        numbers: int = 0,
        field: str | NameOf | None = None,
    ) -> tuple[T, Usage]:
        """Run a task in the engine, and count it under `scope`. Raises HybridTeiError.

        `bounds`: default: those of the number of inputs. `check`: called once the request has its
        permits, instead of the task's own check. `numbers`: the count of numbers to write, if
        known.
        `field`: the field of the inputs on routes other than TEI's; an error names it, with the
        place of the wrong one in a list. A function gives the name of the input at a place.
        """
        with Counted(self.metrics, load, scope) as counted:
            if load.is_batch and (bounds is None or bounds.max_numbers == inf):
                self.check_batch(load.inputs)
            bounds = bounds or self.bounds(load.inputs)
            if numbers:
                bounds.check(numbers)
            if task.checks_first:
                task.check(self.service.model.spec)
                check = checked
            try:
                result = await self.service.run(
                    task, characters=load.characters, bounds=bounds, check=check
                )
            except RequestError as error:
                if field is None:
                    raise
                if not isinstance(field, str):
                    field = field(error.place or 0)
                    error.place = None
                if not load.is_batch:
                    error.place = None
                raise error.named(field) from None
        if self.has_sides and task.embeds and task.lacks_side(self.service.reader.prompts):
            self.metrics.lacked_side(self.served_name)
        return result.answer, counted.succeeded(result)

    async def embed_in_chunks(
        self, task: Embed, load: Load, field: NameOf | None = None
    ) -> tuple[Embeddings, Usage]:
        """Embed any number of texts, in chunks of `--max-client-batch-size`. `field`: as for `run`.
        Raises the error of the first failing chunk."""
        bounds = self.bounds(load.inputs, self.server.max_client_batch_size)
        return await self.run(task, load, bounds, field=field)

    async def reply(self, write: Write[T], answer: T, usage: Usage, numbers: int) -> Reply:
        """Write an answer by `write`: a large one in a thread."""
        if numbers > OFFLOAD_NUMBERS:
            return Reply(await asyncio.to_thread(write, answer, usage), usage, numbers)
        return Reply(write(answer, usage), usage, numbers)


def checked() -> None:
    """The `check` of a task that has been checked."""


def check_instruction(instruction: str | None, documents: int) -> None:
    """Raises InvalidInput if the instruction, tokenised with every document, is too much work."""
    length = len(instruction or "")
    if length * documents > MAX_INSTRUCTION_CHARACTERS:
        raise InvalidInput(
            f"`instruction` holds {length} characters for each of {documents} documents, "
            f"{length * documents} in all > maximum allowed {MAX_INSTRUCTION_CHARACTERS}"
        )


def load_of_pairs(query: str, documents: Sequence[str]) -> Load:
    """The load of ranking documents by one query. The query counts once for each document."""
    return Load(
        len(documents), len(query) * len(documents) + sum(map(len, documents)), is_batch=True
    )


def envelope(context: Context, kind: str, prefix: str) -> dict[str, Any]:
    """`{"id", "object", "created", "model"}`."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": context.served_name,
    }


def usage_of(context: Context, usage: Usage) -> dict[str, Any]:
    """`{"prompt_tokens", "total_tokens"}`; and `truncated` if an input was cut, which TEI does not
    tell."""
    counts: dict[str, Any] = {"prompt_tokens": usage.tokens, "total_tokens": usage.tokens}
    if usage.cuts and not context.server.as_tei:
        counts["truncated"] = [
            {"index": cut.index, "characters": characters_of(cut)} for cut in usage.cuts
        ]
    return counts


def characters_of(cut: Cut) -> Characters | None:
    """The characters that the model read; None: unknown."""
    return None if cut.characters == UNKNOWN else cut.characters


SECOND_NS, MILLISECOND_NS = 1e9, 1_000_000
HOUR_S = 3600.0
# A bound of its histogram
MAX_HISTOGRAM_LENGTH = 2**19

Scope = Literal["embed", "predict"]


def headers_of(usage: Usage) -> list[tuple[bytes, bytes]]:
    """TEI's `x-compute-*` and timing headers, and the number of inputs that were cut. TEI reports
    `gpu+optimized` on every device."""
    elapsed = b"%d" % ((perf_counter_ns() - usage.began_ns) // MILLISECOND_NS)
    times = usage.timings
    headers = [
        (b"x-compute-type", b"gpu+optimized"),
        (b"x-compute-time", elapsed),
        (b"x-compute-characters", b"%d" % usage.load.characters),
        (b"x-compute-tokens", b"%d" % usage.tokens),
        (b"x-total-time", elapsed),
        (b"x-tokenization-time", b"%d" % (times.tokenization_ns // MILLISECOND_NS)),
        (b"x-queue-time", b"%d" % (times.queue_ns // MILLISECOND_NS)),
        (b"x-inference-time", b"%d" % (times.inference_ns // MILLISECOND_NS)),
    ]
    if usage.cuts:
        headers.append((b"x-hybridtei-truncated", b"%d" % len(usage.cuts)))
    return headers


class Counted:
    """Counts one request: its beginning on entry, and its error on exit. Without a load it counts
    the error alone. A class, since a generator is slower."""

    __slots__ = ("_load", "_metrics", "_scope", "began_ns")

    def __init__(
        self, metrics: RequestMetrics, load: Load | None = None, scope: Scope = "embed"
    ) -> None:
        self._metrics, self._load, self._scope = metrics, load, scope
        self.began_ns = perf_counter_ns()

    def __enter__(self) -> Self:
        if self._load is not None:
            self._metrics.began(self._load, self._scope)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, HybridTeiError):
            self._metrics.failed(error)
        elif isinstance(error, asyncio.CancelledError) and self._load is not None:
            self._metrics.dropped()

    def succeeded(self, result: Answered[Any]) -> Usage:
        """Count the answer, and return the cost of the request."""
        assert self._load is not None
        usage = Usage(self._load, result.lengths, result.timings, self.began_ns, result.cuts)
        self._metrics.succeeded(usage, self._scope)
        return usage


class RequestMetrics:
    """TEI's `te_request_*`, `te_embed_*` and `te_predict_*`."""

    def __init__(self, registry: Registry, max_input_length: int) -> None:
        count, success = (
            registry.counter("te_request_count"),
            registry.counter("te_request_success"),
        )
        self._failure = registry.counter("te_request_failure")
        self.disconnected = registry.counter("hybridtei_departed_requests_total")
        self._without_side = registry.counter("hybridtei_requests_without_side_total")
        self._next_warning = 0.0
        self._truncated = registry.counter("hybridtei_truncated_inputs_total")
        lengths = powers_of_two(min(max_input_length, MAX_HISTOGRAM_LENGTH))
        self._input_length = registry.histogram("te_request_input_length", lengths)
        of_request = _stages(registry, "request")
        methods = {False: "single", True: "batch"}
        self._begun = {is_batch: count.of(method=method) for is_batch, method in methods.items()}
        self._succeeded = {
            is_batch: success.of(method=method) for is_batch, method in methods.items()
        }
        self._overloaded = self._failure.of(err="overloaded")
        self._scopes = {
            scope: _ScopeMetrics(registry, scope, of_request) for scope in get_args(Scope)
        }

    def began(self, load: Load, scope: Scope) -> None:
        """Count a request."""
        self._begun[load.is_batch]()
        self._scopes[scope].count(load.inputs)

    def succeeded(self, usage: Usage, scope: Scope) -> None:
        """Count an answered request, and put its times into the current span."""
        inputs, times, of_scope = usage.load.inputs, usage.timings, self._scopes[scope]
        self._succeeded[usage.load.is_batch]()
        of_scope.success(inputs)
        if usage.cuts:
            self._truncated.add(len(usage.cuts))
        for length in usage.lengths:
            self._input_length.observe(length)
        total_ns = perf_counter_ns() - usage.began_ns
        span = CURRENT.get()
        if span is not None:
            span.timings, span.total_ns = times, total_ns
        seconds = (
            total_ns / SECOND_NS,
            times.tokenization_ns / SECOND_NS,
            times.queue_ns / SECOND_NS,
            times.inference_ns / SECOND_NS,
        )
        observe_pairs(seconds, of_scope.stages, inputs)

    def lacked_side(self, model: str) -> None:
        """Count a request to a model with sides that names none, and log one an hour."""
        self._without_side.add()
        if time.monotonic() < self._next_warning:
            return
        self._next_warning = time.monotonic() + HOUR_S
        log.warning(
            "%s has prompts for queries and documents, and a request named neither: send "
            "`input_type` or `prompt_name`, or the model's name as %s:query or %s:document",
            model,
            model,
            model,
        )

    def dropped(self) -> None:
        """Count a request whose client disconnected before its answer."""
        self._failure.add(err="dropped")

    def refused(self) -> None:
        """Count a request that was refused before its body was read: its number of inputs is
        unknown."""
        self._begun[False]()
        self._overloaded()

    def failed(self, error: HybridTeiError) -> None:
        """Count a request that was refused or failed."""
        self._failure.add(err=error.label)


class _ScopeMetrics:
    """Counters of one kind of work, by input. `stages`: histograms of a request's times, each with
    its inputs' one."""

    def __init__(self, registry: Registry, scope: Scope, of_request: Sequence[Histogram]) -> None:
        self.count = registry.counter(f"te_{scope}_count").of()
        self.success = registry.counter(f"te_{scope}_success").of()
        self.stages = [*zip(of_request, _stages(registry, scope), strict=True)]


def _stages(registry: Registry, scope: str) -> list[Histogram]:
    bounds = duration_buckets()
    return [registry.histogram(f"te_{scope}_{stage}duration", bounds) for stage in STAGES]


STAGES = ("", "tokenization_", "queue_", "inference_")
