"""The kernels of attention: torch's SDPA, which runs everywhere, and flash attention over sequences
end to end.

A kernel gets the offsets of the sequences in a flat batch. All layers of a pass use the same ones,
so copies and allocations are made once, at first use.

On CPUs SDPA runs sequence by sequence, since a call costs less than padding. On a GPU a call costs
more than a short sequence's arithmetic, so sequences of similar lengths are computed in padded
groups: a fallback for cards and precisions without the flash kernel.

The flash kernel's window is (keys before, keys after), inclusive; ours of `window` is `window - 1`
on each side. -1 is unbounded. Another implementation of flash attention runs behind the same call
once `torch.nn.attention.activate_flash_attention_impl` names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridtei.batch import offsets_of
from hybridtei.inference.backends.torch.memory import to_device
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

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def offsets_int32(self) -> Tensor:
        """`offsets` in flash attention's dtype."""
        return self.offsets.to(torch.int32)

    @cached_property
    def longest_unseen(self) -> int:
        """The number of tokens of the longest sequence in which some are no keys."""
        pairs = zip(self.lengths, self.seen or self.lengths, strict=True)
        return max((length for length, seen in pairs if seen < length), default=0)

    @cached_property
    def keys(self) -> tuple[Tensor, Tensor]:
        """The tokens that are keys, of sequences with `seen`, and the offsets of these, in flash
        attention's dtype."""
        assert self.seen is not None
        starts = offsets_of(self.lengths)[:-1]
        keys = zip(starts, self.seen, strict=True)
        rows = np.concatenate([np.arange(start, start + count) for start, count in keys])
        arrays = {"rows": rows, "offsets": offsets_of(self.seen)}
        tensors = to_device(arrays, self.offsets.device)
        return tensors["rows"], tensors["offsets"].to(torch.int32)

    @cached_property
    def groups(self) -> _Groups:
        """Sequences of similar lengths as rectangles."""
        return _groups(self)


# q [t, heads, head_dim], k and v [t, key_heads, head_dim] -> [t, heads, head_dim], as in
# The attention of a pass (`PackedLayout.attend`)
Kernel = Callable[[Tensor, Tensor, Tensor, Sequences, Heads], Tensor]
# Bound of a group's tokens, in times the useful ones
PADDING_ALLOWED = 1.25
# Scores of queries computed together: 64 MB in float32
BIAS_ENTRIES = 1 << 24
# Of a group, for each head of a bias; a single sequence without a bias may have more
MASK_ENTRIES = 1 << 22


