"""A model in this process, without a server or an event loop.
A call that uses several cores starts threads, and ends them before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from time import perf_counter_ns
from typing import Any, Self, TypeVar, Unpack

import numpy as np
from msgspec import structs
from threadpoolctl import threadpool_limits
from tqdm.auto import tqdm

from hybridtei.batch import Encoding, Head, pack
from hybridtei.config import EMBEDDED_MODEL, EngineConfig, ModelConfig
from hybridtei.errors import BackendError, EmptyInput, InvalidDimensions, InvalidInput
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.engine.core import EngineCore, shared_tokens
from hybridtei.inference.engine.device import run_all
from hybridtei.inference.load import configured, load_model
from hybridtei.inference.tasks.base import Model, Task
from hybridtei.inference.tasks.budget import TimedRanking
from hybridtei.inference.tasks.embed import Embed, check_spelled, heads_named, no_rows
from hybridtei.inference.tasks.label import Classified, Classify, Prediction, Span, Tag
from hybridtei.inference.tasks.pooling import budget_of
from hybridtei.inference.tasks.rerank import (
    MAX_CHUNK_DOCUMENTS,
    Ranked,
    Ranking,
    Scored,
    rerank_task,
)
from hybridtei.inference.tasks.spans import LARGEST, EmbedSpans, Spans, span_texts
from hybridtei.keywords import check_text, check_texts, check_value, listed
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.fingerprint import begin, model_hash
from hybridtei.models.text.reader import Input
from hybridtei.models.text.tokenizer import Text, Token
from hybridtei.options import (
    Aggregation,
    EmbedKeywords,
    EmbedOptions,
    LabelKeywords,
    LabelOptions,
    LoadKeywords,
    MultivectorBudget,
    Output,
    QueryEncoder,
    RankKeywords,
    RankOptions,
    Size,
)
from hybridtei.outputs import WHOLE, Embeddings, HeadOutputs, SparseVectors, cuts_of
from hybridtei.system.forks import OfOneProcess
from hybridtei.system.machine import LaneKind
from hybridtei.system.own_thread import OwnThreads, check_awaited

T = TypeVar("T")
# Inputs whose token states are in memory at a time
CHUNK_SPANNED = 64
# Models whose heads have products that are large enough for numpy to use several threads
THREADED_TOKENS = 2048
# Inputs tokenised at a time, so that only the answer's size determines memory
CHUNK = 1024


def _nothing(done: int) -> None:
    """Show no progress."""


class Encoder(OfOneProcess):
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
        # The calls of `aencode` and of searches
        self._thread = OwnThreads("encoder")

    @classmethod
    def load(
        cls,
        model_id: str = EMBEDDED_MODEL,
        *,
        config: ModelConfig | None = None,
        engine: EngineConfig | None = None,
        measures: bool = True,
        **options: Unpack[LoadKeywords],
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

    def named(self, model_id: str) -> Self:
        """This model under another name, which searches compare with a collection's."""
        other = type(self).__new__(type(self))
        vars(other).update(vars(self), model_id=model_id)
        return other

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
        outputs: Output | Iterable[Output | Head] = ("dense",),
        *,
        query_encoder: QueryEncoder = "model",
        spans: Sequence[Spans] | Spans | None = None,
        show_progress: bool = False,
        **options: Unpack[EmbedKeywords],
    ) -> Embeddings:
        """Embed texts (or id lists): all `outputs` from one forward pass a batch, rows in the order
        of `texts`.

        `outputs`: any of "dense", "sparse", "multivector", "tokens". `options`: fields of
        `EmbedOptions`, such as `input_type="query"` or `dimensions=256`; long texts are cut unless
        `truncate` is False. `query_encoder` "table": look up queries' sparse vectors by token,
        without a pass; other outputs still need one. `spans`: for each text a list of (first code
        point, code point after the last). Each span gets a row, text by text, from one pass over
        whole texts. Raises TypeError for an unknown option, RequestError or BackendError.
        """
        inputs = listed("texts", texts)
        _check_kinds(inputs)
        heads = heads_named(listed("outputs", outputs))
        check_value("query_encoder", query_encoder, QueryEncoder)
        chosen = EmbedOptions.given("encode()", options, multivector=self._multivector)
        task = Embed(inputs, heads, chosen)
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
        by_table = structs.replace(chosen, query_encoder=query_encoder)
        table = Embed(inputs, frozenset({Head.SPARSE}), by_table)
        table.check(self.spec)
        answer = self._run(table, show_progress)
        others = heads - table.heads
        if others:
            rest = self._run(replace(task, heads=others), show_progress)
            answer = replace(rest, sparse=answer.sparse)
        return answer

    async def aencode(
        self,
        texts: str | Sequence[Input],
        outputs: Output | Iterable[Output | Head] = ("dense",),
        *,
        query_encoder: QueryEncoder = "model",
        spans: Sequence[Spans] | Spans | None = None,
        show_progress: bool = False,
        **options: Unpack[EmbedKeywords],
    ) -> Embeddings:
        """`encode` in a thread, with the same parameters: the event loop stays free. Calls run
        one after the other. A cancelled call ends after the passes that run."""
        return await self._thread.run(
            partial(
                self.encode,
                texts,
                outputs,
                query_encoder=query_encoder,
                spans=spans,
                show_progress=show_progress,
                **options,
            )
        )

    async def embed(
        self, texts: Sequence[Input], heads: frozenset[Head], options: EmbedOptions
    ) -> Embeddings:
        """Embed texts for a search (`TextModel`)."""
        task = Embed(texts, heads, options)
        task.check(self.spec)
        return await self._thread.run(
            partial(
                self._run,
                task,
                show_progress=False,
            )
        )

    async def rank(self, query: str, documents: Sequence[str], options: RankOptions) -> Scored:
        """Score the hits of a search (`Ranker`)."""
        task = rerank_task(self.spec, query, documents, options)
        task.check(self.spec)
        return await self._thread.run(partial(self._rank, task))

    def _rank(self, task: Ranking) -> Scored:
        """Score documents, or as many as fit before the task's deadline."""
        deadline_ns = task.options.deadline_ns
        if deadline_ns is None:
            return self._answer(task, MAX_CHUNK_DOCUMENTS, field="documents")
        timed = TimedRanking(task, self.max_input_length)
        while part := timed.following(deadline_ns - perf_counter_ns()):
            began_ns = perf_counter_ns()
            scored = self._answer(part, MAX_CHUNK_DOCUMENTS, field="documents", place=timed.done)
            timed.scored(scored, perf_counter_ns() - began_ns)
        return timed.answer()

    def tokens_of(self, text: str) -> Iterable[Token]:
        """The tokens of a text without special ones, with their places."""
        return self._model.reader.tokenizer.tokens(text, add_special_tokens=False)

    async def fingerprint(self) -> str | None:
        """The hash of the model's files, read once."""
        return await model_hash(begin(self, self.spec))

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
        limit: int | None = None,
        **options: Unpack[RankKeywords],
    ) -> list[Ranked]:
        """Return the documents, the best for the query first. Ties have TEI's order: the last
        document first.

        `limit`: number of documents to return. `options`: fields of `RankOptions`. `budget_ms`:
        documents are scored in their order until the time is used, and the others follow in their
        order, with the lowest score. `instruction`: the criterion for a language model that ranks.
        `weights`: of dense, sparse and multi-vectors, for a model that ranks by these; or a name:
        "m3", "m3-long", "m3-two". Raises UnsupportedHead if the model cannot rank, RequestError or
        BackendError.
        """
        documents = listed("documents", documents)
        check_text("query", query)
        if limit is not None:
            check_value("limit", limit, Size)
        check_texts("documents", documents)
        task = rerank_task(
            self.spec,
            query,
            documents,
            RankOptions.given("rerank()", options).begun(),
        )
        task.check(self.spec)
        if not documents:
            return []
        scored = self._rank(task)
        return [Ranked(i, float(scored.scores[i]), documents[i]) for i in scored.order[:limit]]

    def classify(
        self,
        texts: Text | Sequence[Text],
        *,
        raw_scores: bool = False,
        **options: Unpack[LabelKeywords],
    ) -> list[list[Prediction]]:
        """Return every label's score for each text, or pair of texts (a tuple), the best first.

        Raises UnsupportedHead if the model is no classifier, RequestError or BackendError.
        """
        inputs: list[Text] = [texts] if isinstance(texts, tuple) else listed("texts", texts)
        for place, item in enumerate(inputs):
            for text in item if isinstance(item, tuple) else [item]:
                check_text(f"texts[{place}]", text)
        task = Classify(inputs, LabelOptions.given("classify()", options, raw_scores=raw_scores))
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
        **options: Unpack[LabelKeywords],
    ) -> list[list[Span]]:
        """Return labelled spans of each text, in code points. "none": one span a token, including
        tokens without a label (`O`).

        Raises UnsupportedHead if the model tags no tokens, RequestError or BackendError.
        """
        inputs = listed("texts", texts)
        check_texts("texts", inputs)
        task = Tag(
            inputs,
            LabelOptions.given("tag()", options, aggregation_strategy=aggregation_strategy),
        )
        task.check(self.spec)
        return [list(tagged.spans) for tagged in self._answer(task)] if inputs else []

    def close(self) -> None:
        """Free the model's memory. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        heads = ", ".join(sorted(self.spec.heads))
        return f"Encoder({self.model_id}: {heads} by {self.backend_name} in {self.dtype})"

    def _run(self, task: Embed | EmbedSpans, show_progress: bool) -> Embeddings:
        if not task.inputs:
            return no_rows(task.heads, self.spec)
        is_long = isinstance(task, EmbedSpans) or task.options.long_inputs == "mean"
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
        place: int = 0,
        advance: Callable[[int], object] = _nothing,
    ) -> T:
        """Run a task chunk by chunk. `place`: of its first input in the call. Raises EmptyInput
        with the input's `field` and place."""
        if self._closed:
            raise BackendError(
                "the model was freed by `close()`: load it again by `Encoder.load()`"
            )
        self._backend.check_process()
        answers: list[T] = []
        for chunk in task.split(max_inputs):
            part: Task[T] | None = chunk
            while part is not None:
                check_awaited()
                part = part.knowing(answers[0]) if answers and task.needs_first else part
                try:
                    encodings = part.prepare(self._model)
                except (EmptyInput, InvalidDimensions) as error:
                    raise error.named(field, place) from None
                progress = advance
                # Windows and look-ups are counted as texts, when the chunk is done
                if not part.heads or len(encodings) != chunk.size:
                    progress = _nothing
                outputs = self._outputs(encodings, part.heads, progress)
                with _one_thread(encodings):
                    answer: Any = part.finish(self._model, encodings, outputs)
                if isinstance(answer, Embeddings) and not isinstance(part, EmbedSpans):
                    extents = np.full((part.size, 2), WHOLE)
                    for cut in cuts_of(encodings, part.size):
                        extents[cut.index] = cut.characters
                    answer = replace(answer, extents=extents)
                answers.append(answer)
                part = part.rest(encodings)
            if progress is not advance:
                advance(chunk.size)
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
