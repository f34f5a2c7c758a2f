"""Spans: dense, sparse and multi-vectors of parts of a text, from one pass over the whole text.

Offsets are code points, the end exclusive. A token belongs to the spans that contain its first
character, not counting white space before a word. Special tokens and a prompt's tokens belong to no
span. Source: Günther et al. 2024, "Late Chunking".

A text longer than the model is read in windows if it may be cut. They have the model's length in
tokens and start half a length apart; the last one starts early enough to be full. Each span is read
in the window that contains it whole and has the most context on the span's shorter side; of equals,
in the first. So the result depends only on the text, its spans and the model's length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from hybridtei.batch import Encoding, Head, Ids, LocatedEncoding, Offsets, Ragged, offsets_of
from hybridtei.errors import InvalidInput, UnsupportedHead
from hybridtei.inference.backends.heads import Segments, dense, rounded
from hybridtei.inference.backends.numpy_functions import NUMPY
from hybridtei.inference.tasks.base import Model, Task
from hybridtei.inference.tasks.embed import Embed, have_vectors
from hybridtei.models.checkpoint.classifiers import Layer
from hybridtei.models.checkpoint.layers import step_layer
from hybridtei.models.checkpoint.modules import StepModule
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.tokenizer import Prompts
from hybridtei.outputs import Embeddings, Floats, HeadOutputs, SparseVectors, max_weights

Spans = Sequence[tuple[int, int]]
ENDS = 2
# Of an id and of a code point, as in the HTTP API
LARGEST = 2**32
# Bound of all spans' tokens, in times the text's
MAX_COVERAGE = 4
# Spans of a text, checked on an event loop
MAX_COMPARED = 1000
# Chunks of a request; Voyage's bound
MAX_CHUNKS = 16_000
# Bound of a text's length, in times the model's
MAX_WINDOWS = 16


@dataclass(frozen=True, slots=True)
class SpanText:
    """A text and its spans, each (first code point, code point after the last)."""

    text: str
    spans: Spans


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SpanEncoding(Encoding):
    """An encoding with the places of each span's tokens, and the spans' rows in the answer."""

    places: Ragged
    rows: Ids


@dataclass(frozen=True, slots=True)
class EmbedSpans(Task[Embeddings]):
    """Answers `task` for each span of each input, in order. Errors name spans by `field` and the
    input's place + `first`."""

    embeds: ClassVar[bool] = True
    inputs: Sequence[SpanText]
    task: Embed
    field: str = "inputs[{}].spans"
    first: int = 0

    @property
    def heads(self) -> frozenset[Head]:
        """The pass's heads. Dense vectors of spans are means of token states."""
        heads = self.task.heads
        if Head.DENSE in heads:
            return heads - {Head.DENSE} | {Head.TOKENS}
        return heads

    def lacks_side(self, prompts: Prompts) -> bool:
        return self.task.lacks_side(prompts)

    def check(self, spec: ModelSpec) -> None:
        self.task.check(spec)
        if Head.DENSE in self.task.heads and spec.pooling != ("mean",):
            raise UnsupportedHead(
                "`spans`: the dense vector of a span is the mean of its tokens' states, but the "
                f"model pools by {', '.join(spec.pooling)}: leave `dense` out of `outputs`"
            )
        is_whole = spec.sparse is not None and spec.sparse.kind in ("splade", "code")
        if Head.SPARSE in self.task.heads and is_whole:
            raise UnsupportedHead(
                "`spans`: the model's sparse vectors are of whole texts, not of tokens"
            )
        if self.task.side(spec).expansion is not None:
            raise UnsupportedHead(
                "`spans`: the model expands its queries, which have no spans; send `input_type` "
                "document"
            )

    def _of(self, begin: int, end: int) -> EmbedSpans:
        return replace(self, inputs=self.inputs[begin:end], first=self.first + begin)

    def prepare(self, model: Model) -> list[Encoding]:
        """Tokenise, and find each span's tokens. Raises RequestError, for a span with its place and
        offsets."""
        self.task.check_width(model.spec)
        model = model.limited(self.task.options.max_tokens)
        reader, side = model.reader, self.task.side(model.spec)
        longest = reader.max_input_length
        if side is not None and side.length:
            longest = min(longest, side.length)
        times = MAX_WINDOWS if self.task.options.truncate is not False else 1
        for place, item in enumerate(self.inputs):
            self._check(place, item, MAX_COVERAGE * times * reader.max_input_length)
        encodings: list[Encoding] = []
        row = 0
        texts = replace(self.task, inputs=[item.text for item in self.inputs])
        for place, (item, located) in enumerate(
            zip(self.inputs, texts.locate(model, times=times), strict=True)
        ):
            encodings += self._spanned(place, item, located, longest, row)
            row += len(item.spans)
        return encodings

    def finish(
        self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs
    ) -> Embeddings:
        """Reduce the pass's outputs to one row a span."""
        spec, heads = model.spec, self.task.heads
        input_ids = np.concatenate([encoding.input_ids for encoding in encodings])
        cu_seqlens = offsets_of([len(encoding) for encoding in encodings])
        spans = _flat(encodings, cu_seqlens)
        columns: dict[str, Any] = {}
        if Head.DENSE in heads:
            columns["dense"] = self.task.scaled(spec, _dense(spec, encodings, outputs))
        if Head.SPARSE in heads:
            columns["sparse"] = _sparse(spec, input_ids, spans, outputs)
        if Head.MULTIVECTOR in heads:
            columns["multivector"] = self._multivector(model, input_ids, cu_seqlens, spans, outputs)
        if Head.TOKENS in heads:
            assert outputs.tokens is not None
            columns["tokens"] = Ragged(outputs.tokens.values[spans.values], spans.offsets)
        answer = Embeddings(**columns)
        rows = np.concatenate([_spans_of(encoding).rows for encoding in encodings])
        if (np.diff(rows) == 1).all():
            return answer
        return answer.take(rows.argsort())

    def max_numbers(self, spec: ModelSpec, tokens: int) -> int:
        rows = sum(len(item.spans) for item in self.inputs)
        covered, pooled = 1, 0
        if Head.MULTIVECTOR in self.task.heads:
            covered = max(_depth(item.spans) for item in self.inputs)
        # Pooled states are not part of the answer, but stay in memory until it is made.
        if Head.DENSE in self.task.heads:
            pooled = rows * spec.dense_width + tokens * spec.hidden_size
        return pooled + replace(self.task, inputs=("",) * rows).max_numbers(spec, tokens * covered)

    def finishes_aside(self, spec: ModelSpec) -> bool:
        return True

    def _check(self, place: int, item: SpanText, cap: int) -> None:
        name = self._name(place)
        if not item.spans:
            raise InvalidInput(f"`{name}` names no span")
        if len(item.spans) > cap:
            raise InvalidInput(
                f"`{name}` holds {len(item.spans)} spans > maximum allowed {cap}: each has a token"
            )

    def _name(self, place: int) -> str:
        return self.field.format(self.first + place)

    def _spanned(
        self, place: int, item: SpanText, located: LocatedEncoding, longest: int, row: int
    ) -> Iterator[SpanEncoding]:
        """The text as one encoding, or as one for each window. `row`: the row of its first span."""
        name = self._name(place)
        # The text's own tokens, and the sorted places of their first characters
        own = np.flatnonzero(~located.special & (located.offsets[:, 1] > 0))
        starts = np.maximum.accumulate(_first_characters(item.text, located.offsets[own]))
        spans = np.array(item.spans, dtype=np.int64)
        edges = np.searchsorted(starts, spans)
        counts = edges[:, 1] - edges[:, 0]
        wrong = (counts < 1) | (spans[:, 1] > len(item.text))
        if wrong.any():
            index = int(wrong.argmax())
            begin, end = spans[index].tolist()
            fault = "holds no token" if end <= len(item.text) else "ends beyond the text"
            raise InvalidInput(
                f"`{name}[{index}]` is [{begin}, {end}], which {fault}: {len(item.text)} code "
                f"points, of which {len(own)} tokens are read"
            )
        total, limit = int(counts.sum()), MAX_COVERAGE * len(own)
        if total > limit:
            raise InvalidInput(
                f"`{name}` hold {total} tokens in all > maximum allowed {limit}, {MAX_COVERAGE} x "
                "the text's"
            )
        rows = np.arange(row, row + len(spans))
        if len(located) <= longest:
            yield _encoding(located, np.arange(len(located)), own, edges, rows)
            return
        head, tail = np.arange(own[0]), np.arange(own[-1] + 1, len(located))
        room = longest - len(head) - len(tail)
        windows = windows_over(np.arange(len(own)), np.arange(1, len(own) + 1), max(2, room))
        chosen = window_of_each(windows, edges)
        if (chosen < 0).any():
            index = int(chosen.argmin())
            raise InvalidInput(
                f"`{name}[{index}]` is {spans[index].tolist()}, which holds {counts[index]} "
                f"tokens > maximum allowed {room // 2} of a text that is longer than the model "
                "reads"
            )
        for window in np.unique(chosen):
            begin, end = windows[window].tolist()
            is_here = chosen == window
            tokens = np.concatenate([head, own[begin:end], tail])
            own_here = len(head) + np.arange(end - begin)
            yield _encoding(located, tokens, own_here, edges[is_here] - begin, rows[is_here])

    def _multivector(
        self, model: Model, input_ids: Ids, cu_seqlens: Offsets, spans: Ragged, outputs: HeadOutputs
    ) -> Ragged | None:
        spec = model.spec
        assert outputs.multivector is not None
        mask = have_vectors(spec, input_ids, cu_seqlens)
        row_of = np.cumsum(mask) - 1
        side = self.task.side(spec)
        if side is not None:
            mask = mask & ~np.isin(input_ids, list(side.skipped))
            if side.pooling is not None:
                side = replace(side, pooling=replace(side.pooling, protected=0))
        has_vector = mask[spans.values]
        rows = outputs.multivector.values[row_of[spans.values[has_vector]]]
        lengths = np.add.reduceat(has_vector.astype(np.int64), spans.offsets[:-1])
        return self.task.merged(
            model, side, Ragged(rows, offsets_of(lengths)), input_ids[spans.values[has_vector]]
        )


