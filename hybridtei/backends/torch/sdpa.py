"""torch's own attention, which runs everywhere: sequence by sequence for CPUs, on padded groups of like lengths for GPUs.

On a CPU a call for each sequence costs less than the padding it avoids. On a GPU a call costs more than a short sequence's
arithmetic, so like lengths are computed together; this is the last resort there, for cards and precisions that the flash
kernels do not serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridtei.backends.torch.bias import Bias
from hybridtei.backends.torch.sequences import Sequences
from hybridtei.batch import offsets_of

PADDING_ALLOWED = 1.25  # a group may cost so many times its useful tokens
BIAS_ENTRIES = 1 << 24  # of queries that are computed together: 64 MB in float32
MASK_ENTRIES = 1 << 26  # of a group whose queries see different keys; one sequence alone may have more


def per_sequence(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, *, scale: float, window: int | None, causal: bool
) -> Tensor:
    """One call a sequence. See `Kernel`."""
    out = torch.empty_like(q)
    for rows, others in _spans(sequences):
        mask = _mask(rows.stop - rows.start, window, causal, q.device)
        seen = None if mask is None else mask[:, : others.stop - others.start]
        out[rows] = _one_sequence(q[rows], k[others], v[others], scale, seen)
    return out


def biased(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, bias: Bias, *, scale: float, window: int | None, causal: bool
) -> Tensor:
    """As `per_sequence`, with a bias on the scores: some queries at a time, since their bias must not outgrow memory."""
    out = torch.empty_like(q)
    for whole, others in _spans(sequences):
        start, length, keys = whole.start, whole.stop - whole.start, others.stop - others.start
        mask = _mask(length, window, causal, q.device)
        step = max(BIAS_ENTRIES // (q.shape[1] * length), 1)
        for first in range(0, length, step):
            some = slice(first, min(first + step, length))
            scores = bias.of(whole, some)[..., :keys]
            if mask is not None:
                scores = scores.masked_fill(~mask[some, :keys], float("-inf"))
            rows = slice(start + some.start, start + some.stop)
            out[rows] = _one_sequence(q[rows], k[others], v[others], scale, scores)
    return out


def _spans(sequences: Sequences) -> Iterator[tuple[slice, slice]]:
    """(rows of its queries, rows of its keys) of each sequence."""
    start = 0
    for length, keys in zip(sequences.lengths, sequences.seen or sequences.lengths, strict=True):
        yield slice(start, start + length), slice(start, start + keys)
        start += length


def padded_groups(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, *, scale: float, window: int | None, causal: bool
) -> Tensor:
    """One call a group of sequences of like lengths. See `Kernel`."""
    if "groups" not in sequences.kept:
        sequences.kept["groups"] = [*_groups(sequences)]
    if q.shape[1] != k.shape[1]:  # with a mask, only torch's slowest way takes fewer key heads
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    out = torch.empty_like(q)
    for number, group in enumerate(sequences.kept["groups"]):
        key = (number, window, causal)
        if key not in sequences.kept:
            sequences.kept[key] = group.mask(window, causal)
        queries, keys, values = (x[group.tokens].transpose(1, 2) for x in (q, k, v))
        rows = scaled_dot_product_attention(queries, keys, values, attn_mask=sequences.kept[key], scale=scale)
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
        counted = None if (seen[members] == longest).all() else torch.as_tensor(seen[members], device=device)
        parts = [torch.as_tensor(part, device=device) for part in (tokens, inside, tokens.reshape(-1)[inside])]
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
