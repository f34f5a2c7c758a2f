"""A model in this process, without a server or an event loop.
A call that uses several cores starts threads, and ends them before it returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm.auto import tqdm

from hybridtei.batch import Encoding, Head, pack
from hybridtei.config import EMBEDDED_MODEL, EngineConfig, LongInputs, ModelConfig, check_value
from hybridtei.errors import BackendError, EmptyInput, InvalidInput
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.engine.core import EngineCore, shared_tokens
from hybridtei.inference.engine.device import run_all
from hybridtei.inference.load import configured, load_model
from hybridtei.inference.tasks.base import Model, Task
from hybridtei.inference.tasks.embed import (
    Embed,
    InputType,
    QueryEncoder,
    check_spelled,
    heads_named,
    no_rows,
)
from hybridtei.inference.tasks.label import Aggregation, Classified, Classify, Prediction, Span, Tag
from hybridtei.inference.tasks.pooling import MultivectorBudget, as_budget, budget_of
from hybridtei.inference.tasks.rerank import MAX_CHUNK_DOCUMENTS, Ranked, RankWeights, rerank_task
from hybridtei.inference.tasks.spans import LARGEST, EmbedSpans, Spans, span_texts
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.reader import Input
from hybridtei.models.text.tokenizer import Direction, Text
from hybridtei.outputs import WHOLE, Embeddings, HeadOutputs, SparseVectors
from hybridtei.system.machine import LaneKind

T = TypeVar("T")
# Inputs whose token states are in memory at a time
CHUNK_SPANNED = 64
# Models whose heads have products that are large enough for numpy to use several threads
THREADED_TOKENS = 2048
# Inputs tokenised at a time, so that only the answer's size determines memory
CHUNK = 1024


class Encoder:
    """A loaded model. `Encoder.load()` gives the embedded one.

    >>> encoder = Encoder.load()                                                  # doctest: +SKIP
    >>> encoder.encode(["hybrid search"], outputs=("dense", "sparse")).dense.shape  # doctest: +SKIP
    (1, 384)
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        budget_tokens: int,
        engine: EngineConfig,
        multivector: MultivectorBudget | None = None,
        *,
        model_id: str = "",
    ) -> None:
        """`multivector`: the default budget of documents' multi-vectors. `model_id`: the model's
        name."""
        self.model_id = model_id
        self._model = model
        self._multivector = multivector
        self._backend = backend
        self._budget = budget_tokens
        self._engine = engine
        self._closed = False
        # Held by the one call of `aencode` that runs
        self._turn = threading.Lock()

    @classmethod
    def load(
        cls,
        model_id: str = EMBEDDED_MODEL,
        *,
        config: ModelConfig | None = None,
        engine: EngineConfig | None = None,
        measures: bool = True,
        **options: Any,
    ) -> Encoder:
        """Load a local folder, a hub id, or the embedded model.

        `measures`: False skips the self-test and the measurement of a GPU's memory, for programs
        that embed a single text.
        `options`: fields of ModelConfig and EngineConfig, such as `dtype="bfloat16"` or
        `backend="openvino"`; they override `config` and `engine`. `config` overrides `model_id`.
        Raises TypeError for an unknown option, UsageError for an invalid value, and LoadError.
        """
        config, engine = configured(
            config or ModelConfig(model_id=model_id), engine or EngineConfig(), options
        )
        loaded = load_model(config, engine, measures=measures)
        return cls(
            loaded.model,
            loaded.backend,
            loaded.budget_tokens,
            engine,
            budget_of(config),
            model_id=config.model_id,
        )

    @property
    def spec(self) -> ModelSpec:
        """The checkpoint's specification: heads, widths, limits."""
        return self._model.spec

    @property
    def backend_name(self) -> str:
        """The engine that runs the model: "ort", "openvino" or "torch"."""
        return self._backend.name

    @property
    def dtype(self) -> str:
        """The precision of weights and activations."""
        return self._backend.dtype

    @property
    def forwards(self) -> int:
        """The number of the trunk's forward passes so far."""
        return self._backend.forwards

    @property
    def max_input_length(self) -> int:
        """The longest input in tokens, special tokens included."""
        return self._model.reader.max_input_length

    def encode(
        self,
        texts: str | Sequence[Input],
        outputs: Iterable[str] = ("dense",),
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        input_type: InputType | None = None,
        multivector: MultivectorBudget | Mapping[str, Any] | None = None,
        truncate: bool = True,
        truncation_direction: Direction | None = None,
        query_encoder: QueryEncoder = "model",
        long_inputs: LongInputs | None = None,
        spans: Sequence[Spans] | Spans | None = None,
        show_progress: bool = False,
    ) -> Embeddings:
        """Embed texts (or id lists): all `outputs` from one forward pass a batch, rows in the order
        of `texts`.

        `outputs`: any of "dense", "sparse", "multivector", "tokens". `input_type`: "query" or
        "document", for models and prompts that treat them differently. `multivector`: the budget of
        documents' multi-vectors, a `MultivectorBudget` or its fields; queries' stay whole.
        `query_encoder` "table": look up queries' sparse vectors by token, without a pass; other
        outputs still need one. `long_inputs` "mean": read a text that is longer than the model in
        windows, and average their vectors by tokens, instead of cutting it. `spans`: for each text
        a list of (first code point, code point after the last). Each span gets a row, text by text,
        from one pass over whole texts. Raises RequestError or BackendError.
        """
        inputs = _listed("texts", texts)
        _check_kinds(inputs)
        heads = heads_named(_listed("outputs", outputs))
        _check_given(
            dimensions=(dimensions, int),
            input_type=(input_type, InputType),
            query_encoder=(query_encoder, QueryEncoder),
            long_inputs=(long_inputs, LongInputs),
            truncation_direction=(truncation_direction, Direction),
        )
        budget = self._multivector if multivector is None else as_budget(multivector)
        task = Embed(
            inputs,
            heads,
            truncate,
            truncation_direction,
            prompt_name,
            normalize,
            dimensions,
            input_type,
            budget,
            long_inputs=long_inputs,
        )
        task.check(self.spec)
        if spans is not None and inputs:
            if query_encoder != "model":
                raise InvalidInput(
                    '`spans` are not for `query_encoder` "table", which reads no text around a '
                    "token"
                )
            lists = [spans] if isinstance(texts, str) else spans
            return self._run(
                EmbedSpans(span_texts(inputs, lists, "texts"), task, "texts[{}].spans"),
                show_progress,
            )
        if query_encoder == "model" or Head.SPARSE not in heads:
            return self._run(task, show_progress)
        # The sparse vectors come from the table, all other outputs from a pass
        table = replace(task, heads=frozenset({Head.SPARSE}), query_encoder=query_encoder)
        table.check(self.spec)
        answer = self._run(table, show_progress)
        others = heads - table.heads
        if others:
            rest = self._run(replace(task, heads=others), show_progress)
            answer = replace(rest, sparse=answer.sparse)
        return answer

    async def aencode(
        self, texts: str | Sequence[Input], outputs: Iterable[str] = ("dense",), **options: Any
    ) -> Embeddings:
        """`encode` in a thread, with the same parameters: the event loop stays free. Calls run
        one after the other."""

        def encode() -> Embeddings:
            with self._turn:
                return self.encode(texts, outputs, **options)

        return await asyncio.to_thread(encode)

    def tokens(self, vectors: SparseVectors) -> list[list[tuple[str, float]]]:
        """Spell sparse vectors: for each a list of (piece of the vocabulary, weight), the heaviest
        first.

        Raises UnsupportedHead if indices are not token ids.
        """
        check_spelled(self.spec)
        spelled = []
        for row in range(len(vectors)):
            indices, values = vectors.row(row)
            order = values.argsort(kind="stable")[::-1]
            pieces = self._model.reader.tokenizer.pieces(indices[order])
            spelled.append(list(zip(pieces, values[order].tolist(), strict=True)))
        return spelled

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        raw_scores: bool = False,
        instruction: str | None = None,
        weights: RankWeights | str | None = None,
        truncate: bool = True,
        truncation_direction: Direction | None = None,
    ) -> list[Ranked]:
        """Return the documents, the best for the query first. Ties have TEI's order: the last
        document first.

        `instruction`: the criterion for a language model that ranks. `weights`: of dense, sparse
        and multi-vectors, for a model that ranks by these; or a name: "m3", "m3-long", "m3-two".
        Raises UnsupportedHead if the model cannot rank, RequestError or BackendError.
        """
        documents = _listed("documents", documents)
        _check_texts("query", [query])
        _check_given(top_n=(top_n, int))
        _check_texts("documents", documents)
        task = rerank_task(
            self.spec,
            query,
            documents,
            truncate=truncate,
            direction=truncation_direction,
            raw_scores=raw_scores,
            instruction=instruction,
            weights=weights,
        )
        task.check(self.spec)
        if not documents:
            return []
        scored = self._answer(task, MAX_CHUNK_DOCUMENTS, field="documents")
        return [Ranked(i, float(scored.scores[i]), documents[i]) for i in scored.order[:top_n]]

    def classify(
        self,
        texts: Text | Sequence[Text],
        *,
        raw_scores: bool = False,
        truncate: bool = True,
        truncation_direction: Direction | None = None,
    ) -> list[list[Prediction]]:
        """Return every label's score for each text, or pair of texts (a tuple), the best first.

        Raises UnsupportedHead if the model is no classifier, RequestError or BackendError.
        """
        inputs: list[Text] = [texts] if isinstance(texts, tuple) else _listed("texts", texts)
        for place, item in enumerate(inputs):
            _check_texts(f"texts[{place}]", item if isinstance(item, tuple) else [item])
        task = Classify(inputs, truncate, truncation_direction, raw_scores)
        task.check(self.spec)
        if not inputs:
            return []
        answer: Classified = self._answer(task)
        return [answer.best_first(row) for row in range(len(answer.scores))]

    def tag(
        self,
        texts: str | Sequence[str],
        *,
        aggregation_strategy: Aggregation = "simple",
        truncate: bool = True,
        truncation_direction: Direction | None = None,
    ) -> list[list[Span]]:
        """Return labelled spans of each text, in code points. "none": one span a token, including
        tokens without a label (`O`).

        Raises UnsupportedHead if the model tags no tokens, RequestError or BackendError.
        """
        inputs = _listed("texts", texts)
        _check_texts("texts", inputs)
        _check_given(aggregation_strategy=(aggregation_strategy, Aggregation))
        task = Tag(inputs, aggregation_strategy, truncate, truncation_direction)
        task.check(self.spec)
        return [list(tagged.spans) for tagged in self._answer(task)] if inputs else []

    def close(self) -> None:
        """Free the model's memory. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._backend.close()

    def _run(self, task: Embed | EmbedSpans, show_progress: bool) -> Embeddings:
        if not task.inputs:
            return no_rows(task.heads, self.spec)
        is_long = isinstance(task, EmbedSpans) or task.long_inputs == "mean"
        chunk = CHUNK_SPANNED if is_long else CHUNK
        ready: Task[Embeddings] = task.for_model(self.spec)
        # Even a disabled progress bar takes a measurable part of a query's time
        if not show_progress:
            return self._answer(ready, chunk)
        with tqdm(total=len(task.inputs), unit="text") as bar:
            return self._answer(ready, chunk, advance=bar.update)

    def _answer(
        self,
        task: Task[T],
        max_inputs: int = CHUNK,
        *,
        field: str = "texts",
        advance: Callable[[int], object] = lambda done: None,
    ) -> T:
        """Run a task chunk by chunk. Raises EmptyInput with the input's `field` and place."""
        if self._closed:
            raise BackendError(
                "the model was freed by `close()`: load it again by `Encoder.load()`"
            )
        answers: list[T] = []
        place = 0
        for chunk in task.split(max_inputs):
            part = chunk.knowing(answers[0]) if answers and task.needs_first else chunk
            try:
                encodings = part.prepare(self._model)
            except EmptyInput as error:
                raise error.named(field, place) from None
            outputs = self._outputs(encodings, part.heads, advance)
            with _one_thread(encodings):
                answer: Any = part.finish(self._model, encodings, outputs)
            if isinstance(answer, Embeddings) and not isinstance(part, EmbedSpans):
                extents = np.array([encoding.extent or WHOLE for encoding in encodings])
                answer = replace(answer, extents=extents)
            answers.append(answer)
            place += chunk.size
        return answers[0] if len(answers) == 1 else task.join(answers)

    def _outputs(
        self,
        encodings: Sequence[Encoding],
        heads: frozenset[Head],
        advance: Callable[[int], object],
    ) -> HeadOutputs:
        # A single pass over all cores is faster than the queue of an engine
        is_table = self._backend.is_table and heads == {Head.DENSE}
        if heads and (is_table or len(encodings) == 1):
            outputs = self._backend.forward(
                pack(encodings, heads, self.spec.positions), use_all_cores=True
            )
            advance(len(encodings))
            return outputs
        lanes = 1 if self._backend.fills_cores else self._backend.lanes.count(LaneKind.BULK)
        core = EngineCore(
            max_tokens=self._budget,
            max_sequences=self._engine.max_batch_requests,
            positions=self.spec.positions,
            padding=self._backend.padding,
            lanes=(LaneKind.BULK,) * lanes,
            shared_tokens=shared_tokens(self._backend, self._engine),
        )
        request = core.add(encodings, heads)
        run_all(core, self._backend, lanes + self._backend.ahead, advance)
        return request.outputs()