def span_texts(texts: Sequence[Any], lists: Sequence[Any], field: str) -> list[SpanText]:
    """Return texts with their spans. Raises InvalidInput unless each item is a text and each span a
    pair of numbers."""
    if len(lists) != len(texts):
        raise InvalidInput(
            f"`spans` holds {len(lists)} lists for {len(texts)} `{field}`; each needs its own"
        )
    for place, (text, spans) in enumerate(zip(texts, lists, strict=True)):
        if not isinstance(text, str):
            raise InvalidInput(
                f"`{field}[{place}]` is of type {type(text).__name__}; only a text has spans"
            )
        for index, span in enumerate(spans):
            if len(span) != ENDS or not all(
                type(end) is int and 0 <= end < LARGEST for end in span
            ):
                wrong = f"`{field}[{place}].spans[{index}]` is {span!r}"
                raise InvalidInput(f"{wrong}; a span is two whole numbers from 0 to {LARGEST - 1}")
    return [SpanText(text, list(spans)) for text, spans in zip(texts, lists, strict=True)]


def joined(chunks: Sequence[str]) -> SpanText:
    """Join chunks to a text, with each chunk as a span. Chunks that do not end in white space are
    joined by a space."""
    parts: list[str] = []
    spans, end, last = [], 0, " "
    for chunk in chunks:
        blank = "" if last.isspace() or chunk[:1].isspace() else " "
        begin, last = end + len(blank), chunk[-1:] or last
        end = begin + len(chunk)
        spans.append((begin, end))
        parts += [blank, chunk]
    return SpanText("".join(parts), spans)


