"""Reranking: one query and many documents -> a score for each document.

A reranker reads query and document together. A model with token vectors reads each alone, and the
query only once. Ten thousand documents run in chunks, which bounds the memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Self

import numpy as np

from hybridtei.batch import (
    VECTORS,
    Characters,
    Encoding,
    Head,
    Ragged,
    WindowEncoding,
    runs,
    with_shared_prefix,
)
from hybridtei.errors import EmptyInput, InvalidInput, RequestError, UnsupportedHead
from hybridtei.inference.tasks.base import Model, Task
from hybridtei.inference.tasks.embed import Embed
from hybridtei.inference.tasks.label import probabilities
from hybridtei.inference.tasks.relevant import RelevantSpan, RelevantSpans, relevant_spans
from hybridtei.inference.tasks.windows import in_windows
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.tokenizer import Direction
from hybridtei.outputs import Embeddings, Floats, HeadOutputs, SparseVectors, best_first, refuse_nan

MAX_CHUNK_DOCUMENTS = 256
# Of a chunk's documents, whose token vectors take some 60 MB
MAX_CHUNK_CHARACTERS = 65_536
# Of `instruction`, since it is tokenised again for each document
INSTRUCTION_CHARACTERS_MAX = 4_096


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
        spans = [spans for part in parts for spans in part.spans]
        logits = [part.logits for part in parts if part.logits is not None]
        windows: list[Characters | None] = []
        for part in parts:
            windows += part.windows
        return Scored(
            np.concatenate([part.scores for part in parts]),
            parts[0].query,
            spans,
            np.concatenate(logits) if logits else None,
            windows,
        )

    def of_best_windows(self, encodings: Sequence[Encoding]) -> Scored:
        """The scores of documents from those of their windows: each document's best one counts."""
        windows = [item for item in encodings if isinstance(item, WindowEncoding)]
        if not windows:
            return self
        values = self.scores
        if self.logits is not None:
            values = self.logits
        begins = np.flatnonzero(np.diff([window.document for window in windows], prepend=-1))
        best: list[int] = []
        characters: list[Characters | None] = []
        for begin, end in pairwise([*begins.tolist(), len(windows)]):
            row = begin + int(values[begin:end].argmax())
            best.append(row)
            characters.append(windows[row].characters if end - begin > 1 else None)
        logits = None if self.logits is None else self.logits[best]
        return replace(self, scores=self.scores[best], logits=logits, windows=characters)


@dataclass(frozen=True, slots=True)
class _Question(Task[Scored]):
    """Score the documents `inputs` for `query`. `max_document_tokens`: cut each document to this
    number before any other cut. `max_tokens`: as for `Model.limited`. `windows`: read a document
    that is longer than the model in at most this many windows; the best one counts."""

    splits_itself: ClassVar[bool] = True
    query: str
    inputs: Sequence[str]
    truncate: bool = True
    direction: Direction | None = None
    raw_scores: bool = False
    max_document_tokens: int | None = field(default=None, kw_only=True)
    max_tokens: int | None = field(default=None, kw_only=True)
    windows: int = field(default=1, kw_only=True)
    # False if no later chunk needs the query's vectors
    keeps_query: bool = field(default=True, kw_only=True)

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

    def cut_documents(self, model: Model) -> Sequence[str]:
        """Cut each document to `max_document_tokens`."""
        limit = self.max_document_tokens
        if limit is None:
            return self.inputs
        return model.reader.cut_to(self.inputs, limit)


