"""Which kernel computes attention: chosen by facts, then tried on this device against SDPA before any text is.

The order is flash-attn 3, which is made for Hopper, then torch's own `varlen_attn`, then plain SDPA on padded groups; the facts
are what the libraries promise. A flash kernel may be installed and still not run: built for another torch, without code for
this card, wrong on it. So the first that answers the trial is taken, and what was refused is in the log. Knows no family and no
text.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from hybridtei.backends.torch.kernels import Kernel, Sequences, flash_attn_3, padded_groups, per_sequence, torch_varlen
from hybridtei.backends.torch.ops import AttentionForm
from hybridtei.batch import offsets_of

log = logging.getLogger(__name__)

WINDOW, CAUSAL, GROUPED = "windows", "causality", "fewer key heads than heads"
ALL = frozenset({WINDOW, CAUSAL, GROUPED})
HALF = frozenset({"float16", "bfloat16"})
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8

FLASH_3, TORCH_VARLEN = "flash-attn 3", "torch varlen_attn"
PADDED, PER_SEQUENCE = "SDPA on padded groups", "SDPA per sequence"
PREFERRED = (FLASH_3, TORCH_VARLEN, PADDED)
MAJORS = {FLASH_3: (9, 9), TORCH_VARLEN: (8, 99)}  # of compute capability: Hopper's, and from Ampere's on


@dataclass(frozen=True, slots=True)
class Facts:
    """`capability`: (major, minor) of a CUDA device. `has_flash_3`: it is installed. `needs`: what layers ask of attention."""

    device: str
    dtype: str
    head_dim: int
    capability: tuple[int, int] | None = None
    has_flash_3: bool = False
    needs: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel by name, and the reason for it."""

    name: str
    why: str


def choices(facts: Facts) -> list[Choice]:
    """What may run, the best first; at least one. Each tells why those before it may not."""
    if facts.device != "cuda":
        return [Choice(PER_SEQUENCE, f"on a {facts.device} device a call a sequence costs less than padding")]
    able, refused = list[Choice](), list[str]()
    for name in PREFERRED:
        reason = why_not(name, facts)
        if reason is None:
            able.append(Choice(name, "; ".join(refused) or "the first in order"))
        else:
            refused.append(f"{name}: {reason}")
    return able


def why_not(name: str, facts: Facts) -> str | None:
    """Why a kernel cannot run these sequences on a CUDA device, or None if it may."""
    if name == PADDED:
        return None
    if name == FLASH_3 and not facts.has_flash_3:
        return "not installed"
    if facts.dtype not in HALF:
        return f"computes in float16 and bfloat16, not {facts.dtype}"
    least, most = MAJORS[name]
    if facts.capability is None or not least <= facts.capability[0] <= most:
        shown = "none" if facts.capability is None else ".".join(map(str, facts.capability))
        return f"needs compute capability {least}.0 to {most}.9, this device has {shown}"
    if facts.head_dim % HEAD_DIM_STEP or facts.head_dim > MAX_HEAD_DIM:
        return f"takes heads of a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, not {facts.head_dim}"
    return None


OPENERS: Mapping[str, Callable[[], Kernel]] = {
    FLASH_3: flash_attn_3,
    TORCH_VARLEN: torch_varlen,
    PADDED: lambda: padded_groups,
    PER_SEQUENCE: lambda: per_sequence,
}
# How far a kernel's rows may be from SDPA's in float32, absolute, for normal values: some units of the last place.
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}
TRIAL_LENGTHS = [1, 9, 64, 33, 2]
TRIAL_WINDOW = 8


def kernel_for(forms: Iterable[AttentionForm], dtype: torch.dtype, device: torch.device) -> tuple[Choice, Kernel]:
    """The best kernel for what a model's layers ask of it, with its name; the log says which, and why none before it."""
    facts = facts_of(forms, dtype, device)
    *others, last = choices(facts)
    for candidate in others:
        try:
            kernel = OPENERS[candidate.name]()
            fault = trial(kernel, facts, device)
        except Exception as error:  # a package built for another torch or card fails in ways of its own
            fault = f"{type(error).__name__}: {error}"
        if fault is None:
            break
        log.warning("attention by %s is refused, the next is tried: %s", candidate.name, fault)
    else:
        candidate, kernel = last, OPENERS[last.name]()
    log.info("attention by %s: %s", candidate.name, candidate.why)
    return candidate, kernel


def facts_of(forms: Iterable[AttentionForm], dtype: torch.dtype, device: torch.device) -> Facts:
    """What decides: the device, and what the layers ask of attention."""
    forms = [*forms]
    has = {
        WINDOW: any(form.window is not None for form in forms),
        CAUSAL: any(form.causal for form in forms),
        GROUPED: any(form.heads.count != form.heads.key_count for form in forms),
    }
    on_gpu = device.type == "cuda"
    return Facts(
        device.type,
        str(dtype).removeprefix("torch."),
        max(form.heads.dim for form in forms),
        torch.cuda.get_device_capability(device) if on_gpu else None,
        on_gpu and find_spec("flash_attn_interface") is not None,
        frozenset(name for name, needed in has.items() if needed),
    )


def trial(kernel: Kernel, facts: Facts, device: torch.device) -> str | None:
    """What is wrong with a kernel on this device, or None: its rows against SDPA's in float32, with all that is needed."""
    draw, dtype = torch.Generator().manual_seed(0), getattr(torch, facts.dtype)
    heads = (4, 2, 2) if GROUPED in facts.needs else (4, 4, 4)
    offsets = torch.as_tensor(offsets_of(TRIAL_LENGTHS), device=device)
    parts = [torch.randn(sum(TRIAL_LENGTHS), count, facts.head_dim, generator=draw).to(device, dtype) for count in heads]
    for window in [None, TRIAL_WINDOW] if WINDOW in facts.needs else [None]:
        for causal in [False, True] if CAUSAL in facts.needs else [False]:
            found, exact = (
                one(q, k, v, Sequences(TRIAL_LENGTHS, offsets), scale=0.3, window=window, causal=causal).float()
                for one, (q, k, v) in ((kernel, parts), (per_sequence, [part.float() for part in parts]))
            )
            worst = float((found - exact).abs().max())
            if not worst <= TOLERANCE[facts.dtype]:  # NaN fails too
                return f"it differs from SDPA by {worst:.2g}, with a window of {window}, causal: {causal}"
    return None