def _encoding(
    located: LocatedEncoding, tokens: Ids, own: Ids, edges: Ids, rows: Ids
) -> SpanEncoding:
    """An encoding of a window of a text. `own`: the text's own tokens. `edges` int64[n, 2]: spans
    as places among these."""
    counts = edges[:, 1] - edges[:, 0]
    offsets = offsets_of(counts)
    types = located.token_type_ids
    places = own[np.repeat(edges[:, 0] - offsets[:-1], counts) + np.arange(offsets[-1])]
    return SpanEncoding(
        located.input_ids[tokens],
        None if types is None else types[tokens],
        located.unseen,
        located.adapter,
        places=Ragged(places, offsets),
        rows=rows,
    )


def _first_characters(text: str, offsets: Ids) -> Ids:
    """Return the starts int64[t] of tokens, without the white space that some tokenizers include in
    a word."""
    if not len(offsets):
        return offsets[:, 0]
    # Only the part with tokens is looked at, since the text may be far longer
    begin = max(0, int(offsets[:, 0].min()))
    end = int(offsets[:, 1].max())
    characters = np.frombuffer(text[begin:end].encode("utf-32-le", "surrogatepass"), dtype="<u4")
    spaces = [character for character in np.unique(characters).tolist() if chr(character).isspace()]
    places = np.where(np.isin(characters, spaces), len(characters), np.arange(len(characters)))
    # For each character, the place of the next one that is no space, itself included
    next_visible = np.append(np.minimum.accumulate(places[::-1])[::-1], len(characters))
    starts = np.clip(offsets[:, 0] - begin, 0, len(characters))
    first = begin + next_visible[starts]
    return np.where(first < offsets[:, 1], first, offsets[:, 0])