def per_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    heads: Heads,
    *,
    bias: Bias | None = None,
) -> Tensor:
    """A `Kernel` with one call a sequence. With a bias it computes some queries at a time, to bound
    the bias's memory."""
    outputs = []
    counts = sequences.seen or sequences.lengths
    parts = (torch.split(x, sequences.lengths) for x in (q, k, v))
    for queries, keys, values, seen in zip(*parts, counts, strict=True):
        length = len(queries)
        whole = _mask(length, heads, q.device)
        step = length if bias is None else max(BIAS_ENTRIES // (q.shape[1] * length), 1)
        for first in range(0, length, step):
            some = queries[first : first + step]
            mask = None if whole is None else whole[first : first + step, :seen]
            if bias is not None:
                projected = bias.projected(some, keys)
                places = bias.places(some, keys, first)
                mask = _hidden(bias.of(*projected, places)[..., :seen], mask)
            outputs.append(
                _by_head(heads, mask, some[None], keys[None, :seen], values[None, :seen])[0]
            )
    return torch.cat(outputs)


def padded_groups(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    heads: Heads,
    *,
    bias: Bias | None = None,
) -> Tensor:
    """A `Kernel` with one call for each group of sequences of similar lengths."""
    # With a mask, only torch's slowest kernel accepts fewer key heads
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    groups = sequences.groups
    rows = [x[groups.rows] for x in (q, k, v)]
    if bias is not None:
        rows += bias.projected(rows[0], rows[1])
    outputs = []
    parts = (torch.split(x, groups.sizes) for x in rows)
    for group, *flat in zip(groups.each, *parts, strict=True):
        if bias is not None and group.texts.longest**2 > MASK_ENTRIES:
            outputs.append(per_sequence(flat[0], flat[1], flat[2], group.texts, heads, bias=bias))
            continue
        texts = [x.unflatten(0, (len(group.texts.lengths), -1)) for x in flat]
        if bias is None:
            added = group.hidden(heads, q.dtype)
        else:
            added = group.biased(heads, bias, texts[3], texts[4])
        outputs.append(_by_head(heads, added, *texts[:3]).flatten(0, 1))
    return torch.cat(outputs)[groups.places]


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences of similar lengths, each padded to `longest`. `counts` int64[g]: the number of keys
    of each; None if the whole rectangle is keys."""

    texts: Sequences
    longest: int
    counts: Tensor | None
    # Shared by all layers, by what they follow from
    cache: dict[Any, Any] = field(default_factory=dict)

    def hidden(
        self,
        heads: Heads,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """The numbers to add to scores, broadcast to [g, 1, longest, longest]: minus infinity where
        a query (row) does not attend to a key (column), else 0. None if all attend to all.

        SDPA would make them of a mask in each layer.
        """
        if heads not in self.cache:
            device = self.texts.offsets.device
            mask = _mask(self.longest, heads, device)
            if self.counts is not None:
                seen = torch.arange(self.longest, device=device) < self.counts[:, None]
                mask = seen[:, None, None] if mask is None else seen[:, None, None] & mask
            if mask is not None:
                mask = _hidden(torch.zeros_like(mask, dtype=dtype), mask)
            self.cache[heads] = mask
        hidden: Tensor | None = self.cache[heads]
        return hidden

    def biased(
        self,
        heads: Heads,
        bias: Bias,
        q: Tensor,
        k: Tensor,
    ) -> Tensor:
        """`hidden`, with the bias of the projected queries and keys."""
        key = heads, bias.values
        added: Tensor | None = self.cache.get(key)
        if added is None:
            if "places" not in self.cache:
                self.cache["places"] = bias.places(q, k, 0)
            added = bias.of(q, k, self.cache["places"]).expand(len(q), -1, -1, -1)
            hidden = self.hidden(heads, added.dtype)
            if hidden is not None:
                added = added + hidden
            if bias.values is not None:
                self.cache[key] = added
        return added


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """All groups. `rows` int64[n]: for each place of their rectangles, end to end, its row in the
    batch; any real row for padding. `places` int64[t]: the place of each row. `sizes`: the places
    of each rectangle. The host computes all, since a mask would wait for the device."""

    each: list[_Group]
    rows: Tensor
    places: Tensor
    sizes: list[int]


def _groups(sequences: Sequences) -> _Groups:
    lengths = np.asarray(sequences.lengths)
    seen = lengths if sequences.seen is None else np.asarray(sequences.seen)
    groups = like_lengths(sequences.lengths)
    starts, order = offsets_of(sequences.lengths), np.concatenate(groups)
    places, rectangles = np.empty(starts[-1], np.int64), list[NDArray[np.int64]]()
    sizes: list[int] = []
    for members in groups:
        longest = int(lengths[members].max())
        # Else SDPA pads the mask, in each layer. Long texts may be computed alone
        if longest**2 <= MASK_ENTRIES:
            longest += -longest % FLASH_STEP
        column = np.arange(longest)
        real = column < lengths[members][:, None]
        rectangle = starts[members][:, None] + np.where(real, column, 0)
        places[rectangle[real]] = sum(sizes) + np.flatnonzero(real)
        rectangles.append(rectangle.reshape(-1))
        sizes.append(rectangle.size)
    arrays = {"rows": np.concatenate(rectangles), "places": places, "keys": seen[order]}
    tensors = to_device(arrays, sequences.offsets.device)
    counts = torch.split(tensors["keys"], [*map(len, groups)])
    each = [
        _Group(
            Sequences(lengths[members].tolist(), sequences.offsets, seen[members].tolist()),
            size // len(members),
            None if (seen[members] == size // len(members)).all() else count,
        )
        for members, size, count in zip(groups, sizes, counts, strict=True)
    ]
    return _Groups(each, tensors["rows"], tensors["places"], sizes)


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


def _by_head(heads: Heads, mask: Tensor | None, *parts: Tensor) -> Tensor:
    """Attention of q, k, v [texts, tokens, heads, dim], in the same shape."""
    q, k, v = (x.transpose(1, 2) for x in parts)
    is_grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=heads.scale, enable_gqa=is_grouped
    ).transpose(1, 2)


def _hidden(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The scores, and minus infinity where the mask is False."""
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


def _mask(length: int, heads: Heads, device: torch.device) -> Tensor | None:
    """The mask bool[length, length], True where a query (row) attends to a key (column); None if
    each attends to all."""
    if not heads.causal and (heads.window is None or length <= heads.window):
        return None
    place = torch.arange(length, device=device)
    distance = place[:, None] - place
    seen = torch.ones_like(distance, dtype=torch.bool)
    if heads.window is not None:
        seen &= distance.abs() < heads.window
    if heads.causal:
        seen &= distance >= 0
    return seen


UNBOUNDED = -1


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    heads: Heads,
) -> Tensor:
    """A `Kernel` of flash attention, which takes fewer key heads as they are.

    `torch.nn.attention.varlen` calls the same operation, and fills a tensor besides.
    """
    offsets = key_offsets = sequences.offsets_int32
    if sequences.seen is not None:
        # The library counts distances from the last key
        if heads.causal or (heads.window is not None and sequences.longest_unseen > heads.window):
            return padded_groups(q, k, v, sequences, heads)
        rows, key_offsets = sequences.keys
        k, v = k[rows], v[rows]
    before, after = window_of(heads.window, heads.causal, sequences.longest)
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        offsets,
        key_offsets,
        sequences.longest,
        sequences.longest,
        dropout_p=0.0,
        is_causal=(before, after) == (UNBOUNDED, 0),
        return_debug_mask=False,
        scale=heads.scale,
        window_size_left=before,
        window_size_right=after,
    )[0]
    return out


def window_of(window: int | None, causal: bool, longest: int) -> tuple[int, int]:
    """(keys before, keys after) that a token attends to besides itself; UNBOUNDED without a
    limit."""
    before = UNBOUNDED if window is None or longest <= window else window - 1
    return before, 0 if causal else before


# A layer's heads, and True if a bias is added to its scores
Form = tuple[Heads, bool]
FLASH, PADDED, PER_SEQUENCE = "flash attention", "SDPA on padded groups", "SDPA per sequence"
KERNELS: Mapping[str, Kernel] = {
    FLASH: flash,
    PADDED: padded_groups,
    PER_SEQUENCE: per_sequence,
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
    if device.type != "cuda":
        name = PER_SEQUENCE
    elif (
        not any(has_bias for _, has_bias in forms)
        and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY
        and dtype in FLASH_DTYPES
        and all(heads.dim % FLASH_STEP == 0 and heads.dim <= FLASH_LONGEST for heads, _ in forms)
    ):
        name = FLASH
    else:
        name = PADDED
    log.info("attention by %s", name)
    return name
