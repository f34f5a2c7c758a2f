"""Classification: texts or pairs in, a score for each label out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Encoding, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import NotANumber, UnsupportedHead
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.tasks.base import ListTask, Model
from hybridtei.text.tokenizer import Direction, Text


@dataclass(frozen=True, slots=True)
class Prediction:
    """One label and its score: a probability, or the logit where raw scores were asked for."""

    label: str
    score: float


@dataclass(frozen=True, slots=True, eq=False)
class Classified:
    """float32[n, l], in the order of `labels`."""

    scores: Floats
    labels: tuple[str, ...]

    def best_first(self, row: int) -> list[Prediction]:
        """Return all labels of one input, in TEI's order."""
        scores = self.scores[row]
        return [Prediction(self.labels[i], float(scores[i])) for i in best_first(scores)]


@dataclass(frozen=True, slots=True)
class Classify(ListTask):
    """Score every label for each of `inputs`; a pair is two texts that the checkpoint's template makes one input of."""

    inputs: Sequence[Text]
    truncate: bool = True
    direction: Direction = "right"
    raw_scores: bool = False

    @property
    def heads(self) -> frozenset[Head]:
        return frozenset({Head.SCORES})

    def check(self, spec: ModelSpec) -> None:
        """Raises UnsupportedHead, in TEI's words: rerankers classify, too."""
        if Head.SCORES not in spec.heads:
            raise UnsupportedHead("Model is not a classifier model")

    def prepare(self, model: Model) -> list[Encoding]:
        """Tokenise. Raises RequestError."""
        return model.reader.read_pairs(self.inputs, truncate=self.truncate, direction=self.direction)

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Classified:
        """Raises NotANumber."""
        assert outputs.scores is not None
        assert model.spec.classifier is not None
        logits = refuse_nan(outputs.scores)
        scores = logits if self.raw_scores else probabilities(logits, multi_label=model.spec.classifier.multi_label)
        return Classified(scores, model.spec.labels)

    def join(self, answers: Sequence[Classified]) -> Classified:
        """See `ListTask.join`."""
        return Classified(np.concatenate([answer.scores for answer in answers]), answers[0].labels)


def probabilities(logits: Floats, *, multi_label: bool = False) -> Floats:
    """float32[n, l] -> float32[n, l]. `multi_label`: each label is judged by itself, as `problem_type` may say."""
    return sigmoid(logits) if multi_label or logits.shape[1] == 1 else softmax(logits)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    from scipy.special import expit

    return np.asarray(expit(x))


def softmax(logits: Floats) -> Floats:
    """Over the last axis; shifted by the largest logit, so that nothing overflows."""
    with np.errstate(over="ignore"):  # a difference beyond float32 is -inf, whose power is 0
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def refuse_nan(values: Floats) -> Floats:
    """Return the values. Raises NotANumber if one is NaN: half precision overflows to it, and a sort would hide it."""
    if np.isnan(values).any():
        raise NotANumber
    return values


def best_first(scores: Floats) -> NDArray[np.intp]:
    """Return the places of float32[n] in descending order, ties in reverse: TEI reverses a stable ascending sort."""
    return np.argsort(scores, kind="stable")[::-1]
