"""LoRA adapters that a checkpoint carries, of which each text gets one or none: their settings and their tensors.

Source: Jina embeddings v3, Sturua et al. 2024, and its config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridtei.checkpoint.files import positive
from hybridtei.errors import LoadError, UnsupportedArchitecture

if TYPE_CHECKING:
    from hybridtei.checkpoint.weights import Tensor

# What config.json says of adapters; a family does not read it.
KEYS = frozenset(
    {
        "load_trained_adapters",
        "lora_adaptations",
        "lora_alpha",
        "lora_dropout_p",
        "lora_main_params_trainable",
        "lora_rank",
        "task_instructions",
    }
)
MAX_RANKS, MAX_ALPHA = 4_096, 1_000_000  # bounds above those of any model; ranks of all adapters together


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters in the order of their tensors; `prompts`: the text that goes before an input of each.

    A text's adapter is a number: 0 for none, else its place in `names` plus 1. `scale`: what B (A x) is multiplied by.
    """

    names: tuple[str, ...]
    rank: int
    scale: float
    prompts: Mapping[str, str]

    @property
    def form(self) -> tuple[int, int, float]:
        """What `families.ops.adapted` takes."""
        return len(self.names), self.rank, self.scale


def read_adapters(config: Mapping[str, Any], file: Path) -> Adapters | None:
    """Return the adapters that a configuration names, or None. Raises LoadError or UnsupportedArchitecture."""
    names = config.get("lora_adaptations")
    if names is None:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise LoadError(f"{file}: `lora_adaptations` is {names!r}, should list names")
    if len(set(names)) < len(names):
        raise LoadError(f"{file}: `lora_adaptations` is {names!r}, which names an adapter twice")
    if config.get("load_trained_adapters") is False:
        raise UnsupportedArchitecture(f"{file}: `load_trained_adapters` is False; served: True")
    instructions = config.get("task_instructions") or {}
    if not isinstance(instructions, dict) or not all(isinstance(text, str) for text in instructions.values()):
        raise LoadError(f"{file}: `task_instructions` should map names to texts")
    alpha = config.get("lora_alpha", 1)
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= MAX_ALPHA:
        raise LoadError(f"{file}: `lora_alpha` is {alpha!r}, should be a positive number, at most {MAX_ALPHA}")
    rank = positive({"lora_rank": 4, **config}, "lora_rank", file)
    if rank * len(names) > MAX_RANKS:
        raise LoadError(f"{file}: `lora_rank` is {rank}, and {len(names)} adapters of it are more than {MAX_RANKS} ranks")
    return Adapters(tuple(names), rank, alpha / rank, {name: instructions.get(name, "") for name in names})


ORIGINAL = re.compile(r"(.+)\.parametrizations\.weight\.original")


def stacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a checkpoint's tensors with those of adapters as two linear maps beside each adapted `NAME.weight`.

    Their names and shapes: see `families.ops.adapted`. Raises LoadError.
    """
    found = dict(tensors)
    for original in [name for name in tensors if ORIGINAL.fullmatch(name)]:
        name = original.removesuffix(".parametrizations.weight.original")
        keys = [f"{name}.parametrizations.weight.0.lora_{letter}" for letter in "AB"]
        weight = found[f"{name}.weight"] = found.pop(original)
        if not all(key in found for key in keys):
            raise LoadError(f"{weight.file}: `{original}` lacks {' and '.join(f'`{key}`' for key in keys if key not in found)}")
        pair = _pair(weight, found.pop(keys[0]), found.pop(keys[1]))
        found |= {f"{name}.lora_{letter}.weight": one for letter, one in zip("AB", pair, strict=True)}
    return found


def _pair(weight: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(A, B) of all adapters. A linear map adds B A to its weights, a table adds A B."""
    if len(weight.shape) == 2 and len(a.shape) == len(b.shape) == 3:
        count, rank, columns = a.shape
        if (columns, b.shape) == (weight.shape[1], (count, weight.shape[0], rank)):
            return _laid_out(a, (0, 1, 2), (count * rank, columns)), _laid_out(b, (1, 0, 2), (weight.shape[0], count * rank))
        count, rows, rank = a.shape
        if (rows, b.shape) == (weight.shape[0], (count, rank, weight.shape[1])):
            return _laid_out(a, (1, 0, 2), (rows, count * rank)), _laid_out(b, (2, 0, 1), (weight.shape[1], count * rank))
    raise LoadError(
        f"{a.file}: `{a.name}` and `{b.name}` have shapes {list(a.shape)} and {list(b.shape)}, "
        f"which fit no weights of shape {list(weight.shape)}"
    )


def _laid_out(tensor: Tensor, axes: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    strides = tensor.strides or [*_row_after_row(tensor.shape)]
    walked = tuple(tensor.shape[axis] for axis in axes)
    return replace(tensor, shape=shape, walked=walked, strides=tuple(strides[axis] for axis in axes))


def _row_after_row(shape: Sequence[int]) -> Sequence[int]:
    return shape[1] * shape[2], shape[2], 1