@dataclass(frozen=True, slots=True)
class Rerank(_Question):
    """Score by a reranker, which reads query and document together. `instruction`: the criterion
    for a language model."""

    instruction: str | None = None
    heads: ClassVar[frozenset[Head]] = frozenset({Head.SCORES})

    def check(self, spec: ModelSpec) -> None:
        if spec.kind != "reranker":
            raise UnsupportedHead("model is not a re-ranker model")
        if self.instruction is not None and (
            spec.template is None or "{instruction}" not in "".join(spec.template.parts)
        ):
            raise InvalidInput(
                "`instruction` is for rerankers that are language models; this one takes none"
            )
        length = len(self.instruction or "")
        if length > INSTRUCTION_CHARACTERS_MAX:
            raise InvalidInput(
                f"`instruction` holds {length} characters > maximum allowed "
                f"{INSTRUCTION_CHARACTERS_MAX}"
            )

    def prepare(self, model: Model) -> list[Encoding]:
        if self.max_tokens is not None:
            model = model.limited(self.max_tokens)
        documents = self.cut_documents(model)
        if self.windows < 2:
            encodings = self._read(model, documents)
        else:
            empty = len(replace(self, query=self.query or ".", truncate=True)._read(model, [""])[0])
            read = partial(self._read, model)
            longest = model.reader.max_input_length
            encodings = in_windows(
                model.reader,
                documents,
                empty,
                longest,
                read,
                limit=self.windows,
                truncate=self.truncate,
            )
        return encodings if model.spec.template is None else with_shared_prefix(encodings)

    def _read(self, model: Model, documents: Sequence[str]) -> list[Encoding]:
        pairs = [(self.query, document) for document in documents]
        if model.spec.template is None:
            return model.reader.read_pairs(pairs, truncate=self.truncate, direction=self.direction)
        return model.reader.ask(
            model.spec.template,
            pairs,
            instruction=self.instruction,
            truncate=self.truncate,
            direction=self.direction,
        )

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Scored:
        assert outputs.scores is not None
        logits = refuse_nan(outputs.scores)
        scores = logits if self.raw_scores else probabilities(logits)
        scored = Scored(scores[:, 0], logits=logits[:, 0])
        return scored if self.windows < 2 else scored.of_best_windows(encodings)


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The weight of each kind of vector in a score. The sum need not be 1."""

    dense: float = 1.0
    sparse: float = 1.0
    multivector: float = 1.0

    @property
    def by_name(self) -> dict[str, float]:
        """The weights by the names of heads, which are also the names of stored vectors."""
        return {"dense": self.dense, "sparse": self.sparse, "multivector": self.multivector}

    def check(self, kinds: Collection[str]) -> None:
        """Raises InvalidInput for weights that are no shares, or of heads other than `kinds`."""
        for head, share in self.by_name.items():
            if not 0 <= share < np.inf:
                raise InvalidInput(NO_WEIGHTS)
            if share > 0 and head not in kinds and self != RankWeights():
                raise InvalidInput(
                    f"`weights` gives `{head}` a share, which this model does not have"
                )


NO_WEIGHTS = "`weights` should be numbers of at least 0, not all of them 0"


# Weights of BGE-M3's authors, for `/rerank` and `/search`. Multi-vector scores are means over the
# query's vectors. `m3`: passages. `m3-long`: long documents. `m3-two`: two kinds of vectors.
PRESETS = {
    "m3": RankWeights(1.0, 0.3, 1.0),
    "m3-long": RankWeights(0.15, 0.5, 0.35),
    "m3-two": RankWeights(1.0, 0.3, 0.0),
}


def preset(name: str) -> RankWeights | None:
    """Return the weights of this name, or None."""
    return PRESETS.get(name)


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
    spans: RelevantSpans | None = None

    def knowing(self, first: Scored) -> Self:
        """Return the question with the query's vectors."""
        return replace(self, query_vectors=first.query, keeps_query=False)

    def check(self, spec: ModelSpec) -> None:
        weights = self.weights
        if isinstance(weights, str) and preset(weights) is None:
            raise InvalidInput(
                f"`weights` is {weights!r}; known: {', '.join(PRESETS)}, or a number for each kind"
            )
        if not self.shares:
            raise InvalidInput(NO_WEIGHTS)
        if isinstance(weights, RankWeights):
            weights.check(self.shares)

    def prepare(self, model: Model) -> list[Encoding]:
        if self.max_tokens is not None:
            model = model.limited(self.max_tokens)
        texts = self.cut_documents(model)
        if not self.query and not all(texts):
            raise EmptyInput(
                "`inputs` cannot be empty", next(i for i, text in enumerate(texts) if not text)
            )
        task = Embed(texts, self.heads, self.truncate, self.direction, input_type="document")
        documents: list[Encoding]
        if self.spans is not None:
            documents = [*task.locate(model, allow_empty=True)]
        elif self.windows > 1:
            documents = task.in_windows(model, self.windows)
        else:
            if self.query_vectors is None and _are_read_alike(model):
                with _past_query():
                    return replace(task, inputs=[self.query, *texts]).read(model)
            documents = task.read(model)
        if self.query_vectors is not None:
            return documents
        query = replace(task, inputs=[self.query], input_type="query")
        with _past_query():
            return [*query.read(model), *documents]

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Scored:
        task = Embed((), self.heads, input_type="document")
        if self.query_vectors is not None:
            query = self.query_vectors
            documents = task.finish(model, encodings, outputs)
        elif model.spec.late is None:
            texts = task.finish(model, encodings, outputs)
            query, documents = texts.part(0, 1), texts.part(1, len(encodings))
            encodings = encodings[1:]
        else:
            query_task = replace(task, input_type="query")
            query = query_task.finish(model, encodings[:1], outputs.part(0, 1))
            documents = task.finish(model, encodings[1:], outputs.part(1, len(encodings)))
            encodings = encodings[1:]
        scores = self._scores(query, documents)
        spans: Sequence[Sequence[RelevantSpan]] = ()
        if self.spans is not None:
            spans = relevant_spans(model.spec, query, encodings, documents, self.spans)
        # A view would keep the vectors of this chunk's documents until the last chunk is done
        scored = Scored(scores, deepcopy(query) if self.keeps_query else None, spans)
        return scored if self.windows < 2 else scored.of_best_windows(encodings)

    def finishes_aside(self, spec: ModelSpec) -> bool:
        if self.spans is not None:
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
    return model.spec.late is None and model.query is None and not model.reader.prompts.table


