"""The kernel behind `Layout.attend`: chosen by facts, then tried on this device against SDPA before any text is.

A flash kernel may be installed and still not run: built for another torch, without code for this card, wrong on it. So the
first that answers the trial is taken, and what was refused is in the log. Knows no family and no text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from hybridtei.backends.torch import choice, flash
from hybridtei.backends.torch.choice import CAUSAL, GROUPED, WINDOW, Choice, Facts
from hybridtei.backends.torch.ops import AttentionForm
from hybridtei.backends.torch.sdpa import padded_groups, per_sequence
from hybridtei.backends.torch.sequences import Kernel, Sequences
from hybridtei.batch import offsets_of

log = logging.getLogger(__name__)

OPENERS: Mapping[str, Callable[[], Kernel]] = {
    choice.FLASH_2: flash.flash_attn_2,
    choice.FLASH_4: flash.flash_attn_4,
    choice.TORCH_VARLEN: flash.torch_varlen,
    choice.PADDED: lambda: padded_groups,
    choice.PER_SEQUENCE: lambda: per_sequence,
}
# How far a kernel's rows may be from SDPA's in float32, absolute, for normal values: some units of the last place.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
TRIAL_LENGTHS = [1, 9, 64, 33, 2]
TRIAL_WINDOW = 8


def kernel_for(forms: Iterable[AttentionForm], dtype: torch.dtype, device: torch.device) -> tuple[Choice, Kernel]:
    """The best kernel for what a model's layers ask of it, with its name; the log says which, and why none before it."""
    facts = facts_of(forms, dtype, device)
    able = choice.choices(facts)
    for candidate in able[:-1]:
        kernel, fault = _tried(candidate, facts, device)
        if kernel is not None:
            return _logged(candidate, kernel)
        log.warning("attention by %s is refused, the next is tried: %s", candidate.name, fault)
    return _logged(able[-1], OPENERS[able[-1].name]())


def facts_of(forms: Iterable[AttentionForm], dtype: torch.dtype, device: torch.device) -> Facts:
    """What decides: the device, and what the layers ask of attention."""
    forms = [*forms]
    has = {
        WINDOW: any(form.window is not None for form in forms),
        CAUSAL: any(form.causal for form in forms),
        GROUPED: any(form.heads.count != form.heads.key_count for form in forms),
    }
    return Facts(
        device.type,
        str(dtype).removeprefix("torch."),
        max(form.heads.dim for form in forms),
        torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        choice.present() if device.type == "cuda" else {},
        frozenset(name for name, needed in has.items() if needed),
    )


def trial(kernel: Kernel, facts: Facts, device: torch.device) -> str | None:
    """What is wrong with a kernel on this device, or None: its rows against SDPA's in float32, with all that is needed."""
    windows = [None, TRIAL_WINDOW] if WINDOW in facts.needs else [None]
    causal = [False, True] if CAUSAL in facts.needs else [False]
    q, k, v = _random(facts, device)
    for window in windows:
        for back_only in causal:
            found = kernel(q, k, v, _sequences(device), scale=0.3, window=window, causal=back_only).float()
            wide = (q.float(), k.float(), v.float())
            exact = per_sequence(*wide, sequences=_sequences(device), scale=0.3, window=window, causal=back_only)
            worst = float((found - exact).abs().max())
            if not worst <= TOLERANCE[facts.dtype]:  # NaN fails too
                return f"it differs from SDPA by {worst:.2g}, with a window of {window}, causal: {back_only}"
    return None


def _tried(candidate: Choice, facts: Facts, device: torch.device) -> tuple[Kernel | None, str]:
    try:
        kernel = OPENERS[candidate.name]()
        fault = trial(kernel, facts, device)
    except Exception as error:  # a package built for another torch or card fails in ways of its own
        return None, f"{type(error).__name__}: {error}"
    return (kernel, "") if fault is None else (None, fault)


def _logged(chosen: Choice, kernel: Kernel) -> tuple[Choice, Kernel]:
    log.info("attention by %s: %s", chosen.name, chosen.why)
    return chosen, kernel


def _random(facts: Facts, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    heads = (4, 2, 2) if GROUPED in facts.needs else (4, 4, 4)
    dtype = getattr(torch, facts.dtype)
    q, k, v = (torch.randn(sum(TRIAL_LENGTHS), h, facts.head_dim, generator=draw).to(device, dtype) for h in heads)
    return q, k, v


def _sequences(device: torch.device) -> Sequences:
    return Sequences(TRIAL_LENGTHS, torch.as_tensor(offsets_of(TRIAL_LENGTHS), device=device))
