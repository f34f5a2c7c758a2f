"""Which kernel computes attention: chosen by facts, then tried on this device against SDPA before any text is.

The order is flash-attn 3, which is made for Hopper, then 4, for Hopper and later, then 2, then torch's own `varlen_attn`, then
plain SDPA on padded groups; the facts are what the libraries promise. A flash kernel may be installed and still not run: built
for another torch, without code for this card, wrong on it. So the first that answers the trial is taken, and what was refused
is in the log. Knows no family and no text.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec

import torch
from torch import Tensor

from hybridtei.backends.torch.kernels import (
    Kernel,
    Sequences,
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    padded_groups,
    per_sequence,
    torch_varlen,
)
from hybridtei.backends.torch.ops import AttentionForm
from hybridtei.batch import offsets_of

log = logging.getLogger(__name__)

WINDOW, CAUSAL, GROUPED = "windows", "causality", "fewer key heads than heads"
ALL = frozenset({WINDOW, CAUSAL, GROUPED})
HALF = frozenset({"float16", "bfloat16"})
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
ANY = 99
BLACKWELL = (10, 11)  # major capabilities of its data centre cards, where flash-attn 4 is pickier about the width of a head
BLACKWELL_HEAD_DIM = 128

FLASH_2, FLASH_3, FLASH_4, TORCH_VARLEN, PADDED, PER_SEQUENCE = (
    "flash-attn 2",
    "flash-attn 3",
    "flash-attn 4",
    "torch varlen_attn",
    "SDPA on padded groups",
    "SDPA per sequence",
)
# Read where sequences end on the device, and wait for nothing: what they were asked once can be played again for other lengths.
REPLAYED = frozenset({FLASH_2, FLASH_3, FLASH_4, TORCH_VARLEN})
PREFERRED = (FLASH_3, FLASH_4, FLASH_2, TORCH_VARLEN, PADDED)
MAJORS = {FLASH_3: (9, 9), FLASH_4: (9, ANY)}  # major capabilities: Hopper's, and those from Hopper's on
# The module of each, and its distribution where the module does not tell which it is.
PACKAGES = {
    FLASH_2: ("flash_attn", "flash-attn"),
    FLASH_3: ("flash_attn_interface", None),
    FLASH_4: ("flash_attn", "flash-attn-4"),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """`capability`: (major, minor) of a CUDA device. `present`: which optional kernels are installed, and what each can."""

    device: str
    dtype: str
    head_dim: int
    capability: tuple[int, int] | None = None
    present: Mapping[str, frozenset[str]] = field(default_factory=dict)
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
    if name not in facts.present:
        return "not installed" if name in PACKAGES else "this torch has none that takes a scale"
    if facts.dtype not in HALF:
        return f"computes in float16 and bfloat16, not {facts.dtype}"
    least, most = MAJORS.get(name, (8, ANY))
    if facts.capability is None or not least <= facts.capability[0] <= most:
        wanted = f"{least}.0" if most == ANY else f"{least}.0 to {most}.9"
        return f"needs compute capability {wanted}, this device has {_shown(facts.capability)}"
    lacking = sorted(facts.needs - facts.present[name])
    if lacking:
        return f"has no {' and no '.join(lacking)}"
    return _head_dim_refused(name, facts)


def _head_dim_refused(name: str, facts: Facts) -> str | None:
    assert facts.capability is not None
    picky = name == FLASH_4 and facts.capability[0] in BLACKWELL
    most = BLACKWELL_HEAD_DIM if picky else MAX_HEAD_DIM
    if facts.head_dim % HEAD_DIM_STEP or (facts.head_dim > most and not (picky and facts.head_dim == MAX_HEAD_DIM)):
        return f"takes heads of a multiple of {HEAD_DIM_STEP} up to {most}, not {facts.head_dim}"
    return None


def present() -> dict[str, frozenset[str]]:
    """The optional kernels of this installation, asked of its metadata: no package of them is imported."""
    found = {name: ALL for name, package in PACKAGES.items() if _installed(*package)}
    features = _torch_varlen()
    return found if features is None else {**found, TORCH_VARLEN: features}


def _installed(module: str, distribution: str | None) -> bool:
    try:
        if distribution is not None:
            metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return find_spec(module) is not None


def _torch_varlen() -> frozenset[str] | None:
    """What torch's own kernel takes: in 2.10 neither a scale nor windows, since 2.11 both."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    names = inspect.signature(varlen_attn).parameters
    if "scale" not in names:
        return None
    return ALL if "window_size" in names else ALL - {WINDOW, CAUSAL}


def _shown(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else ".".join(map(str, capability))


OPENERS: Mapping[str, Callable[[], Kernel]] = {
    FLASH_2: flash_attn_2,
    FLASH_3: flash_attn_3,
    FLASH_4: flash_attn_4,
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
    able = choices(facts)
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
        present() if device.type == "cuda" else {},
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
            exactly = (q.float(), k.float(), v.float())
            exact = per_sequence(*exactly, sequences=_sequences(device), scale=0.3, window=window, causal=back_only)
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
