"""What torch documents of `varlen_attn`, computed by the textbook.

It stands where no GPU is. Its rules, not ours: a window is (keys before, keys after), inclusive, and distances are counted
from the last key: query i of n meets key i + keys - n. Offsets are int32, and unequal numbers of heads are refused where the
library refuses them.
"""

import torch


def _open(side):
    return None if side < 0 else side


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale,
    window_size=(-1, -1),
    enable_gqa=False,
):
    """torch's, as of 2.12: causality is a window without keys after; the caller has to announce fewer key heads."""
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    shared, out = query.shape[1] // key.shape[1], torch.zeros_like(query)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    before, after = map(_open, window_size)
    for i in range(len(cu_seq_q) - 1):
        own, others = (
            slice(int(cu_seq_q[i]), int(cu_seq_q[i + 1])),
            slice(int(cu_seq_k[i]), int(cu_seq_k[i + 1])),
        )
        n, m = own.stop - own.start, others.stop - others.start
        ahead = torch.arange(m)[None] - torch.arange(n)[:, None] - (m - n)
        hidden = torch.zeros(n, m, dtype=torch.bool)
        if before is not None:
            hidden |= ahead < -before
        if after is not None:
            hidden |= ahead > after
        scores = torch.einsum("qhd,khd->hqk", query[own], key[others]) * scale
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        out[own] = torch.einsum("hqk,khd->qhd", weights, value[others])
    return out


def varlen_attn_of_2_11(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
):
    """torch's, before it knew of fewer key heads."""
    assert scale is not None
    return varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )
