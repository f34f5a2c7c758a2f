"""Tagging: texts in, labelled spans of them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Encoding, Head, LocatedEncoding
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import UnsupportedHead
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.tasks.embed import Model
from hybridtei.tasks.scores import refuse_nan, softmax
from hybridtei.tasks.spans import Aggregation, Span, Tokens, continues_word, spans
from hybridtei.text.tokenizer import Direction


@dataclass(frozen=True, slots=True, eq=False)
class TaggedToken:
    """A token and its score for each label, in the order of the model's labels. `special`: `text` is the vocabulary's word."""

    text: str
    token_id: int
    start: int
    end: int
    scores: Floats
    special: bool = False


@dataclass(frozen=True, slots=True)
class Tagged:
    """Of one text: spans, or every token where they were not to be merged."""

    text: str
    spans: Sequence[Span]
    tokens: Sequence[TaggedToken] = ()


@dataclass(frozen=True, slots=True)
class Tag:
    """Label what stands in `inputs`; `include_special_tokens` only where tokens are not merged."""

    inputs: Sequence[str]
    aggregation: Aggregation = "none"
    truncate: bool = True
    direction: Direction = "right"
    raw_scores: bool = False
    include_special_tokens: bool = False

    @property
    def heads(self) -> frozenset[Head]:
        return frozenset({Head.TAGS})

    def check(self, spec: ModelSpec) -> None:
        """Raises UnsupportedHead."""
        if Head.TAGS not in spec.heads:
            raise UnsupportedHead("Model is not a token classification model")

    def prepare(self, model: Model) -> list[Encoding]:
        """Tokenise. Raises RequestError."""
        return [*model.reader.locate(self.inputs, truncate=self.truncate, direction=self.direction)]

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> list[Tagged]:
        """One answer a text. Raises NotANumber."""
        assert outputs.tags is not None
        refuse_nan(outputs.tags.values)
        return [self._tagged(model, encoding, logits) for encoding, logits in zip(encodings, outputs.tags, strict=True)]

    def _tagged(self, model: Model, encoding: Encoding, logits: Floats) -> Tagged:
        assert isinstance(encoding, LocatedEncoding)
        of_text = ~encoding.special
        found = spans(_tokens(model, encoding, of_text), softmax(logits[of_text]), model.spec.labels, self.aggregation)
        if self.aggregation != "none":
            return Tagged(encoding.text, found)
        scores = logits if self.raw_scores else softmax(logits)
        shown = np.arange(len(encoding)) if self.include_special_tokens else np.flatnonzero(of_text)
        return Tagged(encoding.text, found, [_token(model, encoding, int(place), scores[place]) for place in shown])


def _tokens(model: Model, encoding: LocatedEncoding, of_text: NDArray[np.bool_]) -> Tokens:
    tokenizer = model.reader.tokenizer
    ids, offsets = encoding.input_ids[of_text], encoding.offsets[of_text]
    unknown_id = tokenizer.id_of(model.spec.unknown_token)
    unknown = ids == unknown_id if unknown_id is not None else np.zeros(len(ids), dtype=bool)
    wordpiece = tokenizer.continues_words
    pieces = tokenizer.pieces(ids) if wordpiece else []
    return Tokens(encoding.text, offsets, ids, continues_word(encoding.text, offsets, pieces, unknown, wordpiece=wordpiece))


def _token(model: Model, encoding: LocatedEncoding, place: int, scores: Floats) -> TaggedToken:
    token_id = int(encoding.input_ids[place])
    if encoding.special[place]:
        (word,) = model.reader.tokenizer.pieces(encoding.input_ids[[place]])
        return TaggedToken(word, token_id, 0, 0, scores, special=True)
    start, end = encoding.offsets[place].tolist()
    return TaggedToken(encoding.text[start:end], token_id, start, end, scores)
