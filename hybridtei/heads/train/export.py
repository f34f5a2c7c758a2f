"""The head file: fp16 tensors and a JSON description, in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save

from hybridtei.heads.train.fit import Students

FORMAT_VERSION = 1
METADATA_KEY = "hybridtei_heads"


@dataclass(frozen=True)
class Origin:
    """Where the heads come from: recorded in the file, no part of how it is read."""

    base_name: str
    base_sha256: str  # of the base model's model.safetensors
    training: Mapping[str, str | int | float]  # data, licence, date, command, seed


def write_head_file(path: Path, students: Students, origin: Origin) -> None:
    """Write the heads to `path`, the same bytes for the same values.

    Raises ValueError where a weight is not finite in fp16.
    """
    tensors: dict[str, torch.Tensor] = {}
    for prefix, head in (("sparse", students.sparse), ("multivector", students.multivector)):
        for name, value in head.state_dict().items():
            half = value.to(torch.float16).contiguous()
            if not half.isfinite().all():
                raise ValueError(f"{prefix}.{name} does not fit fp16")
            tensors[f"{prefix}.{name}"] = half
    text = json.dumps(_describe(students, origin), sort_keys=True, separators=(",", ":"))
    path.write_bytes(save(dict(sorted(tensors.items())), metadata={METADATA_KEY: text}))


def _describe(students: Students, origin: Origin) -> dict[str, object]:
    sparse, multivector, recipe = students.sparse, students.multivector, students.recipe
    sparse_part: dict[str, object] = {"inputs": sparse.inputs, "idf": True}
    if sparse.hidden is not None:
        sparse_part["activation"] = sparse.activation
    return {
        "version": FORMAT_VERSION,
        "hidden_size": multivector.in_features,
        "base": {"name": origin.base_name, "sha256": origin.base_sha256},
        "sparse": sparse_part,
        "multivector": {"dim": multivector.out_features, "drop": recipe.drop, "prefixes": list(recipe.prefixes)},
        "training": dict(origin.training),
    }
