"""ONNX graphs without weights: how they are kept and found.

A graph belongs to an architecture and its sizes, not to a checkpoint, so a few kilobytes serve every model of that shape. Its
file is a zip of `graph.onnx`, which does not even declare the checkpoint's tensors, and `weights.json`, their names and shapes.
A size that only counts the rows of a table stands there by its name in config.json. Graphs come with the package, or were
exported on this machine.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from hybridtei.backends.graph_names import graph_name
from hybridtei.backends.onnx_bytes import declarations
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import LoadError
from hybridtei.system.cache_folder import cache_folder, whole

__all__ = ["SHIPPED", "Graph", "graphs_folder", "find_graph", "graph_name", "read_graph"]

APPROXIMATE = b"\x0a\x0bapproximate\x22\x04"  # how an AttributeProto of that name begins, up to its four letters
SHIPPED = Path(__file__).parent / "onnx_graphs"


class _Wanted(msgspec.Struct, omit_defaults=True):
    """weights.json."""

    weights: dict[str, tuple[int | str, ...]]
    held: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX graph, and the shape of each tensor it lacks, by the checkpoint's name for it.

    `free`: of those, the ones whose number of rows is a size of their model, by its name in config.json. `held`: tensors of
    the checkpoint that the graph carries itself, in another form.
    """

    body: bytes
    weights: Mapping[str, tuple[int, ...]]
    free: Mapping[str, str] = field(default_factory=dict)
    held: tuple[str, ...] = ()

    @property
    def onnx(self) -> bytes:
        """With the missing tensors declared: what a runtime reads."""
        return self.body + declarations(self.weights)

    def with_tanh_gelu(self) -> Graph:
        """The same with TEI's form of GELU: an attribute of its nodes, and both words have four letters."""
        return replace(self, body=self.body.replace(APPROXIMATE + b"none", APPROXIMATE + b"tanh"))

    def write(self, path: Path) -> None:
        """Whole or not at all; the same graph always gives the same bytes."""
        named: dict[str, tuple[int | str, ...]] = {
            name: (self.free[name], *shape[1:]) if name in self.free else shape for name, shape in self.weights.items()
        }
        level = 1 if self.held else 9  # weights hardly shrink
        with whole(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
            for name, data in (("graph.onnx", self.body), ("weights.json", msgspec.json.encode(_Wanted(named, self.held)))):
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)

    @classmethod
    def read(cls, path: Path, config: Mapping[str, Any]) -> Graph:
        """The graph for a model of this configuration. Raises LoadError, naming the file."""
        try:
            with zipfile.ZipFile(path) as archive:
                wanted = msgspec.json.decode(archive.read("weights.json"), type=_Wanted)
                body = archive.read("graph.onnx")
        except Exception as error:  # zipfile lets through what zlib and others raise
            raise LoadError(f"{path}: not a readable graph: {error}") from error
        free = {name: dims[0] for name, dims in wanted.weights.items() if dims and isinstance(dims[0], str)}
        shapes = {name: tuple(_size(dim, config, path) for dim in dims) for name, dims in wanted.weights.items()}
        return cls(body, shapes, free, wanted.held)


def read_graph(path: Path, spec: ModelSpec) -> Graph:
    """The graph kept at `path`, for a model. Raises LoadError, naming the file."""
    graph = Graph.read(path, spec.config)
    return graph.with_tanh_gelu() if spec.tanh_gelu else graph


def _size(dim: int | str, config: Mapping[str, Any], path: Path) -> int:
    size = config.get(dim) if isinstance(dim, str) else dim
    if not isinstance(size, int) or isinstance(size, bool):
        raise LoadError(f"{path}: the graph needs `{dim}` of config.json, which is {size!r}")
    return size


def graphs_folder() -> Path:
    """Of graphs exported on this machine."""
    return cache_folder("graphs")


def find_graph(spec: ModelSpec) -> Path | None:
    """The graph of a model's architecture, if it is known here."""
    name = graph_name(spec)
    shipped = SHIPPED / name
    if shipped.is_file():  # asked first, since a user without a home folder has no cache
        return shipped
    exported = graphs_folder() / name
    return exported if exported.is_file() else None
