"""Which stretches of a document made its rank: MaxSim's best matches, sentence by sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from hybridtei.batch import Encoding, Ids, LocatedEncoding, offsets_of
from hybridtei.inference.tasks.embed import have_vectors
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.outputs import Embeddings, Floats

SENTENCE = re.compile(r"[^.!?。！？\n]*(?:[.!?。！？]+|\n|$)")
MAX_SPANS = 32  # of a document; each is written out
DEFAULT_THRESHOLD = 0.1


class RelevantSpan(Struct, frozen=True):
    """Characters `start` to `end` of what is read of a document, in code points, and their share of its MaxSim, of 0 to 1."""

    start: int
    end: int
    score: float


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
    def if_enabled(self) -> RelevantSpans | None:
        """These options, or None where the mode is "disabled"."""
        return None if self.mode == "disabled" else self


def relevant_spans(
    spec: ModelSpec, query: Embeddings, encodings: Sequence[Encoding], documents: Embeddings, options: RelevantSpans
) -> list[list[RelevantSpan]]:
    """Return the spans of each document, the best first; `encodings`: located ones, of which `documents` were computed.

    Each of the query's vectors gives its similarity, divided by their number, to the sentence of its best match. A document
    whose vectors cannot be led back to places in its text, as where vectors are merged, has none.
    """
    if query.multivector is None or documents.multivector is None:
        return []
    found = []
    for encoding, vectors in zip(encodings, documents.multivector, strict=True):
        assert isinstance(encoding, LocatedEncoding)
        offsets = encoding.offsets[_have_rows(spec, encoding.input_ids)]
        is_whole = len(offsets) == len(vectors)
        found.append(_spans(encoding.text, query.multivector.row(0), vectors, offsets, options) if is_whole else [])
    return found


def _spans(text: str, query: Floats, vectors: Floats, offsets: Ids, options: RelevantSpans) -> list[RelevantSpan]:
    inside = offsets[:, 1] > np.maximum(offsets[:, 0], 0)  # neither special tokens nor those of a prompt
    if not len(query) or not inside.any():
        return []
    least = DEFAULT_THRESHOLD if options.threshold is None else options.threshold
    alike = query @ vectors.T
    best = alike.argmax(axis=1)
    gains = np.maximum(alike[np.arange(len(query)), best], 0) / len(query)
    ends = np.array([match.end() for match in SENTENCE.finditer(text)])
    sentence = np.minimum(np.searchsorted(ends, offsets[:, 0], side="right"), len(ends) - 1)
    shares = np.bincount(sentence[best[inside[best]]], gains[inside[best]], minlength=len(ends))
    order = np.argsort(-shares, kind="stable")[: options.max_spans or MAX_SPANS]
    return [
        RelevantSpan(*_bounds(text, int(ends[i - 1]) if i else 0, int(ends[i])), min(float(shares[i]), 1.0))
        for i in order.tolist()
        if shares[i] >= least and shares[i] > 0
    ]


def _bounds(text: str, start: int, end: int) -> tuple[int, int]:
    """Without the blanks around it."""
    part = text[start:end]
    return start + len(part) - len(part.lstrip()), start + len(part.rstrip())


def _have_rows(spec: ModelSpec, input_ids: Ids) -> NDArray[np.bool_]:
    """Return which tokens of a document have a vector: bool[t]."""
    kept = have_vectors(spec, input_ids, offsets_of([len(input_ids)]))
    side = None if spec.late is None else spec.late.document
    return kept if side is None or not side.skipped else kept & ~np.isin(input_ids, list(side.skipped))
