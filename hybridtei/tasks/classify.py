"""Classification: texts or pairs in, a score for each label out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridtei.batch import Encoding, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import UnsupportedHead
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.tasks.base import ListTask, Model
from hybridtei.tasks.vectors import best_first, probabilities, refuse_nan
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
        """All labels of one input, in TEI's order."""
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
        """All rows, in order."""
        return Classified(np.concatenate([answer.scores for answer in answers]), answers[0].labels)
