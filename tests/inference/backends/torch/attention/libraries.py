"""What torch's flash attention for sequences end to end computes, by the textbook, on a CPU.

It stands where no GPU is. Its rules, not ours: a window is (keys before, keys after), inclusive,
and distances are counted from the last key: query i of n meets key i + keys - n. Offsets are int32,
and the heads of keys divide those of queries.
"""

from functools import cache

import torch


def _open(side):
    return None if side < 0 else side


def flash_attention_forward(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale,
    window_size_left,
    window_size_right,
    **more,
):
    """torch's, as `varlen_attn` calls it: causality without a window is a flag, with one no key
    after."""
    assert not any(more.values())
    assert not dropout_p
    assert is_causal == ((window_size_left, window_size_right) == (-1, 0))
    assert cum_seq_q.dtype == cum_seq_k.dtype == torch.int32
    assert max_q == int(cum_seq_q.diff().max())
    assert max_k >= int(cum_seq_k.diff().max())
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    shared, remainder = divmod(query.shape[1], key.shape[1])
    assert not remainder
    out = torch.zeros_like(query)
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    before, after = map(_open, (window_size_left, window_size_right))
    for i in range(len(cum_seq_q) - 1):
        own, others = (
            slice(int(cum_seq_q[i]), int(cum_seq_q[i + 1])),
            slice(int(cum_seq_k[i]), int(cum_seq_k[i + 1])),
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
    nothing = torch.empty(0)
    return out, nothing, nothing, nothing, nothing


@cache
def installed():
    """torch's library with it: torch itself has no flash attention for sequences on a CPU."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_attention_forward, "CPU")
    return library