def _depth(spans: Spans) -> int:
    """Return the largest number of overlapping spans, at most `MAX_COVERAGE`; for very many spans
    this bound, uncounted."""
    if len(spans) > MAX_COMPARED:
        return MAX_COVERAGE
    places = np.array(spans, dtype=np.int64)
    # A step up at each begin, and down at each end; at the same place the ends come first
    steps = np.repeat([1, -1], len(places))
    edges = places.T.ravel()
    depths = np.cumsum(steps[np.lexsort((steps, edges))])
    return min(MAX_COVERAGE, int(depths.max()))


def _spans_of(encoding: Encoding) -> SpanEncoding:
    assert isinstance(encoding, SpanEncoding)
    return encoding


def _flat(encodings: Sequence[Encoding], cu_seqlens: Offsets) -> Ragged:
    """Return the tokens of all spans of all encodings, as rows of the pass."""
    places = [_spans_of(encoding).places for encoding in encodings]
    return Ragged.concat(
        [
            Ragged(spans.values + begin, spans.offsets)
            for spans, begin in zip(places, cu_seqlens[:-1], strict=True)
        ]
    )


def _dense(spec: ModelSpec, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Floats:
    """Pool the states text by text, since spans may contain each state four times."""
    assert outputs.tokens is not None
    steps = _steps(spec.kind.steps)
    parts = []
    for encoding, rows in zip(encodings, outputs.tokens, strict=True):
        places = _spans_of(encoding).places
        at = Segments(places.offsets, places.offsets)
        parts.append(dense(NUMPY, rows[places.values], at, spec.pooling, steps))
    vectors = np.concatenate(parts)
    return rounded(NUMPY, vectors) if spec.kind.is_rounded else vectors


def _sparse(spec: ModelSpec, input_ids: Ids, spans: Ragged, outputs: HeadOutputs) -> SparseVectors:
    assert outputs.token_weights is not None
    weights = outputs.token_weights.values[spans.values]
    return max_weights(
        input_ids[spans.values], weights, spans.offsets, spec.removed_ids, spec.vocab_size
    )


@lru_cache(maxsize=8)
def _steps(modules: tuple[StepModule, ...]) -> tuple[Layer, ...]:
    """Return the layers after the pooling, read once."""
    return tuple(map(step_layer, modules))


# Windows that can contain a token: three that start half a length apart, and the last, which may
# start earlier
CANDIDATES = 4


def windows_over(starts: Ids, ends: Ids, room: int) -> Ids:
    """Return windows int64[w, 2] of at most `room` tokens, each from one of `starts` to one of
    `ends`. Both are sorted.

    Every part of at most `room // 2` tokens, from one of `starts` to one of `ends`, is inside a
    window.
    """
    windows: list[tuple[int, int]] = []
    place = 0
    while True:
        begin = int(starts[place])
        end = int(ends[max(0, int(np.searchsorted(ends, begin + room, "right")) - 1)])
        if end >= ends[-1]:
            begin = min(begin, int(starts[int(np.searchsorted(starts, end - room))]))
        windows.append((begin, end))
        following = max(place + 1, int(np.searchsorted(starts, begin + room // 2)))
        if end >= ends[-1] or following >= len(starts):
            return np.array(windows, dtype=np.int64)
        place = following


def window_of_each(windows: Ids, spans: Ids) -> Ids:
    """Return the window int64[n] in which each of the spans int64[n, 2] is read; -1 for a span that
    fits no window."""
    latest = np.searchsorted(windows[:, 0], spans[:, 0], "right") - 1
    places = np.maximum(latest[:, None] - np.arange(CANDIDATES)[::-1], 0)
    begins, ends = windows[places, 0], windows[places, 1]
    # The context before and after a span in each window; below 0: the span is not inside it
    left, right = spans[:, :1] - begins, ends - spans[:, 1:]
    shorter_side = np.maximum(np.minimum(left, right), -1)
    best = shorter_side.argmax(axis=1)[:, None]
    windows_of_spans = np.take_along_axis(places, best, 1)[:, 0]
    fits = np.take_along_axis(shorter_side, best, 1)[:, 0] >= 0
    return np.where(fits, windows_of_spans, -1)
