"""Labels: classification (texts or pairs -> a score for each label) and tagging (texts -> labelled
spans)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Encoding, Head, LocatedEncoding, with_shared_prefix
from hybridtei.errors import InvalidInput, UnsupportedHead
from hybridtei.inference.backends.numpy_functions import sigmoid
from hybridtei.inference.tasks.base import Model, Task
from hybridtei.models.checkpoint.kinds import Labels
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.tokenizer import Prompts, Text
from hybridtei.options import Aggregation, LabelOptions
from hybridtei.outputs import Floats, HeadOutputs, best_first, refuse_nan

DEFAULT = LabelOptions()


@dataclass(frozen=True, slots=True)
class Prediction:
    """One label and its score: a probability, or with raw scores the logit."""

    label: str
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class Classified:
    """float32[n, l], in the order of `labels`."""

    scores: Floats
    labels: tuple[str, ...]

    def best_first(self, row: int) -> list[Prediction]:
        """Return one input's labels in TEI's order."""
        scores = self.scores[row]
        return [Prediction(self.labels[i], float(scores[i])) for i in best_first(scores)]

    @staticmethod
    def concat(parts: Sequence[Classified]) -> Classified:
        return Classified(np.concatenate([part.scores for part in parts]), parts[0].labels)


@dataclass(frozen=True, slots=True)
class Classify(Task[Classified]):
    """Score every label for each of `inputs`. The checkpoint's template joins a pair of texts to
    one input."""

    inputs: Sequence[Text]
    options: LabelOptions = DEFAULT
    checks_first: ClassVar[bool] = True
    heads: ClassVar[frozenset[Head]] = frozenset({Head.SCORES})

    def check(self, spec: ModelSpec) -> None:
        if Head.SCORES not in spec.heads:
            raise UnsupportedHead("Model is not a classifier model")

    def prepare(self, model: Model) -> list[Encoding]:
        options = self.options
        if options.max_tokens is not None:
            model = model.limited(options.max_tokens)
        kind, side = model.spec.kind, options.truncation_direction
        assert isinstance(kind, Labels)
        truncate = options.truncate is not False
        pairs = [item for item in self.inputs if not isinstance(item, str)]
        if kind.template is None or not (pairs or kind.judges_pairs):
            return model.reader.read_pairs(self.inputs, truncate=truncate, direction=side)
        if len(pairs) < len(self.inputs):
            raise InvalidInput(
                "`inputs` holds a text alone, but the model judges pairs: send [query, document]"
            )
        return with_shared_prefix(
            model.reader.ask(kind.template, pairs, truncate=truncate, direction=side)
        )

    def finish(
        self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs
    ) -> Classified:
        assert outputs.scores is not None
        assert isinstance(model.spec.kind, Labels)
        head = model.spec.kind.head
        logits = refuse_nan(outputs.scores)
        if self.options.raw_scores or (head.is_regression and not self.options.as_tei):
            return Classified(logits, head.labels)
        return Classified(probabilities(logits, multi_label=head.multi_label), head.labels)


def probabilities(logits: Floats, *, multi_label: bool = False) -> Floats:
    """Logits float32[n, l] -> probabilities float32[n, l]. `multi_label`: of each label alone, from
    `problem_type`."""
    return sigmoid(logits) if multi_label or logits.shape[1] == 1 else softmax(logits)


def softmax(logits: Floats) -> Floats:
    """The softmax over the last axis, shifted by the largest logit against overflow."""
    # A difference outside float32 is -inf, and exp(-inf) is 0
    with np.errstate(over="ignore"):
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


FUNCTIONS = {
    "sigmoid": sigmoid,
    "softmax": softmax,
    "none": None,
}


@dataclass(frozen=True, slots=True, eq=False)
class TaggedToken:
    """A token and its scores in the order of the model's labels. `special`: `text` is the
    vocabulary's piece."""

    text: str
    token_id: int
    start: int
    end: int
    scores: Floats
    special: bool = False


@dataclass(frozen=True, slots=True)
class Tagged:
    """The tags of one text: spans, or without merging every token."""

    text: str
    spans: Sequence[Span]
    tokens: Sequence[TaggedToken] = ()


@dataclass(frozen=True, slots=True)
class Tag(Task[list[Tagged]]):
    """Tag the tokens of `inputs`. `include_special_tokens`: only if tokens are not merged."""

    inputs: Sequence[str]
    options: LabelOptions = DEFAULT
    checks_first: ClassVar[bool] = True
    heads: ClassVar[frozenset[Head]] = frozenset({Head.TAGS})

    def check(self, spec: ModelSpec) -> None:
        if Head.TAGS not in spec.heads:
            raise UnsupportedHead("Model is not a token classification model")

    def prepare(self, model: Model) -> list[Encoding]:
        # No prompt goes before a text
        reader = replace(model.reader, prompts=Prompts())
        options = self.options
        return [
            *reader.locate(
                self.inputs,
                truncate=options.truncate is not False,
                direction=options.truncation_direction,
            )
        ]

    def finish(
        self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs
    ) -> list[Tagged]:
        assert outputs.tags is not None
        refuse_nan(outputs.tags.values)
        return [
            self._tagged(model, encoding, logits)
            for encoding, logits in zip(encodings, outputs.tags, strict=True)
        ]

    def join(self, answers: Sequence[list[Tagged]]) -> list[Tagged]:
        return [tagged for answer in answers for tagged in answer]

    def _tagged(self, model: Model, encoding: Encoding, logits: Floats) -> Tagged:
        assert isinstance(encoding, LocatedEncoding)
        options, of_text = self.options, ~encoding.special
        entities = spans(
            _tokens(model, encoding, of_text),
            softmax(logits[of_text]),
            model.spec.labels,
            options.aggregation_strategy,
        )
        if options.aggregation_strategy != "none":
            return Tagged(encoding.text, entities)
        scores = logits if options.raw_scores else softmax(logits)
        places = np.flatnonzero(of_text)
        if options.include_special_tokens:
            places = np.arange(len(encoding))
        tokens = [_token(model, encoding, int(place), scores[place]) for place in places]
        return Tagged(encoding.text, entities, tokens)


