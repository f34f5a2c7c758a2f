"""LoRA adapters over any `Ops`: every linear map and every table of a family gets the change that its text's adapter adds.

The low-rank products of all adapters are computed side by side, float[t, adapters * rank], and those of another adapter than
the token's own are multiplied by 0. So texts of several adapters share a pass and one copy of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from hybridtei.families.ops import Ops, Rows


def adapted(ops: Ops, count: int, rank: int, scale: float) -> Ops:
    """The operations with `count` adapters of a `rank`, whose changes are multiplied by `scale`.

    They want `NAME.lora_A.weight` float[count * rank, in], of a table float[rows, count * rank], and `NAME.lora_B.weight`
    float[out, count * rank], beside each `NAME.weight`.
    """
    return cast(Ops, _Adapted(ops, count, rank, scale))


def is_adapter(name: str) -> bool:
    """Whether `linear` of this name is a factor of an adapter."""
    return name.endswith((".lora_A", ".lora_B"))


class _Adapted:
    def __init__(self, ops: Ops, count: int, rank: int, scale: float) -> None:
        self._ops = ops
        none_or_one = np.eye(count + 1, count, k=-1, dtype=np.float32)
        self._chosen = ops.adapter_rows(np.repeat(none_or_one * np.float32(scale), rank, axis=1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Rows, name: str, width: int, *, bias: bool = True) -> Rows:
        """x (W + scale B A)^T + b."""
        return self.linears(x, [name], [width], bias=bias)[0]

    def linears(self, x: Rows, names: Sequence[str], widths: Sequence[int], *, bias: bool = True) -> list[Rows]:
        """See `linear`."""
        lows = self._ops.linears(x, [f"{name}.lora_A" for name in names], [self._chosen.width] * len(names), bias=False)
        plain = self._ops.linears(x, names, widths, bias=bias)
        return [self._with(y, low, name) for y, low, name in zip(plain, lows, names, strict=True)]

    def embedding(self, name: str, rows: int, width: int, ids: str) -> Rows:
        """Rows of W + scale A B."""
        base = name.removesuffix(".weight")
        low = self._ops.embedding(f"{base}.lora_A.weight", rows, self._chosen.width, ids)
        return self._with(self._ops.embedding(name, rows, width, ids), low, base)

    def _with(self, y: Rows, low: Rows, name: str) -> Rows:
        change = self._ops.linear(self._ops.multiply(low, self._chosen), f"{name}.lora_B", y.width, bias=False)
        return self._ops.add(y, change)
