"""The kernels of attention: torch's SDPA, which runs everywhere, and flash attention over sequences laid end to end.

A kernel is told where the sequences of a flat batch lie. All layers of a pass ask the same, so everything that costs a copy or
an allocation is made once, when first asked for.

SDPA runs sequence by sequence on CPUs, where a call for each costs less than the padding it avoids. On a GPU a call
costs more than a short sequence's arithmetic, so like lengths are computed together, in padded groups: the last resort there,
for cards and precisions that the flash kernel does not serve.

That kernel is torch's `varlen_attn`, imported once it is tried. Its window is (keys before, keys after), inclusive, so ours of
`window` is `window - 1` on either side, and -1 is unbounded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridtei.batch import offsets_of
from hybridtei.inference.backends.torch.memory import placed, to_device

if TYPE_CHECKING:
    from hybridtei.inference.backends.torch.layout import Bias


@dataclass(eq=False)
class Sequences:
    """`lengths`: tokens of each. `seen`: of each only so many tokens from the first on are keys; None: all are.

    `offsets`: where each begins and the last ends, integers [n+1] on the device.
    """

    lengths: list[int]
    offsets: Tensor
    seen: list[int] | None = None
    masks: dict[tuple[int, int | None, bool], Tensor | None] = field(default_factory=dict)  # of groups, made for all layers

    @property
    def device(self) -> torch.device:
        """Where the batch lies."""
        return self.offsets.device

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def offsets_int32(self) -> Tensor:
        """`offsets` as flash attention wants them."""
        return self.offsets.to(torch.int32)

    @cached_property
    def groups(self) -> list[_Group]:
        """Sequences of like lengths as rectangles."""
        return [*_groups(self)]

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor, int]:
        """(rows of the tokens that are keys, their int32 offsets, most keys of a sequence), where not all are."""
        assert self.seen is not None
        starts = offsets_of(self.lengths)[:-1]
        rows = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, self.seen, strict=True)])
        there = to_device({"rows": rows, "offsets": offsets_of(self.seen)}, self.device)
        return there["rows"], there["offsets"].to(torch.int32), max(self.seen)


class Kernel(Protocol):
    """q [t, heads, head_dim], k and v [t, key_heads, head_dim] -> [t, heads, head_dim]; see `Layout.attend`."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, *, scale: float, window: int | None, causal: bool
    ) -> Tensor: ...


PADDING_ALLOWED = 1.25  # a group may cost so many times its useful tokens
BIAS_ENTRIES = 1 << 24  # of queries that are computed together: 64 MB in float32
MASK_ENTRIES = 1 << 26  # of a group whose queries see different keys; one sequence alone may have more


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
    """One call a sequence. See `Kernel`. With a bias on the scores some queries at a time: it must not outgrow memory."""
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
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, *, scale: float, window: int | None, causal: bool
) -> Tensor:
    """One call a group of sequences of like lengths. See `Kernel`."""
    if q.shape[1] != k.shape[1]:  # with a mask, only torch's slowest way takes fewer key heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = torch.empty_like(q)
    for number, group in enumerate(sequences.groups):
        key = (number, window, causal)
        if key not in sequences.masks:
            sequences.masks[key] = group.mask(window, causal)
        queries, keys, values = (x[group.tokens].transpose(1, 2) for x in (q, k, v))
        rows = scaled_dot_product_attention(queries, keys, values, attn_mask=sequences.masks[key], scale=scale)
        out[group.targets] = rows.transpose(1, 2).flatten(0, 1)[group.places]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences of like lengths as a rectangle. `tokens` int64[g, longest]: rows of the flat batch, any real one for padding;
    `places` int64[t]: which of the flattened rectangle are real, and `targets` their rows in the batch: found on the host,
    since a mask would make it wait for the device. `seen` int64[g]: how many tokens of each are keys, or None if all of the
    rectangle are."""

    tokens: Tensor
    places: Tensor
    targets: Tensor
    seen: Tensor | None

    def mask(self, window: int | None, causal: bool) -> Tensor | None:
        """bool, broadcast to [g, 1, longest, longest], True where a query (row) sees a key (column)."""
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
    """Places of sequences that go together: no group costs more than PADDING_ALLOWED times its tokens, none is lost."""
    groups: list[list[int]] = []
    useful = 0
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        length = lengths[place]
        size = len(groups[-1]) + 1 if groups else 0
        fits = size and length * size <= PADDING_ALLOWED * (useful + length) and size * length**2 <= MASK_ENTRIES
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
    """bool[length, length], True where a query (row) sees a key (column); None where it sees all."""
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
    """`varlen_attn` as a kernel. It takes fewer key heads only where it has a word for it: torch 2.11 has none."""
    grouped = "enable_gqa" in inspect.signature(function).parameters

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, *, scale: float, window: int | None, causal: bool
    ) -> Tensor:
        sides = window_of(window, causal, sequences.longest)
        offsets, longest = (sequences.offsets_int32, sequences.offsets_int32), (sequences.longest, sequences.longest)
        if sequences.seen is not None:
            if sides != (UNBOUNDED, UNBOUNDED):  # the library counts distances from the last key, not from the first
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
    """(keys before, keys after) that a token sees besides itself; UNBOUNDED where nothing limits them."""
    before = UNBOUNDED if window is None or longest <= window else window - 1
    return before, 0 if causal else before
