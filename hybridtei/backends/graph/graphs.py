"""An ONNX graph that lacks the checkpoint's tensors, and a file to keep one in."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hybridtei.backends.graph.writer import declarations
from hybridtei.checkpoint.weights import weight_files
from hybridtei.errors import LoadError
from hybridtei.system.cache_folder import cache_folder, whole


class _Tensors(msgspec.Struct, omit_defaults=True):
    """weights.json."""

    weights: dict[str, tuple[int, ...]]
    held: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX graph, and the shape of each tensor it lacks, by the checkpoint's name for it.

    `held`: tensors of the checkpoint that the graph carries itself, in another form. `matrices`: those of `weights` that it
    only multiplies by, of which runtimes make a packed form of their own.
    """

    body: bytes
    weights: Mapping[str, tuple[int, ...]]
    held: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()

    @property
    def onnx(self) -> bytes:
        """With the missing tensors declared: what a runtime reads."""
        return self.body + declarations(self.weights)

    def write(self, path: Path) -> None:
        """A zip of `graph.onnx` and `weights.json`, whole or not at all; the same graph gives the same bytes."""
        described = msgspec.json.encode(_Tensors(dict(self.weights), self.held, self.matrices))
        with whole(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for name, data in (("graph.onnx", self.body), ("weights.json", described)):
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)

    @classmethod
    def read(cls, path: Path) -> Graph:
        """Raises LoadError, naming the file."""
        try:
            with zipfile.ZipFile(path) as archive:
                tensors = msgspec.json.decode(archive.read("weights.json"), type=_Tensors)
                return cls(archive.read("graph.onnx"), tensors.weights, tensors.held, tensors.matrices)
        except Exception as error:  # zipfile lets through what zlib and others raise
            raise LoadError(f"{path}: not a readable graph: {error}") from error


def graphs_folder() -> Path:
    """Of graphs made on this machine."""
    return cache_folder("graphs")


def digest(graph: Graph, folder: Path, facts: bytes) -> str:
    """Of the computation, of the weights in `folder` by content, and of `facts` about this machine."""
    made = hashlib.sha256(graph.onnx + facts)
    for path in weight_files(folder):
        with path.open("rb") as file:
            made.update(hashlib.file_digest(file, "sha256").digest())
    return made.hexdigest()[:32]
