"""Attention as one operation of torch's that compilers leave alone: `torch.ops.hybridtei.attend`.

A compiler would look into the layout and bake in where the sequences of one batch end. Behind this operation it sees rows in
and rows out, so what it makes is token-wise arithmetic, right for any batch; which layout is meant is told beside the call,
by thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hybridtei.backends.torch.layout import PackedLayout

UNBOUNDED = 0  # a window of none
_current = threading.local()


class Opaque:
    """A layout that knows nothing, for `Layout.attend` while a pass is compiled or runs compiled: see `meant`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, causal: bool) -> Tensor:
        """See `Layout.attend`, of the layout that is meant."""
        out = torch.ops.hybridtei.attend(q, k, v, scale=scale, window=window or UNBOUNDED, causal=causal)
        return out  # type: ignore[no-any-return]


@contextmanager
def meant(layout: PackedLayout) -> Iterator[None]:
    """Within, this thread's `Opaque` means that layout."""
    before = getattr(_current, "layout", None)
    _current.layout = layout
    try:
        yield
    finally:
        _current.layout = before


@cache
def opaque() -> Opaque:
    """The one there is; makes the operation known to torch."""
    library: Any = torch.library.Library("hybridtei", "FRAGMENT")  # type: ignore[no-untyped-call]
    schema = "attend(Tensor q, Tensor k, Tensor v, *, float scale, int window, bool causal) -> Tensor"
    library.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))  # flash kernels want a head's numbers side by side
    library.impl("attend", _attend, "CompositeExplicitAutograd")
    torch.library.register_fake("hybridtei::attend", _shape, lib=library)
    _KEPT.append(library)  # the operation goes with it
    return Opaque()


_KEPT: list[Any] = []


def _attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, causal: bool) -> Tensor:
    layout: PackedLayout = _current.layout
    return layout.attend(q, k, v, scale=scale, window=None if window == UNBOUNDED else window, causal=causal).contiguous()


def _shape(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, causal: bool) -> Tensor:
    return q.new_empty(q.shape)
