"""Flash attention over sequences laid end to end: the packages flash-attn 2 and 4, and torch's own `varlen_attn`.

None is imported before it was chosen. They agree on everything but names: a window is (keys before, keys after), inclusive,
so ours of `window` is `window - 1` on either side; what is unbounded is -1 to all but the fourth, to which it is None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hybridtei.backends.torch.sdpa import per_sequence
from hybridtei.backends.torch.sequences import Kernel, Sequences

UNBOUNDED = -1


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """What all libraries are told: int32 offsets and longest sequence, of queries and of keys; who sees whom."""

    offsets: tuple[Tensor, Tensor]
    longest: tuple[int, int]
    scale: float
    window: tuple[int, int]
    causal: bool


class Call(Protocol):
    """One library's function."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor: ...


def varlen(call: Call) -> Kernel:
    """A library's function as a kernel."""

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, *, scale: float, window: int | None, causal: bool
    ) -> Tensor:
        sides = window_of(window, causal, sequences.longest)
        offsets, longest = sequences.offsets_int32, sequences.longest
        if sequences.seen is None:
            return call(q, k, v, Asked((offsets, offsets), (longest, longest), scale, sides, causal))
        if sides != (UNBOUNDED, UNBOUNDED):  # these libraries count distances from the last key, not from the first
            return per_sequence(q, k, v, sequences, scale=scale, window=window, causal=causal)
        rows, key_offsets, most = sequences.keys
        return call(q, k[rows], v[rows], Asked((offsets, key_offsets), (longest, most), scale, sides, causal))

    return kernel


def window_of(window: int | None, causal: bool, longest: int) -> tuple[int, int]:
    """(keys before, keys after) that a token sees besides itself; UNBOUNDED where nothing limits them."""
    before = UNBOUNDED if window is None or longest <= window else window - 1
    return before, 0 if causal else before


def flash_attn_2() -> Kernel:
    """flash-attn 2. Raises ImportError, or whatever else a build for another torch raises."""
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    return varlen(named(flash_attn_varlen_func))


def flash_attn_4() -> Kernel:
    """flash-attn 4, the CuTe one. Raises as `flash_attn_2`."""
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    return varlen(named(flash_attn_varlen_func, unbounded=None))


def named(function: Callable[..., Any], unbounded: int | None = UNBOUNDED) -> Call:
    """`flash_attn_varlen_func` of either package: the same names, another word for what is unbounded."""

    def call(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
        before, after = (unbounded if side == UNBOUNDED else side for side in asked.window)
        if asked.causal and asked.window[0] == UNBOUNDED:
            after = unbounded  # plain causality is told by its own flag, and has kernels of its own
        out = function(
            q,
            k,
            v,
            cu_seqlens_q=asked.offsets[0],
            cu_seqlens_k=asked.offsets[1],
            max_seqlen_q=asked.longest[0],
            max_seqlen_k=asked.longest[1],
            softmax_scale=asked.scale,
            causal=asked.causal,
            window_size=(before, after),
        )
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return call


def torch_varlen() -> Kernel:
    """torch's `varlen_attn`. Raises ImportError before torch 2.10."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen(of_torch(varlen_attn))


def of_torch(function: Callable[..., Any]) -> Call:
    """`varlen_attn`, which takes fewer key heads only where it has a word for it: at first it had none."""
    grouped = "enable_gqa" in inspect.signature(function).parameters

    def call(q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> Tensor:
        share = q.shape[1] // k.shape[1]
        if share > 1 and not grouped:
            k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
        more = {"enable_gqa": True} if share > 1 and grouped else {}
        out = function(q, k, v, *asked.offsets, *asked.longest, scale=asked.scale, window_size=asked.window, **more)
        return out  # type: ignore[no-any-return]

    return call
