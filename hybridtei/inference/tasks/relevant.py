"""The sentences of a document that explain its score: MaxSim's best matches."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from hybridtei.batch import Encoding, Ids, LocatedEncoding, offsets_of
from hybridtei.inference.tasks.embed import have_vectors
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.options import MAX_SPANS, RelevantSpans
from hybridtei.outputs import Embeddings, Floats

SENTENCE = re.compile(r"[^.!?。！？\n]*(?:[.!?。！？]+|\n|$)")
DEFAULT_THRESHOLD = 0.1


class RelevantSpan(Struct, frozen=True):
    """A span of a document's text from code point `start` to `end`, and its share of the MaxSim
    score, from 0 to 1."""

    start: int
    end: int
    score: float


def relevant_spans(
    spec: ModelSpec,
    query: Embeddings,
    encodings: Sequence[Encoding],
    documents: Embeddings,
    options: RelevantSpans,
) -> list[list[RelevantSpan]]:
    """Return each document's spans, the best first. `encodings`: the located encodings of
    `documents`.

    Each vector of the query adds its similarity, divided by the number of vectors, to the sentence
    of its best match. A document has no spans if its vectors have no places in the text, for
    example merged ones.
    """
    if query.multivector is None or documents.multivector is None:
        return []
    spans: list[list[RelevantSpan]] = []
    for encoding, vectors in zip(encodings, documents.multivector, strict=True):
        assert isinstance(encoding, LocatedEncoding)
        offsets = encoding.offsets[_have_rows(spec, encoding.input_ids)]
        spans.append([])
        if len(offsets) == len(vectors):
            spans[-1] = _spans(encoding.text, query.multivector.row(0), vectors, offsets, options)
    return spans


def _spans(
    text: str, query: Floats, vectors: Floats, offsets: Ids, options: RelevantSpans
) -> list[RelevantSpan]:
    # Special tokens and the prompt's tokens lie outside the text
    is_inside = offsets[:, 1] > np.maximum(offsets[:, 0], 0)
    if not len(query) or not is_inside.any():
        return []
    threshold = DEFAULT_THRESHOLD if options.threshold is None else options.threshold
    similarity = query @ vectors.T
    # The best match of each query's vector, and its part of the score
    best = similarity.argmax(axis=1)
    gains = np.maximum(similarity[np.arange(len(query)), best], 0) / len(query)
    ends = np.array([match.end() for match in SENTENCE.finditer(text)])
    sentence = np.minimum(np.searchsorted(ends, offsets[:, 0], side="right"), len(ends) - 1)
    counts = is_inside[best]
    shares = np.bincount(sentence[best[counts]], gains[counts], minlength=len(ends))
    order = np.argsort(-shares, kind="stable")[: options.max_spans or MAX_SPANS]
    spans: list[RelevantSpan] = []
    for i in order.tolist():
        if shares[i] >= threshold and shares[i] > 0:
            start, end = _bounds(text, int(ends[i - 1]) if i else 0, int(ends[i]))
            spans.append(RelevantSpan(start, end, min(float(shares[i]), 1.0)))
    return spans


def _bounds(text: str, start: int, end: int) -> tuple[int, int]:
    """The sentence's bounds without surrounding spaces."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), start + len(part.rstrip())


def _have_rows(spec: ModelSpec, input_ids: Ids) -> NDArray[np.bool_]:
    """Return the mask bool[t] of a document's tokens that have a vector."""
    mask = have_vectors(spec, input_ids, offsets_of([len(input_ids)]))
    skipped = spec.kind.document.skipped
    return mask & ~np.isin(input_ids, list(skipped))
