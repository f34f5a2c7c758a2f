"""Checkpoints of the hub by their shapes: `checkpoints.toml` as structs, and the folder of one with
random weights."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from safetensors.torch import save_file

from conformance.checkpoints.build import modules
from conformance.families.shapes.layouts import Shapes, linear, shapes_of
from conformance.families.shapes.words import write_tokenizer
from conformance.small import tiny

Route = Literal["embed", "rerank", "embed_hybrid"]
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Of the weights, as most makers draw them
SCALE = 0.02


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the head of checkpoints.toml."""

    layout: str
    tokenizer: Literal["unigram", "wordpiece", "bytes"]
    dtype: Literal["F32", "F16", "BF16"]
    route: Route
    config: dict[str, Any]
    pooling: str | None = None
    normalize: bool = False
    dense: tuple[int, ...] = ()
    bin: bool = False
    m3_heads: bool = False

    @property
    def shapes(self) -> Shapes:
        """The shapes in the trunk's file."""
        return shapes_of(self.layout, self.config)

    @property
    def width(self) -> int:
        """The width of hidden states."""
        names = ("embedding_dim", "hidden_size", "n_embd")
        return next(int(self.config[name]) for name in names if name in self.config)

    @property
    def dense_shapes(self) -> list[Shapes]:
        """The shapes of each Dense module."""
        widths = (self.width, *self.dense)
        return [
            linear("linear", out, width, bias=False)
            for width, out in zip(widths, self.dense, strict=False)
        ]

    @property
    def numbers(self) -> int:
        """Weights, of all files."""
        heads = [
            linear("", width, self.width) for width in ((1, self.width) if self.m3_heads else ())
        ]
        return sum(
            math.prod(shape)
            for shapes in (self.shapes, *self.dense_shapes, *heads)
            for shape in shapes.values()
        )


def read_checkpoints() -> Mapping[str, Checkpoint]:
    """The checkpoints by name."""
    with Path(__file__).with_name("checkpoints.toml").open("rb") as file:
        return msgspec.convert(tomllib.load(file), dict[str, Checkpoint])


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the folder of a checkpoint, with random weights. `folder` has its name, by which some
    are recognised."""
    folder.mkdir(parents=True)
    tiny.write_json(folder / "config.json", checkpoint.config)
    tiny.write_json(
        folder / "tokenizer_config.json", {"model_max_length": _tokens(checkpoint.config)}
    )
    write_tokenizer(folder, checkpoint.tokenizer, checkpoint.config["vocab_size"])
    if checkpoint.bin:
        torch.save(drawn(checkpoint.shapes, checkpoint.dtype), folder / "pytorch_model.bin")
    else:
        _save(folder / "model.safetensors", checkpoint.shapes, checkpoint.dtype)
    if checkpoint.m3_heads:
        for name, width in (("sparse_linear", 1), ("colbert_linear", checkpoint.width)):
            torch.save(drawn(linear("", width, checkpoint.width), "F16"), folder / f"{name}.pt")
    if checkpoint.pooling is not None:
        _write_modules(folder, checkpoint, checkpoint.pooling)


def drawn(shapes: Shapes, dtype: str) -> dict[str, torch.Tensor]:
    """Random tensors: norms are near one, all else near zero."""
    torch.manual_seed(0)
    found = {}
    for name, shape in shapes.items():
        is_scale = name.endswith((".weight", ".layer_scalar")) and len(shape) == 1
        around = 1.0 if is_scale else 0.0
        found[name.lstrip(".")] = torch.empty(shape, dtype=DTYPES[dtype]).normal_(around, SCALE)
    return found


def _save(file: Path, shapes: Shapes, dtype: str) -> None:
    save_file(drawn(shapes, dtype), file, metadata={"format": "pt"})


def _tokens(config: Mapping[str, Any]) -> int:
    """What a tokenizer of the checkpoint is said to take: positions, without those before the
    first."""
    positions = int(config.get("max_position_embeddings") or config["n_positions"])
    return positions - 2 if positions % 2**8 == 2 else positions


def _write_modules(folder: Path, checkpoint: Checkpoint, pooling: str) -> None:
    normalize = ["Normalize"] if checkpoint.normalize else []
    described = {**tiny.old_pooling([pooling]), "word_embedding_dimension": checkpoint.width}
    modules(folder, ("Pooling", *("Dense" for _ in checkpoint.dense), *normalize), **described)
    for number, shapes in enumerate(checkpoint.dense_shapes, start=2):
        dense = folder / f"{number}_Dense"
        out, width = shapes["linear.weight"]
        settings = {"in_features": width, "out_features": out, "bias": False}
        tiny.write_json(
            dense / "config.json",
            {**settings, "activation_function": "torch.nn.modules.linear.Identity"},
        )
        _save(dense / "model.safetensors", shapes, "F32")
