"""Adapters in files of their own, as peft saves them: LoRA on linear maps and tables of words.

An adapter beside the weights is merged into them at load. Adapters in folders of their own inside
the model's folder are computed side by side, and each text names one by its folder's name.

Source of the formula: peft's `LoraLayer`. A linear map becomes `W + scale B A`, with `scale` alpha
/ rank, or alpha / sqrt(rank) with `use_rslora`; a table of rows `W + scale (B A)^T`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.files import JsonObject, read_object, require
from hybridtei.models.checkpoint.tensors import Tensor, find

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LONGEST_PATTERN = 500
# Of the rank and of alpha
DEFAULT = 8
# Keys with which only these values, or null, are supported.
SERVED: Mapping[str, tuple[object, ...]] = {
    "alora_invocation_tokens": (),
    "bias": ("none",),
    "corda_config": (),
    "ensure_weight_tying": (False,),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "layer_replication": (),
    "lora_bias": (False,),
    "loftq_config": ({},),
    "megatron_config": (),
    "modules_to_save": ([],),
    "peft_type": ("LORA",),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    "use_dora": (False,),
    "use_qalora": (False,),
}
# Keys without effect on a trained adapter: the tensors tell which modules it changes.
IRRELEVANT = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
READ = frozenset({"alpha_pattern", "lora_alpha", "r", "rank_pattern", "use_rslora"})
# Of a pattern: alternatives in brackets, a name, or a bar between names
PART = re.compile(r"\((?:\?:)?([\w.|-]+)\)|[\w.-]+|\|")
FACTOR = re.compile(
    r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?"
)


@dataclass(frozen=True, slots=True)
class Computed(Tensor):
    """A tensor that is computed from others. `file` and `name` are the place of the first."""

    make: Callable[[], NDArray[Any]] = field(default=lambda: np.empty(0))

    def stored(self) -> NDArray[Any]:
        return self.make()


@dataclass(frozen=True, slots=True)
class Change:
    """An adapter's change of one weight: `a` float[rank, in], `b` float[out, rank]. `is_table`: the
    weight has the shape [in, out]."""

    a: Tensor
    b: Tensor
    scale: float
    is_table: bool

    @property
    def rank(self) -> int:
        """The number of rows of `a`."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        shape = self.b.shape[0], self.a.shape[1]
        return shape[::-1] if self.is_table else shape

    def added(self, weight: Tensor) -> NDArray[Any]:
        """Return the changed weight in its own dtype."""
        base = weight.stored()
        product = self.scale * (self.b.array() @ self.a.array())
        if self.is_table:
            product = product.T
        return np.asarray(base + product, dtype=base.dtype)


def read_adapter(folder: Path) -> JsonObject:
    """Read a folder's adapter_config.json. Raises UnsupportedArchitecture or LoadError, naming the
    file, the key, its value and what to do."""
    file = folder / ADAPTER
    config = read_object(file)
    for key, value in config.items():
        served = SERVED.get(key, ())
        if value is None or key in IRRELEVANT | READ or value in served:
            continue
        # Options that are off, and later versions' options that are off
        if key not in SERVED and value in (False, [], {}):
            continue
        named = ", ".join(map(repr, served)) or "null"
        raise UnsupportedArchitecture(
            f"{file}: `{key}` is {str(value)[:LONGEST_PATTERN]!r}; supported: {named}. Merge the "
            "adapter by peft's `merge_and_unload` and serve the folder that `save_pretrained` "
            "writes"
        )
    if config.get("peft_type") is None:
        raise LoadError(f"{file}: lacks `peft_type`, which should be 'LORA'")
    config.count("r", DEFAULT)
    config.number("lora_alpha", DEFAULT)
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in config.object(key):
            _names(file, key, pattern)
    return config


def base_of(config: JsonObject) -> str:
    """Return the name of the model that an adapter changes. Raises LoadError."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise config.wrong("base_model_name_or_path", "the name of a model")
    return name


Places = Sequence[Collection[str]]


@lru_cache(4096)
def _names(file: Path, key: str, pattern: str) -> Sequence[Places]:
    """Return the names of a pattern: for each the alternatives that follow one another in it.

    peft matches regular expressions. A stranger's can take for ever, so only names and alternatives
    of names, such as `layers.0.(q_proj|v_proj)`, are read. Raises LoadError."""
    plain = pattern.removeprefix("^").removeprefix(".*").removeprefix("\\.").removesuffix("$")
    names: list[list[Collection[str]]] = [[]]
    end = 0
    for match in PART.finditer(plain[:LONGEST_PATTERN].replace("\\.", ".")):
        if match.start() != end:
            break
        end = match.end()
        if match[0] == "|":
            names.append([])
        else:
            names[-1].append(frozenset((match[1] or match[0]).split("|")))
    if end != len(plain.replace("\\.", ".")) or not all(names):
        raise LoadError(
            f"{file}: `{key}` holds {pattern[:LONGEST_PATTERN]!r}, which is no name: write names, "
            "or alternatives such as `(q_proj|v_proj)`, or merge the adapter by peft's "
            "`merge_and_unload`"
        )
    return names


def _ends_with(module: str, places: Places) -> bool:
    """True if a module's name ends with the names of `places`, after a dot or at its start."""
    starts = {0} | {place + 1 for place, letter in enumerate(module) if letter == "."}
    for names in places:
        starts = {
            start + len(name)
            for start in starts
            for name in names
            if module.startswith(name, start)
        }
    return len(module) in starts


def _value(config: JsonObject, module: str, key: str, patterns: str) -> float:
    """Return a module's rank or alpha: that of the first pattern that its name ends with."""
    written = config.object(patterns)
    for pattern in written:
        names = _names(config.file, patterns, pattern)
        if any(_ends_with(module, places) for places in names):
            return written.number(pattern)
    return config.number(key, DEFAULT)