def _tokens(model: Model, encoding: LocatedEncoding, of_text: NDArray[np.bool_]) -> Tokens:
    tokenizer = model.reader.tokenizer
    ids, offsets = encoding.input_ids[of_text], encoding.offsets[of_text]
    unknown_id = tokenizer.id_of(model.spec.unknown_token)
    # No id is -1
    unknown = ids == (-1 if unknown_id is None else unknown_id)
    wordpiece = tokenizer.continues_words
    pieces = tokenizer.pieces(ids) if wordpiece else []
    continues = continues_word(encoding.text, offsets, pieces, unknown, wordpiece=wordpiece)
    return Tokens(encoding.text, offsets, ids, continues)


def _token(model: Model, encoding: LocatedEncoding, place: int, scores: Floats) -> TaggedToken:
    token_id = int(encoding.input_ids[place])
    if encoding.special[place]:
        (word,) = model.reader.tokenizer.pieces(encoding.input_ids[[place]])
        return TaggedToken(word, token_id, 0, 0, scores, special=True)
    start, end = encoding.offsets[place].tolist()
    return TaggedToken(encoding.text[start:end], token_id, start, end, scores)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text's tokens without special ones: places int64[t, 2] in code points, ids, and bool[t]: it
    continues a word."""

    text: str
    offsets: NDArray[np.int64]
    input_ids: NDArray[np.int64]
    continues: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Span:
    """A labelled span from code point `start` to `end`. `token_id`: 0 if the span may have several
    tokens."""

    start: int
    end: int
    label: str
    score: float
    token_id: int = 0


def continues_word(
    text: str,
    offsets: NDArray[np.int64],
    pieces: Sequence[str],
    unknown: NDArray[np.bool_],
    *,
    wordpiece: bool,
) -> NDArray[np.bool_]:
    """The mask bool[t] of tokens that continue the previous word. An unknown token never does."""
    places = offsets.tolist()
    if wordpiece:
        flags = [
            len(piece) != len(text[start:end])
            for piece, (start, end) in zip(pieces, places, strict=True)
        ]
    else:
        flags = [start > 0 and " " not in text[start - 1 : start + 1] for start, _ in places]
    return np.array(flags, dtype=bool) & ~unknown


def spans(
    tokens: Tokens, scores: Floats, labels: Sequence[str], aggregation: Aggregation
) -> list[Span]:
    """Probabilities float32[t, l] -> spans in the text's order. Merged spans exclude the label
    `O`."""
    if aggregation == "none":
        return [*_of_tokens(tokens, scores, labels)]
    items = _of_tokens(tokens, scores, labels)
    if aggregation != "simple":
        items = _of_words(tokens, scores, labels, aggregation)
    merged = (_merged(group) for group in _groups(items))
    return [span for span in merged if span.label != "O"]


def _of_tokens(tokens: Tokens, scores: Floats, labels: Sequence[str]) -> Iterator[Span]:
    best = scores.argmax(axis=1)
    for (start, end), token_id, row, label in zip(
        tokens.offsets.tolist(), tokens.input_ids.tolist(), scores, best.tolist(), strict=True
    ):
        yield Span(start, end, labels[label], float(row[label]), token_id)


# A word's scores by those of its tokens float32[t, l]
_WORD: dict[str, Callable[[Floats], Floats]] = {
    "first": lambda rows: rows[0],
    "max": lambda rows: rows[rows.max(axis=1).argmax()],
    "average": lambda rows: np.nanmean(rows, axis=0),
}


def _of_words(
    tokens: Tokens, scores: Floats, labels: Sequence[str], aggregation: Aggregation
) -> Iterator[Span]:
    # The first token begins a word, even if it looks like the end of one
    begins = np.union1d([0], np.flatnonzero(~tokens.continues))
    for begin, end in zip(begins, [*begins[1:], len(scores)], strict=True):
        if begin < end:
            row = _WORD[aggregation](scores[begin:end])
            label = int(row.argmax())
            yield Span(
                int(tokens.offsets[begin, 0]),
                int(tokens.offsets[end - 1, 1]),
                labels[label],
                float(row[label]),
            )


def _groups(items: Iterator[Span]) -> Iterator[list[Span]]:
    group: list[Span] = []
    for item in items:
        begins, tag = _tag(item.label)
        if group and (begins or tag != _tag(group[-1].label)[1]):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _tag(label: str) -> tuple[bool, str]:
    """(True if the label begins an entity, the entity's kind)."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label


def _merged(group: Sequence[Span]) -> Span:
    score = np.nanmean(np.array([item.score for item in group], dtype=np.float32))
    return Span(group[0].start, group[-1].end, group[0].label.split("-", 1)[-1], float(score))
