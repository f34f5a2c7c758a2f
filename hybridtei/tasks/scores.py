"""Logits -> scores and an order, by TEI's rules: one label is a sigmoid, several a softmax, ties come in reverse order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hybridtei.errors import NotANumber
from hybridtei.outputs import Floats


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
    """The values. Raises NotANumber if any is none: half precision overflows to it, and a sort would hide it."""
    if np.isnan(values).any():
        raise NotANumber
    return values


def best_first(scores: Floats) -> NDArray[np.intp]:
    """Places of float32[n] in descending order. TEI sorts stably upwards and turns that round: ties in reverse order."""
    return np.argsort(scores, kind="stable")[::-1]
