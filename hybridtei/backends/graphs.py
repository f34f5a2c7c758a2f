"""ONNX graphs without weights: how they are named, kept and found.

A graph belongs to an architecture and its sizes, not to a checkpoint, so a few kilobytes serve every model of that shape. Its
file is a zip of `graph.onnx` and `weights.json`, the names and shapes of the tensors it wants from a checkpoint. Graphs come
with the package, or were exported on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import LoadError

FORMAT = 1  # raised when the exporter changes what it makes
SHIPPED = Path(__file__).parent / "onnx_graphs"
# What a configuration says of its maker, its task or its training changes no graph.
IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "label2id",
        "problem_type",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Said or not, these change nothing; any other value does.
DEFAULTS: Mapping[str, object] = {"add_cross_attention": False, "is_decoder": False, "position_embedding_type": "absolute"}


@dataclass(frozen=True, slots=True)
class Graph:
    """An ONNX graph, and the shape of each tensor it lacks, by the checkpoint's name for it."""

    onnx: bytes
    weights: Mapping[str, tuple[int, ...]]

    def write(self, path: Path) -> None:
        """Whole or not at all; the same graph always gives the same bytes."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name, data in (("graph.onnx", self.onnx), ("weights.json", json.dumps(self.weights).encode())):
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Graph:
        """Raises LoadError, naming the file."""
        try:
            with zipfile.ZipFile(path) as archive:
                weights = msgspec.json.decode(archive.read("weights.json"), type=dict[str, tuple[int, ...]])
                return cls(archive.read("graph.onnx"), weights)
        except Exception as error:  # zipfile lets through what zlib and others raise
            raise LoadError(f"{path}: not a readable graph: {error}") from error


def graph_name(spec: ModelSpec) -> str:
    """File name of the graph of a model's architecture."""
    facts = {key: value for key, value in spec.config.items() if _matters(key, value)}
    digest = hashlib.sha256(json.dumps([FORMAT, facts], sort_keys=True).encode()).hexdigest()[:16]
    return f"{spec.model_type}-{digest}.zip"


def _matters(key: str, value: object) -> bool:
    return key not in IRRELEVANT and "dropout" not in key and not (key in DEFAULTS and value in (None, DEFAULTS[key]))


def cache_folder() -> Path:
    """Of graphs exported on this machine: HYBRIDTEI_CACHE, or one below the user's cache folder."""
    own = os.environ.get("HYBRIDTEI_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hybridtei" / "graphs"


def find_graph(spec: ModelSpec) -> Path | None:
    """The graph of a model's architecture, if it is known here."""
    name = graph_name(spec)
    return next((folder / name for folder in (SHIPPED, cache_folder()) if (folder / name).is_file()), None)
