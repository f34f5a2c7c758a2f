"""Reranking: one query and many documents -> a score for each document.

A reranker reads query and document together. A model with token vectors reads each alone, and the
query only once. Ten thousand documents run in chunks, which bounds the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np
from msgspec import structs

from hybridtei.batch import (
    VECTORS,
    Characters,
    Encoding,
    Head,
    Ragged,
    WindowEncoding,
    WindowPlace,
    runs,
    with_shared_prefix,
)
from hybridtei.errors import EmptyInput, InvalidInput, RequestError, UnsupportedHead
from hybridtei.inference.tasks.base import Model, Task
from hybridtei.inference.tasks.embed import Embed
from hybridtei.inference.tasks.label import probabilities
from hybridtei.inference.tasks.relevant import RelevantSpan, relevant_spans
from hybridtei.inference.tasks.windows import (
    BEGINNING,
    MAX_CHUNK_CHARACTERS,
    TOKEN_CHARACTERS,
    in_windows,
)
from hybridtei.models.checkpoint.kinds import Late
from hybridtei.models.checkpoint.spec import ModelSpec, Router
from hybridtei.options import (
    PRESETS,
    SIDES,
    EmbedOptions,
    RankOptions,
    RankWeights,
)
from hybridtei.outputs import Embeddings, Floats, HeadOutputs, SparseVectors, best_first, refuse_nan

MAX_CHUNK_DOCUMENTS = 256
# Of `instruction`, since it is tokenised again for each document
INSTRUCTION_CHARACTERS_MAX = 4_096
NO_INSTRUCTION = "`instruction` is for rerankers that are language models; this one takes none"
NO_WEIGHTS = "`weights` should be numbers of at least 0, not all of them 0"
DEFAULT = RankOptions()


@dataclass(frozen=True, slots=True)
class Ranked:
    """A reranked document: its place in the request, and its score."""

    index: int
    score: float
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Scores float32[n] in the order of the documents. `query`: its vectors, which later chunks
    reuse. `spans`: on request. `logits`: what the scores were made from, which orders documents
    whose scores round to the same number."""

    scores: Floats
    query: Embeddings | None = None
    spans: Sequence[Sequence[RelevantSpan]] = ()
    logits: Floats | None = None
    # The characters of each document's best window; None: it was read as a whole
    windows: Sequence[Characters | None] = ()
    # The number of the last documents that no pass has scored
    unscored: int = 0
    # True if the first document is the last one of the answer before, in its next windows
    continues: bool = False

    @property
    def order(self) -> list[int]:
        """Return the documents' numbers, the best first."""
        values = self.scores
        if self.logits is not None:
            values = self.logits
        scored = len(values) - self.unscored
        return [*best_first(values[:scored]).tolist(), *range(scored, len(values))]

    @staticmethod
    def concat(parts: Sequence[Scored]) -> Scored:
        """Join answers. Of a document that several have read, its best window counts."""
        spans = [spans for part in parts for spans in part.spans]
        windows: list[Characters | None] = []
        for part in parts:
            windows += part.windows
        rows = Scored(
            np.concatenate([part.scores for part in parts]),
            parts[0].query,
            spans,
            _concatenated([part.logits for part in parts]),
            windows,
        )
        if not any(part.continues for part in parts):
            return rows
        begins: list[int] = []
        row = 0
        for part in parts:
            begins += range(row + part.continues, row + len(part.scores))
            row += len(part.scores)
        return rows._of_best(begins)

    def of_best_windows(self, encodings: Sequence[Encoding], *, continues: bool) -> Scored:
        """The scores of documents from those of their windows: each document's best one counts.
        `continues`: of the first document, windows were read before."""
        windows = [item for item in encodings if isinstance(item, WindowEncoding)]
        if not windows:
            return self
        begins = np.flatnonzero(np.diff([window.document for window in windows], prepend=-1))
        characters = [None if window.is_whole else window.characters for window in windows]
        rows = replace(self, windows=characters, continues=continues)
        return rows._of_best(begins.tolist())

    def _of_best(self, begins: Sequence[int]) -> Scored:
        """The best row of each run of rows. `begins`: their first rows."""
        values = self.scores
        if self.logits is not None:
            values = self.logits
        best: list[int] = []
        for begin, end in pairwise([*begins, len(values)]):
            best.append(begin + int(values[begin:end].argmax()))
        logits = None if self.logits is None else self.logits[best]
        windows = [self.windows[row] for row in best] if self.windows else ()
        return replace(self, scores=self.scores[best], logits=logits, windows=windows)


def _concatenated(columns: Sequence[Floats | None]) -> Floats | None:
    present = [column for column in columns if column is not None]
    return np.concatenate(present) if present else None