def changes(
    folder: Path, factors: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Change]:
    """Return an adapter's changes by the names of the base's `tensors`. `factors`: the adapter's
    tensors. Raises LoadError, naming the tensor."""
    config, pairs = read_adapter(folder), dict[tuple[str, bool], dict[str, Tensor]]()
    for name, tensor in factors.items():
        match = FACTOR.fullmatch(name)
        if match is None:
            raise UnsupportedArchitecture(
                f"{tensor.file}: `{name}` is no factor of LoRA; supported: lora_A, lora_B, "
                "lora_embedding_A, lora_embedding_B. Merge the adapter by peft's "
                "`merge_and_unload`"
            )
        pairs.setdefault((match[1], match[2] is not None), {})[match[3]] = tensor
    weights = dict[str, Change]()
    for (module, is_table), pair in pairs.items():
        if pair.keys() != {"A", "B"}:
            raise LoadError(f"{folder / ADAPTER_WEIGHTS}: `{module}` has only lora_{min(pair)}")
        rank = _value(config, module, "r", "rank_pattern")
        alpha = _value(config, module, "lora_alpha", "alpha_pattern")
        divisor = math.sqrt(rank) if config.flag("use_rslora", False) else rank
        change = Change(pair["A"], pair["B"], alpha / divisor, is_table)
        base = find(tensors, f"{module}.weight")
        shape = None if base is None else tensors[base].shape
        sides = change.a.shape, change.b.shape
        fits = len(sides[0]) == len(sides[1]) == 2 and sides[0][0] == sides[1][1] == rank
        if base is None or not fits or change.shape != shape:
            raise LoadError(
                f"{folder / ADAPTER_WEIGHTS}: the factors of `{module}` have shapes {sides}, which "
                f"do not fit rank {rank:g} and the base's weight of shape {shape}: is it the "
                "adapter of another base?"
            )
        weights[base] = change
    return weights


def merged(tensors: Mapping[str, Tensor], adapter: Mapping[str, Change]) -> dict[str, Tensor]:
    """Return the tensors with an adapter's changes added."""
    weights = dict(tensors)
    for name, change in adapter.items():
        weights[name] = _computed(tensors[name], partial(change.added, tensors[name]))
    return weights


def side_by_side(
    tensors: Mapping[str, Tensor], adapters: Sequence[Mapping[str, Change]], rank: int
) -> dict[str, Tensor]:
    """Return the tensors with two factors beside each adapted weight, as `families.ops.adapted`
    describes them. `rank`: that of all adapters, to which smaller ones are filled with zeros."""
    weights = dict(tensors)
    for name in sorted({name for adapter in adapters for name in adapter}):
        changes_here = [adapter.get(name) for adapter in adapters]
        example = next(change for change in changes_here if change is not None)
        total = rank * len(adapters)
        width_in, width_out = example.a.shape[1], example.b.shape[0]
        a_shape = (width_in, total) if example.is_table else (total, width_in)
        stem = name.removesuffix(".weight")
        for letter, shape in (("A", a_shape), ("B", (width_out, total))):
            make = partial(_factor, changes_here, letter, rank, shape)
            factor = replace(_computed(tensors[name], make), dtype="F32", shape=shape)
            weights[f"{stem}.lora_{letter}.weight"] = factor
    return weights


def _factor(
    changes_here: list[Change | None], letter: str, rank: int, shape: tuple[int, int]
) -> NDArray[np.float32]:
    """The factors `letter` of all adapters of one weight, `rank` rows or columns for each; an
    adapter without a change has zeros."""
    values = np.zeros(shape, np.float32)
    for place, change in enumerate(changes_here):
        if change is None:
            continue
        part = slice(place * rank, place * rank + change.rank)
        if letter == "B":
            values[:, part] = change.scale * change.b.array()
        elif change.is_table:
            values[:, part] = change.a.array().T
        else:
            values[part] = change.a.array()
    return values


def _computed(tensor: Tensor, make: Callable[[], NDArray[Any]]) -> Computed:
    return Computed(
        tensor.file,
        tensor.name,
        tensor.mapping,
        tensor.dtype,
        tensor.shape,
        tensor.start,
        tensor.stop,
        make=make,
    )


def largest_rank(folders: Sequence[Path]) -> int:
    """Return the largest rank of adapters, from their configurations."""
    configs = [read_adapter(folder) for folder in folders]
    patterns = [config.object("rank_pattern") for config in configs]
    ranks = [config.count("r", DEFAULT) for config in configs]
    ranks.extend(written.count(pattern) for written in patterns for pattern in written)
    return max(ranks)


def modules_of(names: Collection[str]) -> frozenset[str]:
    """Return the modules that an adapter changes, from the names of its factors."""
    matches = (FACTOR.fullmatch(name) for name in names)
    return frozenset(match[1] for match in matches if match is not None)


def own_folders(folder: Path) -> list[Path]:
    """Return the folders of adapters inside a model's folder. Raises LoadError if one lies beside
    the weights too."""
    folders = sorted(file.parent for file in folder.glob(f"*/{ADAPTER}"))
    if folders and (folder / ADAPTER).exists():
        raise LoadError(
            f"{folder / ADAPTER}: an adapter beside the weights, and {len(folders)} in folders of "
            f"their own, such as {folders[0].name}: move it into a folder too"
        )
    return folders


def weights_of(folder: Path) -> Path:
    """Return the file of an adapter's factors. Raises MissingArtifact."""
    return require(folder / ADAPTER_WEIGHTS)
