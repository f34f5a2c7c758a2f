"""`hybridtei export`: writes a model's folder with an ONNX file that includes the weights, in the
layout of optimum and sentence-transformers.

The folder has `onnx/model.onnx` or `onnx/model_quantized.onnx`, and the checkpoint's own
configuration, tokenizer, modules and heads.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hybridtei.errors import UnsupportedArchitecture
from hybridtei.inference.backends.fidelity import Fidelity, Guard
from hybridtei.inference.backends.graph.int8 import make_int8
from hybridtei.inference.backends.graph.onnx_files import FILES, WORDS
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.graph.writer import Graph, contents, declarations
from hybridtei.inference.backends.weights import graph_tensors, word_table
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats

# Bytes of tensors; larger ones go into a second file, since a protobuf message ends at 2 GB
LARGEST_FILE = 1_500_000_000
DESCRIBING = frozenset({".json", ".txt", ".model"})
NO_COPY = frozenset({"onnx", "openvino"})


@dataclass(frozen=True, slots=True)
class Report:
    """The written file, and its fidelity if it is not float32."""

    path: Path
    size: int
    fidelity: Fidelity | None

    def __str__(self) -> str:
        text = f"{self.path}: {self.size / 1e6:.1f} MB"
        return text if self.fidelity is None else f"{text}, {self.fidelity}"


def export_model(
    spec: ModelSpec,
    out: Path,
    dtype: Literal["float32", "int8"] = "float32",
    guard: Guard | None = None,
) -> Report:
    """Write a new model folder with an ONNX file. Raises LoadError, also if an int8 model fails
    `guard`."""
    if spec.is_splade:
        raise UnsupportedArchitecture(
            f"{spec.folder}: SPLADE models can be served, but not exported"
        )
    if spec.sparse is not None and spec.sparse.kind == "code":
        raise UnsupportedArchitecture(
            f"{spec.folder}: models with a SparseAutoEncoder can be served, but not exported"
        )
    weights = Weights.open(spec.folder)
    graph, fidelity = family_graph(spec, rectangle=True), None
    words = word_table(spec, graph.weights)
    tensors = graph_tensors(graph, weights)
    if dtype == "int8":
        graph, fidelity = make_int8(spec, weights, guard or Guard(), rectangle=True)
    path = out / FILES[dtype][0]
    _write(graph, {name: tensors[name] for name in graph.weights}, path)
    if words is not None:
        from safetensors.numpy import save_file

        # A separate file, for the heads that read the word embeddings
        save_file({"words": np.ascontiguousarray(tensors[words])}, path.parent / WORDS)
    _copy_files(spec, out)
    return Report(path, sum(file.stat().st_size for file in path.parent.iterdir()), fidelity)


def _write(graph: Graph, tensors: Mapping[str, Floats], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.with_name(f"{path.name}_data")
    data.unlink(missing_ok=True)
    if sum(value.nbytes for value in tensors.values()) <= LARGEST_FILE:
        path.write_bytes(graph.body + contents(tensors))
        return
    with data.open("wb") as file:
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).data)
    path.write_bytes(
        graph.body + declarations({name: value.shape for name, value in tensors.items()}, data.name)
    )


def _copy_files(spec: ModelSpec, out: Path) -> None:
    """Copy all files except the trunk's weights, and also heads from other folders."""
    root = spec.folder.parent if spec.folder.name == "0_Transformer" else spec.folder
    heads = {
        head.file
        for head in (spec.sparse, spec.multivector)
        if head is not None and head.file is not None
    }
    for file in (*_described(root, spec.folder), *sorted(heads)):
        target = out / f"hybridtei_heads{file.suffix}"
        if file.is_relative_to(root):
            target = out / file.relative_to(root)
        if target.resolve() != file.resolve():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _described(root: Path, home: Path) -> Iterator[Path]:
    for file in sorted((*root.glob("*"), *root.glob("*/*"))):
        describes = file.suffix in DESCRIBING and not file.name.endswith(".index.json")
        is_of_module = file.suffix == ".safetensors" and file.parent not in (root, home)
        if file.is_file() and file.parent.name not in NO_COPY and (describes or is_of_module):
            yield file