@dataclass(frozen=True, slots=True)
class _Question(Task[Scored]):
    """Score the documents `inputs` for `query`."""

    splits_itself: ClassVar[bool] = True
    query: str
    inputs: Sequence[str]
    options: RankOptions = DEFAULT
    # False if no later chunk needs the query's vectors
    keeps_query: bool = field(default=True, kw_only=True)
    # Where the windows begin that are to be read
    start: WindowPlace = field(default=BEGINNING, kw_only=True)

    def split(self, max_inputs: int = MAX_CHUNK_DOCUMENTS) -> Sequence[Self]:
        """Return chunks, in order, of at most `max_inputs` documents and MAX_CHUNK_CHARACTERS
        characters."""
        characters = sum(map(len, self.inputs))
        if len(self.inputs) <= max_inputs and characters <= MAX_CHUNK_CHARACTERS:
            return (self,)
        parts = list(runs([len(text) for text in self.inputs], MAX_CHUNK_CHARACTERS, max_inputs))
        if len(parts) < 2:
            return (self,)
        return [self._of(begin, end) for begin, end in parts]

    def rest(self, encodings: Sequence[Encoding]) -> Self | None:
        last = encodings[-1] if encodings else None
        if isinstance(last, WindowEncoding) and last.rest is not None:
            return replace(self, start=last.rest)
        return None

    def cut_documents(self, model: Model) -> Sequence[str]:
        """Cut each document to `max_tokens_per_doc`, before any other cut."""
        limit = self.options.max_tokens_per_doc
        if not limit:
            return self.inputs
        return model.reader.cut_to(self.inputs, limit)


@dataclass(frozen=True, slots=True)
class Rerank(_Question):
    """Score by a reranker, which reads query and document together."""

    heads: ClassVar[frozenset[Head]] = frozenset({Head.SCORES})

    def check(self, spec: ModelSpec) -> None:
        if spec.role != "reranker":
            raise UnsupportedHead("model is not a re-ranker model")
        instruction = self.options.instruction
        if instruction is not None and (
            spec.kind.template is None or "{instruction}" not in "".join(spec.kind.template.parts)
        ):
            raise InvalidInput(NO_INSTRUCTION)
        length = len(instruction or "")
        if length > INSTRUCTION_CHARACTERS_MAX:
            raise InvalidInput(
                f"`instruction` holds {length} characters > maximum allowed "
                f"{INSTRUCTION_CHARACTERS_MAX}"
            )

    def prepare(self, model: Model) -> list[Encoding]:
        options = self.options
        if options.max_tokens is not None:
            model = model.limited(options.max_tokens)
        documents = self.cut_documents(model)
        windows = options.max_chunks_per_doc or 1
        if windows < 2:
            encodings = self._read(model, documents)
        else:
            cut = structs.replace(options, truncate=True)
            probe = replace(
                self,
                query=self.query or ".",
                options=cut,
            )
            empty = len(probe._read(model, [""])[0])
            read = partial(self._read, model)
            longest = model.reader.max_input_length
            encodings = in_windows(
                model.reader,
                documents,
                empty,
                longest,
                read,
                limit=windows,
                truncate=options.truncate is not False,
                start=self.start,
            )
        return encodings if model.spec.kind.template is None else with_shared_prefix(encodings)

    def _read(self, model: Model, documents: Sequence[str]) -> list[Encoding]:
        side, cuts = self.options.truncation_direction, self.options.truncate is not False
        query, longest = self.query, model.reader.max_input_length
        if cuts and len(query) > longest * TOKEN_CHARACTERS:
            # A pair keeps no more of it, and each pair would be tokenised with all of it
            direction = side or model.reader.tokenizer.truncation_side
            (query,) = model.reader.cut_to([query], longest, direction)
        pairs = [(query, document) for document in documents]
        if model.spec.kind.template is None:
            return model.reader.read_pairs(
                pairs,
                truncate=cuts,
                direction=side,
            )
        return model.reader.ask(
            model.spec.kind.template,
            pairs,
            instruction=self.options.instruction,
            truncate=cuts,
            direction=side,
        )

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Scored:
        assert outputs.scores is not None
        logits = refuse_nan(outputs.scores)
        scores = logits if self.options.raw_scores else probabilities(logits)
        scored = Scored(scores[:, 0], logits=logits[:, 0])
        if not self.options.max_chunks_per_doc:
            return scored
        return scored.of_best_windows(encodings, continues=self.start.windows > 0)


OF_QUERY, OF_DOCUMENTS = (EmbedOptions(input_type=side) for side in SIDES)


