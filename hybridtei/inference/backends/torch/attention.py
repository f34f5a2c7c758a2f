"""Chooses the attention kernel: on a GPU torch's `varlen_attn`, or plain SDPA on padded groups if that cannot run.

At load, the kernel is tried against SDPA on this device, in each form that the model's layers need, to find out if it supports
the card, the precision and the head size. A kernel that raises or differs is not used, and the log gives the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch

from hybridtei.batch import offsets_of
from hybridtei.inference.backends.torch.kernels import Kernel, Sequences, padded_groups, per_sequence, torch_varlen
from hybridtei.inference.backends.torch.ops import AttentionForm

log = logging.getLogger(__name__)

VARLEN, PADDED, PER_SEQUENCE = "torch varlen_attn", "SDPA on padded groups", "SDPA per sequence"
OPENERS: Mapping[str, Callable[[], Kernel]] = {
    VARLEN: torch_varlen,
    PADDED: lambda: padded_groups,
    PER_SEQUENCE: lambda: per_sequence,
}
# The largest absolute deviation of a kernel from SDPA in float32, for normally distributed values: some units of the last
# place.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
TRIAL_LENGTHS = [1, 9, 64, 33, 2]
TRIAL_WINDOW = 8
LONGEST_SHOWN = 200  # characters of an error's text; torch adds pages


def kernel_for(forms: Iterable[AttentionForm], dtype: torch.dtype, device: torch.device) -> tuple[str, Kernel]:
    """(name, kernel) for the forms that a model's layers need. On a CPU one call a sequence costs less than padding."""
    name = PER_SEQUENCE
    if device.type == "cuda":
        fault = fault_of(VARLEN, forms, dtype, device)
        if fault is not None:
            log.warning("attention by %s is refused: %s", VARLEN, fault)
        name = VARLEN if fault is None else PADDED
    log.info("attention by %s", name)
    return name, OPENERS[name]()


def fault_of(name: str, forms: Iterable[AttentionForm], dtype: torch.dtype, device: torch.device) -> str | None:
    """The reason why a kernel cannot be used on this device, or None."""
    try:
        return trial(OPENERS[name](), forms, dtype, device)
    except Exception as error:  # a kernel that lacks this card, precision or size can raise any exception
        return f"{type(error).__name__}: {str(error)[:LONGEST_SHOWN]}"


def trial(kernel: Kernel, forms: Iterable[AttentionForm], dtype: torch.dtype, device: torch.device) -> str | None:
    """Compare a kernel on this device with SDPA in float32, in each form. Return the fault, or None."""
    offsets = torch.as_tensor(offsets_of(TRIAL_LENGTHS), device=device)
    for dim, grouped, windowed, causal in sorted({_asked(form) for form in forms}):
        draw, window = torch.Generator().manual_seed(0), TRIAL_WINDOW if windowed else None
        heads = (4, 2, 2) if grouped else (4, 4, 4)
        parts = [torch.randn(sum(TRIAL_LENGTHS), count, dim, generator=draw).to(device, dtype) for count in heads]
        found, exact = (
            one(q, k, v, Sequences(TRIAL_LENGTHS, offsets), scale=0.3, window=window, causal=causal).float()
            for one, (q, k, v) in ((kernel, parts), (per_sequence, [part.float() for part in parts]))
        )
        worst = float((found - exact).abs().max())
        if not worst <= TOLERANCE[dtype]:  # `not`, so that NaN fails too
            return f"it differs from SDPA by {worst:.2g}, with a window of {window}, causal: {causal}"
    return None


def _asked(form: AttentionForm) -> tuple[int, bool, bool, bool]:
    """The needed forms: (numbers of a head, fewer key heads than heads, window, causality)."""
    return form.heads.dim, form.heads.count != form.heads.key_count, form.window is not None, form.causal
