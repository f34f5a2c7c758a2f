"""The kernels of attention: torch's SDPA, which runs everywhere, and flash attention over sequences
end to end.

A kernel gets the offsets of the sequences in a flat batch. All layers of a pass use the same ones,
so copies and allocations are made once, at first use.

On CPUs SDPA runs sequence by sequence, since a call costs less than padding. On a GPU a call costs
more than a short sequence's arithmetic, so sequences of similar lengths are computed in padded
groups: a fallback for cards and precisions without the flash kernel.

The flash kernel is torch's `varlen_attn`, imported at first use. Its window is (keys before, keys
after), inclusive; ours of `window` is `window - 1` on each side. -1 is unbounded. Another
implementation of flash attention runs behind the same call once
`torch.nn.attention.activate_flash_attention_impl` names it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridtei.batch import offsets_of
from hybridtei.inference.backends.torch.memory import placed, to_device
from hybridtei.models.families.ops import Heads

if TYPE_CHECKING:
    from hybridtei.inference.backends.torch.layout import Bias

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Sequences:
    """The sequences of a batch. `lengths`: their tokens. `seen`: of each, the number of first
    tokens that are keys; None: all.

    `offsets`: integers [n+1] on the device.
    """

    lengths: list[int]
    offsets: Tensor
    seen: list[int] | None = None
    # Of groups, shared by all layers
    masks: dict[tuple[int, int | None, bool], Tensor | None] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The batch's device."""
        return self.offsets.device

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def offsets_int32(self) -> Tensor:
        """`offsets` in flash attention's dtype."""
        return self.offsets.to(torch.int32)

    @cached_property
    def groups(self) -> list[_Group]:
        """Sequences of similar lengths as rectangles."""
        return [*_groups(self)]

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor, int]:
        """(rows of the keys, their int32 offsets, the largest number of keys in a sequence); None
        if all tokens are keys."""
        assert self.seen is not None
        starts = offsets_of(self.lengths)[:-1]
        rows = np.concatenate(
            [
                np.arange(start, start + count)
                for start, count in zip(starts, self.seen, strict=True)
            ]
        )
        there = to_device({"rows": rows, "offsets": offsets_of(self.seen)}, self.device)
        return there["rows"], there["offsets"].to(torch.int32), max(self.seen)


class Kernel(Protocol):
    """q [t, heads, head_dim], k and v [t, key_heads, head_dim] -> [t, heads, head_dim], as in
    `Layout.attend`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        *,
        scale: float,
        window: int | None,
        causal: bool,
    ) -> Tensor: ...


# Bound of a group's tokens, in times the useful ones
PADDING_ALLOWED = 1.25
# Scores of queries computed together: 64 MB in float32
BIAS_ENTRIES = 1 << 24
# Of a group whose queries have different keys; a single sequence may have more
MASK_ENTRIES = 1 << 26


def per_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None,
    causal: bool,
    bias: Bias | None = None,
) -> Tensor:
    """A `Kernel` with one call a sequence. With a bias it computes some queries at a time, to bound
    the bias's memory."""
    out, start = torch.empty_like(q), 0
    for length, keys in zip(sequences.lengths, sequences.seen or sequences.lengths, strict=True):
        mask = _mask(length, window, causal, q.device)
        others = slice(start, start + keys)
        step = max(length if bias is None else BIAS_ENTRIES // (q.shape[1] * length), 1)
        for first in range(0, length, step):
            some = slice(first, min(first + step, length))
            seen = None if mask is None else mask[some, :keys]
            if bias is not None:
                scores = bias.of(slice(start, start + length), some)[..., :keys]
                seen = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
            rows = slice(start + some.start, start + some.stop)
            out[rows] = _one_sequence(q[rows], k[others], v[others], scale, seen)
        start += length
    return out


def padded_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    window: int | None,
    causal: bool,
) -> Tensor:
    """A `Kernel` with one call for each group of sequences of similar lengths."""
    # With a mask, only torch's slowest kernel accepts fewer key heads
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = torch.empty_like(q)
    for number, group in enumerate(sequences.groups):
        key = (number, window, causal)
        if key not in sequences.masks:
            sequences.masks[key] = group.mask(window, causal)
        queries, keys, values = (x[group.tokens].transpose(1, 2) for x in (q, k, v))
        rows = scaled_dot_product_attention(
            queries, keys, values, attn_mask=sequences.masks[key], scale=scale
        )
        out[group.targets] = rows.transpose(1, 2).flatten(0, 1)[group.places]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences of similar lengths as a rectangle. `tokens` int64[g, longest]: rows of the flat
    batch, any real row for padding. `places` int64[t]: the real places of the flattened rectangle;
    `targets`: their rows in the batch. The host computes both, since a mask would wait for the
    device. `seen` int64[g]: the number of keys of each sequence; None if the whole rectangle is
    keys."""

    tokens: Tensor
    places: Tensor
    targets: Tensor
    seen: Tensor | None

    def mask(self, window: int | None, causal: bool) -> Tensor | None:
        """The mask, broadcast to bool[g, 1, longest, longest]: True where a query (row) attends to
        a key (column)."""
        longest = self.tokens.shape[1]
        within = _mask(longest, window, causal, self.tokens.device)
        if self.seen is None:
            return within
        keys = torch.arange(longest, device=self.tokens.device) < self.seen[:, None]
        return keys[:, None, None] if within is None else keys[:, None, None] & within


def _groups(sequences: Sequences) -> Iterator[_Group]:
    starts, device = offsets_of(sequences.lengths)[:-1], sequences.device
    lengths = np.asarray(sequences.lengths)
    seen = lengths if sequences.seen is None else np.asarray(sequences.seen)
    for members in like_lengths(sequences.lengths):
        longest = int(lengths[members].max())
        places = np.arange(longest)
        real = places < lengths[members][:, None]
        tokens = starts[members][:, None] + np.where(real, places, 0)
        inside = np.flatnonzero(real)
        counted = None if (seen[members] == longest).all() else placed(seen[members], device)
        parts = [placed(part, device) for part in (tokens, inside, tokens.reshape(-1)[inside])]
        yield _Group(tokens=parts[0], places=parts[1], targets=parts[2], seen=counted)


def like_lengths(lengths: list[int]) -> list[list[int]]:
    """Group all sequences by length. No group costs more than PADDING_ALLOWED times its tokens."""
    groups: list[list[int]] = []
    useful = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[place]
        size = len(groups[-1]) + 1 if groups else 0
        fits = (
            size
            and length * size <= PADDING_ALLOWED * (useful + length)
            and size * length**2 <= MASK_ENTRIES
        )
        if not fits:
            groups.append([])
            useful = 0
        groups[-1].append(place)
        useful += length
    return groups


def _one_sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)


def _mask(length: int, window: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """The mask bool[length, length], True where a query (row) attends to a key (column); None if
    each attends to all."""
    if not causal and (window is None or length <= window):
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen &= distance.abs() < window
    if causal:
        seen &= distance >= 0
    return seen


UNBOUNDED = -1


def torch_varlen() -> Kernel:
    """torch's `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen(varlen_attn)