@dataclass(frozen=True, slots=True)
class RerankByVectors(_Question):
    """Score by vectors of each text alone, from one pass: the mean of the similarities, weighted by
    `weights`.

    If the model has other kinds besides multi-vectors, MaxSim is divided by the number of the
    query's vectors, to have the scale of a cosine. These scores are similarities, so raw scores are
    the same.
    """

    needs_first: ClassVar[bool] = True
    # As the caller gave them, or the checkpoint
    weights: RankWeights | str | None = None
    # The heads to compare, and the share of each in the score
    shares: Mapping[Head, float] = field(default_factory=dict)
    heads: frozenset[Head] = frozenset()
    # False if the model has multi-vectors alone
    is_mean: bool = False
    # The query's vectors, once the first chunk has them
    query_vectors: Embeddings | None = None

    def knowing(self, first: Scored) -> Self:
        """Return the question with the query's vectors, if `first` has them."""
        if first.query is None:
            return self
        return replace(self, query_vectors=first.query, keeps_query=False)

    def check(self, spec: ModelSpec) -> None:
        if self.options.instruction is not None:
            raise InvalidInput(NO_INSTRUCTION)
        weights = self.weights
        if isinstance(weights, str) and weights not in PRESETS:
            raise InvalidInput(
                f"`weights` is {weights!r}; known: {', '.join(PRESETS)}, or a number for each kind"
            )
        if not self.shares:
            raise InvalidInput(NO_WEIGHTS)
        for head in VECTORS if isinstance(weights, RankWeights) else ():
            share = getattr(weights, head)
            if not 0 <= share < np.inf:
                raise InvalidInput(NO_WEIGHTS)
            if share > 0 and head not in self.shares and weights != RankWeights():
                raise InvalidInput(
                    f"`weights` gives `{head}` a share, which this model does not have"
                )

    def prepare(self, model: Model) -> list[Encoding]:
        options = self.options
        if options.max_tokens is not None:
            model = model.limited(options.max_tokens)
        texts = self.cut_documents(model)
        if not self.query and not all(texts):
            raise EmptyInput(
                "`inputs` cannot be empty", next(i for i, text in enumerate(texts) if not text)
            )
        reading = EmbedOptions(
            truncate=options.truncate,
            truncation_direction=options.truncation_direction,
            input_type="document",
        )
        task = Embed(texts, self.heads, reading)
        documents: list[Encoding]
        windows = options.max_chunks_per_doc or 1
        if options.relevant_spans is not None:
            documents = [*task.locate(model, allow_empty=True)]
        elif windows > 1:
            documents = task.in_windows(model, windows, start=self.start)
        else:
            if self.query_vectors is None and _are_read_alike(model):
                with _past_query():
                    return replace(task, inputs=[self.query, *texts]).read(model)
            documents = task.read(model)
        if self.query_vectors is not None:
            return documents
        query = Embed(
            [self.query],
            self.heads,
            structs.replace(reading, input_type="query"),
        )
        with _past_query():
            return [*query.read(model), *documents]

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Scored:
        task = Embed((), self.heads, OF_DOCUMENTS)
        if self.query_vectors is not None:
            query = self.query_vectors
            documents = task.finish(model, encodings, outputs)
        elif not isinstance(model.spec.kind, Late):
            texts = task.finish(model, encodings, outputs)
            query, documents = texts.part(0, 1), texts.part(1, len(encodings))
            encodings = encodings[1:]
        else:
            query_task = Embed((), self.heads, OF_QUERY)
            query = query_task.finish(model, encodings[:1], outputs.part(0, 1))
            documents = task.finish(model, encodings[1:], outputs.part(1, len(encodings)))
            encodings = encodings[1:]
        scores = self._scores(query, documents)
        spans: Sequence[Sequence[RelevantSpan]] = ()
        listing = self.options.relevant_spans
        if listing is not None:
            spans = relevant_spans(
                model.spec,
                query,
                encodings,
                documents,
                listing,
            )
        # A view would keep the vectors of this chunk's documents until the last chunk is done
        scored = Scored(scores, deepcopy(query) if self.keeps_query else None, spans)
        if not self.options.max_chunks_per_doc:
            return scored
        return scored.of_best_windows(encodings, continues=self.start.windows > 0)

    def finishes_aside(self, spec: ModelSpec) -> bool:
        if self.options.relevant_spans is not None:
            return True
        return Embed((), self.heads).finishes_aside(spec)

    def _scores(self, query: Embeddings, documents: Embeddings) -> Floats:
        total: Any = 0
        for head, share in sorted(self.shares.items()):
            total += share * _alike(head, query, documents, mean=self.is_mean)
        return refuse_nan(np.asarray(total / sum(self.shares.values()), dtype=np.float32))


