"""Which stretches of a document made its rank: MaxSim's best matches, sentence by sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from hybridtei.batch import Encoding, Ids, LocatedEncoding, kept_tokens, offsets_of
from hybridtei.inference.tasks.base import Model
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.outputs import Embeddings, Floats

SENTENCE = re.compile(r"[^.!?。！？\n]*(?:[.!?。！？]+|\n|$)")
MAX_SPANS = 32  # of a document; each is written out
MAX_PREFIX_TOKENS = 512  # before a document's own: a prompt, a marker


class RelevantSpan(Struct, frozen=True):
    """Characters `start` to `end` of what is read of a document, in code points, and their share of its MaxSim, of 0 to 1."""

    start: int
    end: int
    score: float


@dataclass(frozen=True, slots=True)
class SpanOptions:
    """Spans of a score of `threshold` and more, the best `max_spans` of each document."""

    threshold: float = 0.1
    max_spans: int = MAX_SPANS


class RelevantSpans(Struct, frozen=True):
    """Which spans of documents are listed; Cohere's field."""

    mode: Literal["enabled", "disabled"]
    threshold: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, Meta(description="Least score of one [default: 0.1].")] = (
        None
    )
    max_spans: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_SPANS)] | None, Meta(description="The best so many of each document [default: 32].")
    ] = None

    @property
    def options(self) -> SpanOptions | None:
        if self.mode == "disabled":
            return None
        return SpanOptions(0.1 if self.threshold is None else self.threshold, self.max_spans or MAX_SPANS)


def relevant_spans(
    model: Model,
    query: Embeddings,
    texts: Sequence[str],
    encodings: Sequence[Encoding],
    documents: Embeddings,
    *,
    options: SpanOptions,
) -> list[list[RelevantSpan]]:
    """The spans of each document, the best first; `encodings` are what was embedded of the documents.

    Each of the query's vectors gives its similarity, divided by their number, to the sentence of its best match. A document
    whose vectors cannot be led back to places in its text, as where vectors are merged, has none.
    """
    if query.multivector is None or documents.multivector is None:
        return []
    located = model.reader.locate([text or " " for text in texts], truncate=True)
    found = []
    for row, (text, encoding, places) in enumerate(zip(texts, encodings, located, strict=True)):
        offsets, vectors = _offsets(model.spec, encoding, places), documents.multivector.row(row)
        is_whole = len(offsets) == len(vectors)
        found.append(_spans(text, query.multivector.row(0), vectors, offsets, options) if is_whole else [])
    return found


def _spans(text: str, query: Floats, vectors: Floats, offsets: Ids, options: SpanOptions) -> list[RelevantSpan]:
    inside = offsets[:, 1] > offsets[:, 0]
    if not len(query) or not inside.any():
        return []
    alike = query @ vectors.T
    best = alike.argmax(axis=1)
    gains = np.maximum(alike[np.arange(len(query)), best], 0) / len(query)
    ends = np.array([match.end() for match in SENTENCE.finditer(text)])
    sentence = np.minimum(np.searchsorted(ends, offsets[:, 0], side="right"), len(ends) - 1)
    shares = np.bincount(sentence[best[inside[best]]], gains[inside[best]], minlength=len(ends))
    order = np.argsort(-shares, kind="stable")[: options.max_spans]
    return [
        RelevantSpan(*_bounds(text, int(ends[i - 1]) if i else 0, int(ends[i])), min(float(shares[i]), 1.0))
        for i in order.tolist()
        if shares[i] >= options.threshold and shares[i] > 0
    ]


def _bounds(text: str, start: int, end: int) -> tuple[int, int]:
    """Without the blanks around it."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), start + len(part.rstrip())


def _offsets(spec: ModelSpec, encoding: Encoding, located: LocatedEncoding) -> Ids:
    """The places int64[t, 2] of the tokens that have a vector; (0, 0) for those that are not the text's own."""
    ids = encoding.input_ids
    offsets = np.zeros((len(ids), 2), dtype=np.int64)
    own, places = located.input_ids[~located.special], located.offsets[~located.special]
    for begin in range(min(len(ids), MAX_PREFIX_TOKENS)):
        length = min(len(own), len(ids) - begin)
        same = ids[begin : begin + length] == own[:length]
        length = length if same.all() else int(same.argmin())
        if length and (length == len(own) or begin + length >= len(ids) - 1):  # a prompt takes the room of the last ones
            offsets[begin : begin + length] = places[:length]
            break
    else:
        return np.empty((0, 2), dtype=np.int64)
    assert spec.multivector is not None
    kept, _ = kept_tokens(
        spec.multivector.drop, ids, offsets_of([len(ids)]), np.array(sorted(spec.removed_ids), dtype=np.int64)
    )
    side = None if spec.late is None else spec.late.document
    if side is not None and side.skipped:
        kept &= ~np.isin(ids, list(side.skipped))
    return offsets[kept]