def varlen(function: Callable[..., Any]) -> Kernel:
    """`varlen_attn` as a kernel. It accepts fewer key heads only if it has a parameter for it,
    which torch 2.11 lacks."""
    grouped = "enable_gqa" in inspect.signature(function).parameters

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: Sequences,
        *,
        scale: float,
        window: int | None,
        causal: bool,
    ) -> Tensor:
        sides = window_of(window, causal, sequences.longest)
        offsets, longest = (
            (sequences.offsets_int32, sequences.offsets_int32),
            (sequences.longest, sequences.longest),
        )
        if sequences.seen is not None:
            # The library counts distances from the last key
            if sides != (UNBOUNDED, UNBOUNDED):
                return per_sequence(q, k, v, sequences, scale=scale, window=window, causal=causal)
            rows, key_offsets, most = sequences.keys
            k, v, offsets, longest = k[rows], v[rows], (offsets[0], key_offsets), (longest[0], most)
        share = q.shape[1] // k.shape[1]
        if share > 1 and not grouped:
            k, v = (x.repeat_interleave(share, dim=1) for x in (k, v))
        more = {"enable_gqa": True} if share > 1 and grouped else {}
        out = function(q, k, v, *offsets, *longest, scale=scale, window_size=sides, **more)
        return out  # type: ignore[no-any-return]

    return kernel


def window_of(window: int | None, causal: bool, longest: int) -> tuple[int, int]:
    """(keys before, keys after) that a token attends to besides itself; UNBOUNDED without a
    limit."""
    before = UNBOUNDED if window is None or longest <= window else window - 1
    return before, 0 if causal else before


# A layer's heads, and True if a bias is added to its scores
Form = tuple[Heads, bool]
VARLEN, PADDED, PER_SEQUENCE = "torch varlen_attn", "SDPA on padded groups", "SDPA per sequence"
KERNELS: Mapping[str, Callable[[], Kernel]] = {
    VARLEN: torch_varlen,
    PADDED: lambda: padded_groups,
    PER_SEQUENCE: lambda: per_sequence,
}
# What torch's flash attention supports (`check_flash_attention` in sdp_utils.cpp): GPUs from Ampere
# on, half precision, heads of a multiple of 8 numbers.
FLASH_CAPABILITY = (8, 0)
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_STEP = 8
FLASH_LONGEST = 256


def kernel_for(forms: Iterable[Form], dtype: torch.dtype, device: torch.device) -> str:
    """The name in KERNELS for layers of these forms. On a CPU one call a sequence costs less than
    padding."""
    forms = list(forms)
    if device.type != "cuda" or any(has_bias for _, has_bias in forms):
        name = PER_SEQUENCE
    elif (
        torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
        and dtype in FLASH_DTYPES
        and all(heads.dim % FLASH_STEP == 0 and heads.dim <= FLASH_LONGEST for heads, _ in forms)
    ):
        name = VARLEN
    else:
        name = PADDED
    log.info("attention by %s", name)
    return name