@contextmanager
def _past_query() -> Iterator[None]:
    """Count the place of an error without the query, which is read first; its own error names it,
    at the place of its first document."""
    try:
        yield
    except RequestError as error:
        if error.place == 0:
            error.place = None
            error = error.named("query")
            error.place = 0
        elif error.place is not None:
            error.place -= 1
        raise error from None


Ranking = Rerank | RerankByVectors


def _alike(head: Head, query: Embeddings, documents: Embeddings, *, mean: bool) -> Floats:
    # Heads have the names of columns
    of_query = getattr(query, head)
    of_documents = getattr(documents, head)
    if head is Head.DENSE:
        return np.asarray(of_documents @ of_query[0])
    if head is Head.SPARSE:
        return sparse_dot(of_query, of_documents)
    return maxsim(of_query.row(0), of_documents, mean=mean)


def _are_read_alike(model: Model) -> bool:
    """True if a query becomes the same tokens as a document."""
    has_sides = isinstance(model.spec.kind, Late | Router)
    return not has_sides and not model.reader.prompts.table


def declared_weights(spec: ModelSpec) -> RankWeights | None:
    """Return the checkpoint's weights, since the scale of sparse scores differs between models."""
    shares = None if spec.multivector is None else spec.multivector.shares
    return None if shares is None else RankWeights(shares.dense, shares.sparse, shares.multivector)


def rerank_task(
    spec: ModelSpec, query: str, documents: Sequence[str], options: RankOptions = DEFAULT
) -> Ranking:
    """Return the task for the model. Its `check` raises if the model cannot rank."""
    kinds = spec.heads & VECTORS
    if Head.MULTIVECTOR not in kinds and len(kinds) < 2:
        return Rerank(query, documents, options)
    weights = options.weights
    if weights is None:
        weights = declared_weights(spec)
    # `check` refuses an unknown name
    named = PRESETS.get(weights) if isinstance(weights, str) else weights
    named = named or RankWeights()
    shares = {head: getattr(named, head) for head in sorted(kinds) if getattr(named, head) > 0}
    return RerankByVectors(
        query,
        documents,
        options,
        weights,
        shares,
        frozenset(shares),
        is_mean=len(kinds) > 1,
    )


@dataclass(frozen=True, slots=True)
class RerankPairs(Task[Scored]):
    """Several questions, each about its own documents. Its chunks are the questions' chunks."""

    splits_itself: ClassVar[bool] = True
    questions: Sequence[Ranking]

    @property
    def size(self) -> int:
        """The number of documents of all questions."""
        return sum(question.size for question in self.questions)

    def check(self, spec: ModelSpec) -> None:
        if spec.role not in ("reranker", "embedding"):
            raise UnsupportedHead("Model is neither a re-ranker nor an embedding model")
        for question in self.questions:
            question.check(spec)

    def split(self, max_inputs: int) -> Sequence[Ranking]:
        """Return the chunks of each question, in order."""
        chunks: list[Ranking] = []
        for question in self.questions:
            chunks += replace(question, keeps_query=False).split(max_inputs)
        return chunks


# Similarities of token vectors in memory at a time
BLOCK = 4_000_000


def sparse_dot(query: SparseVectors, documents: SparseVectors) -> Floats:
    """The dot products of one query with each document."""
    lookup = np.zeros(max(query.width, documents.width), dtype=np.float64)
    indices, values = query.row(0)
    lookup[indices] = values
    row = np.repeat(np.arange(len(documents)), np.diff(documents.indptr))
    products = lookup[documents.indices] * documents.values
    return np.bincount(row, products, minlength=len(documents)).astype(np.float32)


def maxsim(query: Floats, documents: Ragged, *, mean: bool) -> Floats:
    """The sum of each query row's best match in a document: unit float32[q, d], n × [t_i, d] ->
    float32[n].

    `mean`: divide by the number of query rows. A document without vectors gets the lowest score; a
    query without vectors gives
    0. Source: ColBERT, Khattab and Zaharia 2020.
    """
    scores = np.zeros(len(documents), dtype=np.float32)
    if not len(query):
        return scores
    lengths = documents.lengths
    scores[lengths == 0] = -len(query)
    for begin, end in runs(lengths.tolist(), max(BLOCK // len(query), 1)):
        rows = np.flatnonzero(lengths[begin:end]) + begin
        if len(rows):
            start = documents.offsets[begin]
            similarity = query @ documents.values[start : documents.offsets[end]].T
            # The best match of each query's row in each document
            best = np.maximum.reduceat(similarity, documents.offsets[rows] - start, axis=1)
            scores[rows] = best.sum(axis=0, dtype=np.float32)
    return scores / np.float32(len(query)) if mean else scores
