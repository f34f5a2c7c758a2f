"""The operations of model families: token-wise arithmetic, and attention, which alone knows where a
sequence ends.

Hidden states are rows `[t, width]`, one a token, sequence after sequence. A family is a function of
`Ops` and its `Settings` that returns the last hidden states. One `Ops` computes, another writes a
graph.

LoRA adapters work over any `Ops`: each text's adapter changes every linear map and every table. The
low-rank products of all adapters are computed together, float[t, adapters * rank], and multiplied
by 0 for adapters other than the token's. So texts of several adapters share a pass and one copy of
the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Rows:
    """A value float[t, width] of the `Ops` that made it. `is_parameter`: it comes from the
    checkpoint, not the batch."""

    value: Any
    width: int
    is_parameter: bool = False


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines float[t, 1, dim] of the angles by which the `dim` numbers of a head are
    rotated."""

    cos: Any
    sin: Any


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of `dim` numbers in a row: `count` for queries, `key_count` for keys and values
    (fewer if grouped).

    A token attends to its own sequence: to keys at a distance below `window`, and to no later key
    if `causal`. `factor`: of scores, by default 1 / sqrt(dim).
    """

    count: int
    key_count: int
    dim: int
    factor: float | None = None
    causal: bool = False
    window: int | None = None

    @property
    def scale(self) -> float:
        """The factor of scores."""
        return self.dim**-0.5 if self.factor is None else self.factor

    @property
    def widths(self) -> tuple[int, int, int]:
        """The widths of the rows of queries, keys and values."""
        return self.count * self.dim, self.key_count * self.dim, self.key_count * self.dim


# Of distances: for queries' contents, and for keys' contents
Tables = tuple[Rows | None, Rows | None]


class Ops(Protocol):
    """Tensors have transformers' names. `linear` uses `NAME.weight` float[out, in] and `NAME.bias`
    float[out]."""

    def embedding(self, name: str, rows: int, width: int, ids: str) -> Rows:
        """Row `ids[t]` of the table `name` float[rows, width]. `ids`: input_ids, position_ids or
        token_type_ids."""
        ...

    def linear(self, x: Rows, name: str, width: int, *, bias: bool = True) -> Rows: ...

    def add(self, x: Rows, y: Rows) -> Rows: ...
    def multiply(self, x: Rows, y: Rows) -> Rows: ...
    def scale(self, x: Rows, factor: float) -> Rows: ...

    def scaled_by(self, x: Rows, name: str) -> Rows:
        """Multiply by the one number of the tensor `name` float[1]."""
        ...

    def split(self, x: Rows, widths: Sequence[int]) -> list[Rows]:
        """Split the rows into parts of these widths."""
        ...

    def activate(self, x: Rows, kind: str) -> Rows:
        """`kind`: a value of `settings.ACTIVATIONS`."""
        ...

    def layer_norm(self, x: Rows, name: str, eps: float, *, bias: bool = True) -> Rows: ...

    def rms_norm(
        self, x: Rows, name: str | None, eps: float, *, dim: int | None = None, offset: float = 0.0
    ) -> Rows:
        """Normalise each `dim` numbers of a row, or the whole row, and multiply by `NAME.weight +
        offset`, or by nothing without a name."""
        ...

    def experts(
        self, x: Rows, logits: Rows, name: str, wide: int, *, chosen: int, act: str
    ) -> Rows:
        """Mixture of experts: `bias` + the sum of `p act(x w1^T) w2` over the `chosen` ones of
        largest p = softmax(logits).

        `NAME.mlp.w1`, `NAME.mlp.w2` float[logits.width * wide, x.width], expert after expert;
        `NAME.bias` float[x.width].
        """
        ...

    def rotation(
        self,
        frequencies: NDArray[np.float32],
        factor: float,
        growth: tuple[float, int] | None = None,
    ) -> Rotation:
        """The rotation for the batch's positions. `frequencies` float32[dim / 2]; `factor`
        multiplies cosines and sines, and so does `1 + beta log(1 + floor(position / length))` with
        a `growth` (beta, length)."""
        ...

    def rotate(self, x: Rows, rotation: Rotation, dim: int) -> Rows:
        """Rotate heads of `dim` numbers; number i pairs with i + dim / 2."""
        ...

    def attention(self, q: Rows, k: Rows, v: Rows, heads: Heads, bias: Any = None) -> Rows:
        """Attend within each sequence, as `heads` says. `bias`: added to the scaled scores; made by
        `alibi`, `buckets` or `disentangled`."""
        ...

    def convolve(self, x: Rows, name: str) -> Rows:
        """Sum each token and its two neighbours of the same text, number by number weighted by
        `NAME.weight` float[width, 1, 3]. A token that is no key counts as zero."""
        ...

    def alibi(self, slopes: NDArray[np.float32]) -> Any:
        """ALiBi in both directions: `-slope * |query - key|`. `slopes` float32[heads]."""
        ...

    def buckets(self, buckets: NDArray[np.int64], name: str, heads: int) -> Any:
        """`table[bucket, head]` of the table `name`. `buckets[d + longest]` is the bucket of the
        distance d = key minus query. Distances above `longest` have the bucket of `longest`."""
        ...

    def disentangled(
        self, q: Rows, k: Rows, heads: Heads, buckets: NDArray[np.int64], tables: Tables
    ) -> Any:
        """DeBERTa: scaled products of contents with the projected embeddings of distances, rows of
        `parameter_rows`."""
        ...

    def parameter_rows(self, name: str, rows: int, width: int) -> Rows:
        """A tensor of the checkpoint as `rows` rows, instead of `t`."""
        ...

    def adapter_rows(self, table: NDArray[np.float32]) -> Rows:
        """Row `adapter_ids[t]` of a constant table float32[adapters + 1, width]. Row 0 is for texts
        without an adapter."""
        ...


def linears(
    o: Ops, x: Rows, names: Sequence[str], widths: Sequence[int], *, bias: bool = True
) -> list[Rows]:
    """Apply several `linear` maps to the same rows. If `o.joins` is true, `o.linears` computes them
    by one product."""
    if getattr(o, "joins", False) and len(names) > 1:
        joining: Any = o
        rows: list[Rows] = joining.linears(x, names, widths, bias=bias)
        return rows
    return [o.linear(x, name, width, bias=bias) for name, width in zip(names, widths, strict=True)]


def adapted(
    ops: Ops, count: int, rank: int, scale: float, targets: frozenset[str] | None = None
) -> Ops:
    """Add `count` adapters of one `rank` to the operations. `scale` multiplies their changes.

    Beside each `NAME.weight`, or those of `targets`, whose names may have other prefixes, they
    need `NAME.lora_A.weight` float[count * rank, in] (for a table: float[rows, count * rank]) and
    `NAME.lora_B.weight` float[out, count * rank].
    """
    return cast(Ops, _Adapted(ops, count, rank, scale, targets))


def is_adapter(name: str) -> bool:
    """True if the `linear` of this name is a factor of an adapter."""
    return name.endswith((".lora_A", ".lora_B"))


class _Adapted:
    # Each map has adapters of its own
    joins = False

    def __init__(
        self, ops: Ops, count: int, rank: int, scale: float, targets: frozenset[str] | None
    ) -> None:
        self._ops = ops
        self._targets = targets
        none_or_one = np.eye(count + 1, count, k=-1, dtype=np.float32)
        self._chosen = ops.adapter_rows(np.repeat(none_or_one * np.float32(scale), rank, axis=1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Rows, name: str, width: int, *, bias: bool = True) -> Rows:
        """x (W + scale B A)^T + b."""
        if not self._has(name):
            return self._ops.linear(x, name, width, bias=bias)
        low = self._ops.linear(x, f"{name}.lora_A", self._chosen.width, bias=False)
        return self._with(self._ops.linear(x, name, width, bias=bias), low, name)

    def embedding(self, name: str, rows: int, width: int, ids: str) -> Rows:
        """Rows of W + scale A B."""
        base = name.removesuffix(".weight")
        if not self._has(base):
            return self._ops.embedding(name, rows, width, ids)
        low = self._ops.embedding(f"{base}.lora_A.weight", rows, self._chosen.width, ids)
        return self._with(self._ops.embedding(name, rows, width, ids), low, base)

    def _has(self, name: str) -> bool:
        if self._targets is None:
            return True
        return any(
            f".{target}".endswith(f".{name}") or f".{name}".endswith(f".{target}")
            for target in self._targets
        )

    def _with(self, y: Rows, low: Rows, name: str) -> Rows:
        change = self._ops.linear(
            self._ops.multiply(low, self._chosen), f"{name}.lora_B", y.width, bias=False
        )
        return self._ops.add(y, change)