def _one_thread(encodings: Sequence[Encoding]) -> AbstractContextManager[object]:
    """Limits numpy's products to one thread, since further threads only spin between small
    products.

    Not used for queries: finding the libraries with threads takes a third of a query's pass, and a
    query has no large product.
    """
    is_small = sum(map(len, encodings)) < THREADED_TOKENS
    return nullcontext() if is_small else threadpool_limits(limits=1, user_api="blas")


def _listed(name: str, values: Any) -> list[Any]:
    """Return a single text, or several values, as a list. Raises InvalidInput for any other
    type."""
    if not isinstance(values, Iterable):
        raise InvalidInput(
            f"`{name}` is {values!r}, of type {type(values).__name__}; it should be a string or a "
            "list"
        )
    return [values] if isinstance(values, str) else list(values)


def _check_given(**values: tuple[Any, Any]) -> None:
    """Raises InvalidInput for the first (value, type) whose value is neither None nor of the
    type."""
    for name, (value, kind) in values.items():
        if value is not None:
            check_value(name, value, kind)


def _check_kinds(inputs: Sequence[object]) -> None:
    for place, item in enumerate(inputs):
        if not isinstance(item, str | list):
            kind = type(item).__name__
            raise InvalidInput(
                f"`texts[{place}]` is of type {kind}; each should be a text or a list of ids"
            )
        for token_id in item if isinstance(item, list) else ():
            if type(token_id) is not int or not 0 <= token_id < LARGEST:
                raise InvalidInput(
                    f"`texts[{place}]` holds {token_id!r}; an id is a whole number from 0 to "
                    f"{LARGEST - 1}"
                )


def _check_texts(name: str, texts: Sequence[object]) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise InvalidInput(
                f"`{name}` holds something of type {type(text).__name__}; each should be a text"
            )
