"""Which kernel computes attention here, and why: a function of facts, without a device and without importing any of them.

The order is the issue's: flash-attn 2, then 4, then torch's own `varlen_attn`, then plain SDPA on padded groups. What stands
here is what the libraries promise; whether a kernel keeps it on this card is tried before it is used, see `attention`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec

WINDOW, CAUSAL, GROUPED = "windows", "causality", "fewer key heads than heads"
ALL = frozenset({WINDOW, CAUSAL, GROUPED})
HALF = frozenset({"float16", "bfloat16"})
MOST_HEAD_DIM = 256
HEAD_DIM_STEP = 8
BLACKWELL = (10, 11)  # major capabilities of its data centre cards, where flash-attn 4 is pickier about the width of a head
BLACKWELL_HEAD_DIM = 128

FLASH_2, FLASH_4, TORCH_VARLEN, PADDED, PER_SEQUENCE = (
    "flash-attn 2",
    "flash-attn 4",
    "torch varlen_attn",
    "SDPA on padded groups",
    "SDPA per sequence",
)
# Read where sequences end on the device, and wait for nothing: what they were asked once can be played again for other lengths.
REPLAYED = frozenset({FLASH_2, FLASH_4, TORCH_VARLEN})
PREFERRED = (FLASH_2, FLASH_4, TORCH_VARLEN, PADDED)
DISTRIBUTIONS = {FLASH_2: "flash-attn", FLASH_4: "flash-attn-4"}  # both import as `flash_attn`, so the name does not tell


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
        return "not installed" if name in DISTRIBUTIONS else "this torch has none that takes a scale"
    if facts.dtype not in HALF:
        return f"computes in float16 and bfloat16, not {facts.dtype}"
    if facts.capability is None or facts.capability < (8, 0):
        return f"needs compute capability 8.0, this device has {_shown(facts.capability)}"
    lacking = sorted(facts.needs - facts.present[name])
    if lacking:
        return f"has no {' and no '.join(lacking)}"
    return _head_dim_refused(name, facts)


def _head_dim_refused(name: str, facts: Facts) -> str | None:
    assert facts.capability is not None
    picky = name == FLASH_4 and facts.capability[0] in BLACKWELL
    most = BLACKWELL_HEAD_DIM if picky else MOST_HEAD_DIM
    if facts.head_dim % HEAD_DIM_STEP or (facts.head_dim > most and not (picky and facts.head_dim == MOST_HEAD_DIM)):
        return f"takes heads of a multiple of {HEAD_DIM_STEP} up to {most}, not {facts.head_dim}"
    return None


def present() -> dict[str, frozenset[str]]:
    """The optional kernels of this installation, asked of its metadata: no package of them is imported."""
    found = {name: ALL for name, distribution in DISTRIBUTIONS.items() if _installed(distribution)}
    features = _torch_varlen()
    return found if features is None else {**found, TORCH_VARLEN: features}


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return find_spec("flash_attn") is not None


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