def declared_weights(spec: ModelSpec) -> RankWeights | None:
    """Return the checkpoint's weights, since the scale of sparse scores differs between models."""
    shares = None if spec.multivector is None else spec.multivector.shares
    return None if shares is None else RankWeights(shares.dense, shares.sparse, shares.multivector)


def rerank_task(
    spec: ModelSpec,
    query: str,
    documents: Sequence[str],
    *,
    truncate: bool = True,
    direction: Direction | None = None,
    raw_scores: bool = False,
    instruction: str | None = None,
    weights: RankWeights | str | None = None,
    max_document_tokens: int | None = None,
    max_tokens: int | None = None,
    spans: RelevantSpans | None = None,
    windows: int = 1,
) -> Ranking:
    """Return the task for the model. Its `check` raises if the model cannot rank."""
    kinds = spec.heads & VECTORS
    if Head.MULTIVECTOR in kinds or len(kinds) > 1:
        if weights is None:
            weights = declared_weights(spec)
        # `check` refuses an unknown name
        named = preset(weights) if isinstance(weights, str) else weights
        by_name = (named or RankWeights()).by_name
        shares = {head: by_name[head] for head in sorted(kinds) if by_name[head] > 0}
        return RerankByVectors(
            query,
            documents,
            truncate,
            direction,
            raw_scores,
            weights,
            shares,
            frozenset(shares),
            is_mean=len(kinds) > 1,
            spans=spans,
            max_document_tokens=max_document_tokens,
            max_tokens=max_tokens,
            windows=windows if spans is None else 1,
        )
    return Rerank(
        query,
        documents,
        truncate,
        direction,
        raw_scores,
        instruction,
        max_document_tokens=max_document_tokens,
        max_tokens=max_tokens,
        windows=windows,
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
        if spec.kind not in ("reranker", "embedding"):
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
