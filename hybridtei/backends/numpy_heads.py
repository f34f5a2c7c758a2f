"""The heads in numpy, for backends that leave hidden states on the host: the same formulas as `heads`, without torch.

Rows are flat, `hidden[t, h]` with `cu_seqlens[n+1]`; no sequence is empty. Tests hold each function against its twin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hybridtei.checkpoint.classifiers import ScorePooling
from hybridtei.checkpoint.layers import ClassifierLayer, LinearLayer, NormLayer
from hybridtei.outputs import Floats
from hybridtei.ragged import Offsets

Activation = Callable[[Floats], Floats]
Pool = Callable[[Floats, Offsets], Floats]


def gelu(x: Floats) -> Floats:
    """x * Phi(x), exactly."""
    from scipy.special import erf

    return np.asarray(0.5 * x * (1 + erf(x * np.float32(0.5**0.5))))


def gelu_tanh(x: Floats) -> Floats:
    """Its tanh approximation."""
    near = np.clip(x, np.float32(-20), np.float32(20))  # beyond, tanh is 1, and a cube would overflow
    inner = np.float32((2 / np.pi) ** 0.5) * (near + np.float32(0.044715) * near**3)
    return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow."""
    from scipy.special import expit

    return np.asarray(expit(x))


# One for each name in `checkpoint.layers.ACTIVATIONS`.
ACTIVATIONS: Mapping[str, Activation] = {
    "identity": lambda x: x,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, np.float32(0)),
    "gelu": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
}


def summed(hidden: Floats, cu_seqlens: Offsets) -> Floats:
    """Each sequence added up by itself: float32[n, h]. One by one, in half to a seventh of the time that `reduceat` takes."""
    sums = np.empty((len(cu_seqlens) - 1, hidden.shape[1]), dtype=hidden.dtype)
    for row, (begin, end) in enumerate(pairwise(cu_seqlens.tolist())):
        np.add.reduce(hidden[begin:end], axis=0, out=sums[row])
    return sums


def counts(cu_seqlens: Offsets) -> Floats:
    """Tokens a sequence: float32[n, 1]."""
    return np.diff(cu_seqlens).astype(np.float32)[:, None]


def weighted_mean(hidden: Floats, cu_seqlens: Offsets) -> Floats:
    """Mean with weights 1, 2, 3 … from the first token on."""
    lengths = np.diff(cu_seqlens)
    places = np.arange(len(hidden)) - np.repeat(cu_seqlens[:-1], lengths) + 1
    weights = places.astype(np.float32)[:, None]
    return np.asarray(summed(hidden * weights, cu_seqlens) / summed(weights, cu_seqlens), dtype=np.float32)


POOLINGS: Mapping[str, Pool] = {
    "cls": lambda hidden, cu_seqlens: hidden[cu_seqlens[:-1]],
    "lasttoken": lambda hidden, cu_seqlens: hidden[cu_seqlens[1:] - 1],
    "max": lambda hidden, cu_seqlens: np.maximum.reduceat(hidden, cu_seqlens[:-1], axis=0),
    "mean": lambda hidden, cu_seqlens: np.asarray(summed(hidden, cu_seqlens) / counts(cu_seqlens)),
    "mean_sqrt_len_tokens": lambda hidden, cu_seqlens: np.asarray(summed(hidden, cu_seqlens) / np.sqrt(counts(cu_seqlens))),
    "weightedmean": weighted_mean,
}


def through(x: Floats, layer: LinearLayer) -> Floats:
    """`activation(weight x + bias)`: float32[t, in] -> float32[t, out]."""
    y = x @ layer.weight.T
    return ACTIVATIONS[layer.activation](y if layer.bias is None else y + layer.bias)


def dense(hidden: Floats, cu_seqlens: Offsets, pooling: Sequence[str], layers: Sequence[LinearLayer] = ()) -> Floats:
    """Pooled vectors, several poolings side by side, through the Dense layers: float32[n, d]."""
    pooled = np.concatenate([POOLINGS[mode](hidden, cu_seqlens) for mode in pooling], axis=1)
    for layer in layers:
        pooled = through(pooled, layer)
    return pooled


def layer_norm(x: Floats, eps: float = 1e-5) -> Floats:
    """Each row with mean 0 and variance 1, without parameters."""
    centred = x - x.mean(1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred**2).mean(1, keepdims=True) + np.float32(eps)))


def classify(hidden: Floats, cu_seqlens: Offsets, pooling: ScorePooling, layers: Sequence[ClassifierLayer]) -> Floats:
    """Logits of each sequence: float32[n, l]."""
    if pooling == "late":
        return POOLINGS["mean"](tag(hidden, layers), cu_seqlens)
    return tag(POOLINGS[pooling](hidden, cu_seqlens), layers)


def tag(rows: Floats, layers: Sequence[ClassifierLayer]) -> Floats:
    """Logits of each row: float32[t, l]."""
    for layer in layers:
        rows = normed(rows, layer) if isinstance(layer, NormLayer) else through(rows, layer)
    return rows


def normed(x: Floats, layer: NormLayer) -> Floats:
    """LayerNorm with its parameters."""
    y = layer_norm(x, layer.eps) * layer.weight
    return y if layer.bias is None else y + layer.bias


def lexical(inputs: Floats, layers: Sequence[LinearLayer]) -> NDArray[np.float32]:
    """Weight of each token: float32[t, k] -> float32[t], >= 0."""
    for layer in layers:
        inputs = through(inputs, layer)
    return np.maximum(inputs[:, 0], np.float32(0))
