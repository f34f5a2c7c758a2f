"""Rotary position embeddings: the frequencies of a configuration, after transformers' `modeling_rope_utils`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.families.settings import Settings

Frequencies = tuple[NDArray[np.float32], float]  # float32[dim / 2], and what cosines and sines are multiplied by
SERVED = ("default", "linear", "llama3", "yarn")
READ = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)


def frequencies(settings: Settings, head_dim: int, *, theta: float, kind: str | None = None) -> Frequencies:
    """Of the whole model, or of its layers of a `kind`. `theta`: the family's default.

    Raises UnsupportedArchitecture for a way of scaling that is not served: one that follows the length, among others.
    """
    written = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    nested = written.get(kind) if kind is not None and isinstance(written.get(kind), Mapping) else written
    parameters: Mapping[str, Any] = {"rope_theta": settings.get("rope_theta", theta), **(nested or {})}
    how = parameters.get("rope_type") or parameters.get("type") or "default"
    if how not in SERVED:
        raise settings.unsupported("rope_type", how, SERVED)
    for key in parameters.keys() - READ:
        raise settings.unsupported("rope_parameters", key, tuple(sorted(READ)))
    share = parameters.get("partial_rotary_factor") or settings.get("partial_rotary_factor", 1.0)
    dim = int(head_dim * share)
    base = float(parameters["rope_theta"])
    inverse = plain(dim, base)
    if how == "linear":
        return inverse / np.float32(float(parameters["factor"])), 1.0
    if how == "llama3":
        return _llama3(inverse, parameters), 1.0
    if how == "yarn":
        return _yarn(inverse, dim, base, parameters, settings.get("max_position_embeddings"))
    return inverse, 1.0


def plain(dim: int, theta: float) -> NDArray[np.float32]:
    """Without scaling: float32[dim / 2]."""
    return np.asarray(1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)), dtype=np.float32)


def _llama3(inverse: NDArray[np.float32], parameters: Mapping[str, Any]) -> NDArray[np.float32]:
    factor, low, high = (float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    context = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = np.where(wavelength > context / low, inverse / factor, inverse)
    is_between = (wavelength <= context / low) & (wavelength >= context / high)
    return np.where(is_between, between, scaled).astype(np.float32)


def _yarn(inverse: NDArray[np.float32], dim: int, base: float, parameters: Mapping[str, Any], length: Any) -> Frequencies:
    context = float(parameters.get("original_max_position_embeddings") or length)
    factor = float(parameters.get("factor") or float(length) / context)
    attention = parameters.get("attention_factor")
    if attention is None:
        whole, part = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention = _mscale(factor, whole) / _mscale(factor, part) if whole and part else _mscale(factor, 1.0)

    def dimension(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    mixed = inverse / np.float32(factor) * ramp + inverse * (1 - ramp)
    return mixed.astype(np.float32), float(attention)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
