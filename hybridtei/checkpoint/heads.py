"""Heads that lie beside a model: BGE-M3's two files, or one file of ours. Found by name, checked by shape.

A head that is half there is an error, never random weights: the reference implementation keeps randomly initialised heads
when a file is missing, and says so only at log level info.

Our file (`hybridtei_heads.safetensors`, made by `hybridtei train`) carries its own description as JSON in
its safetensors metadata, under `hybridtei_heads`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from numpy.typing import NDArray

from hybridtei.checkpoint.files import require
from hybridtei.checkpoint.modules import DenseModule
from hybridtei.checkpoint.weights import read_linear
from hybridtei.errors import LoadError, WeightMismatch

HEADS_FILE = "hybridtei_heads.safetensors"
METADATA_KEY = "hybridtei_heads"
LINEAR_SUFFIXES = (".pt", ".safetensors")
Drop = Literal["first", "specials", "none"]


@dataclass(frozen=True, slots=True)
class SparseHead:
    """`linear`: relu(W h + b), as BGE-M3; `mlp`: relu(out(act(hidden(x)))); `splade`: the masked-language-model head.

    `inputs` names what x joins: "hidden" (last hidden state), "embedding" (layer-normed word embedding).
    `idf`: the weights profit from the collection's inverse document frequency on the query's side.
    `own`: the file is of our kind, which holds several heads under their names, whatever it is called.
    `double_log`: SPLADE's weights go through log(1 + x) once more. `queries`: where the table is that queries are looked up in
    instead (a folder, or `idf.json`).
    """

    kind: Literal["linear", "mlp", "splade"]
    file: Path | None = None
    inputs: tuple[str, ...] = ("hidden",)
    activation: str = "relu"
    idf: bool = True
    own: bool = False
    double_log: bool = False
    queries: Path | None = None


class Shares(Struct, frozen=True):
    """How much each kind of similarity counts in a score."""

    dense: Annotated[float, Meta(ge=0)]
    sparse: Annotated[float, Meta(ge=0)]
    multivector: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class MultivectorHead:
    """One vector of width `dim` a token, but not for the dropped ones. `own`: as in `SparseHead`.

    Of a late-interaction model: `before`, layers that each token goes through first; `module`, the last of its Dense modules;
    or `tensor`, the projection by its name among the model's own weights. `shares`: how much each kind of vector counts where
    the model reranks by them, if it says so.
    """

    file: Path
    dim: int
    drop: Drop = "first"
    own: bool = False
    before: tuple[DenseModule, ...] = ()
    module: DenseModule | None = None
    tensor: str | None = None
    shares: Shares | None = None


def find_sparse_head(folder: Path, hidden_size: int, heads_file: Path | None = None) -> SparseHead | None:
    """The lexical head beside a model, or None. Raises LoadError if its file is there but unfit."""
    described = _own_file(folder, heads_file)
    if described is not None:
        file, description = described
        _fits(file, description.hidden_size, hidden_size)
        sparse = description.sparse
        if sparse is None:
            return None
        if sparse.activation is None:
            return SparseHead("linear", file, sparse.inputs, idf=sparse.idf, own=True)
        return SparseHead("mlp", file, sparse.inputs, sparse.activation, sparse.idf, own=True)
    linear = _linear_file(folder, "sparse_linear")
    if linear is None:
        return None
    weight = read_linear(linear)["weight"]
    _shape(linear, weight, (1, hidden_size))
    return SparseHead("linear", linear, idf=False)  # BGE-M3's weights hold the importance of a term already


def find_multivector_head(folder: Path, hidden_size: int, heads_file: Path | None = None) -> MultivectorHead | None:
    """The multi-vector head beside a model, or None. Raises LoadError if its file is there but unfit."""
    described = _own_file(folder, heads_file)
    if described is not None:
        file, description = described
        _fits(file, description.hidden_size, hidden_size)
        multivector = description.multivector
        if multivector is None:
            return None
        return MultivectorHead(file, multivector.dim, multivector.drop, own=True, shares=description.rerank)
    linear = _linear_file(folder, "colbert_linear")
    if linear is None:
        return None
    weight = read_linear(linear)["weight"]
    _shape(linear, weight, (None, hidden_size))
    return MultivectorHead(linear, int(weight.shape[0]))


def _own_file(folder: Path, heads_file: Path | None) -> tuple[Path, Description] | None:
    file = heads_file or folder / HEADS_FILE
    if heads_file is None and not file.exists():
        return None
    return file, read_description(file)


class SparseDescription(Struct, frozen=True):
    """Of a sparse head; without an activation it is the linear one."""

    inputs: Annotated[tuple[Literal["hidden", "embedding"], ...], Meta(min_length=1)]
    activation: str | None = None
    idf: bool = True


class MultivectorDescription(Struct, frozen=True):
    """The multi-vector part of our head file."""

    dim: Annotated[int, Meta(ge=1)]
    drop: Drop = "first"


class Description(Struct, frozen=True):
    """What our head file says of itself; what it says of its making is not read."""

    version: Literal[1]
    hidden_size: int
    sparse: SparseDescription | None = None
    multivector: MultivectorDescription | None = None
    rerank: Shares | None = None


def read_description(file: Path) -> Description:
    """What our head file says of itself. Raises LoadError, naming the file."""
    from safetensors import safe_open

    require(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            return msgspec.json.decode((opened.metadata() or {})[METADATA_KEY], type=Description)
    except KeyError as error:
        raise LoadError(f"{file}: its metadata lacks `{METADATA_KEY}`") from error
    except Exception as error:  # safetensors raises kinds of its own
        raise LoadError(f"{file}: its `{METADATA_KEY}` should describe heads of version 1: {error}") from error


def _linear_file(folder: Path, stem: str) -> Path | None:
    """The head's one file. A second one, or one of another kind, would be a head that is there and does not count."""
    files = sorted(folder.glob(f"{stem}.*"))
    if len(files) > 1 or any(file.suffix not in LINEAR_SUFFIXES for file in files):
        names = ", ".join(str(file) for file in files)
        raise LoadError(f"{names}: should be one file, {stem}{f' or {stem}'.join(LINEAR_SUFFIXES)}")
    return files[0] if files else None


def _fits(file: Path, described: int, hidden_size: int) -> None:
    if described != hidden_size:
        raise WeightMismatch(f"{file}: made for a hidden size of {described}, the model has {hidden_size}")


def _shape(file: Path, weight: NDArray[Any], wanted: tuple[int | None, int]) -> None:
    """`None`: any number of outputs, but not none."""
    found = tuple(weight.shape)
    if len(found) != 2 or 0 in found or any(want not in (None, have) for want, have in zip(wanted, found, strict=True)):
        needed = ", ".join("any" if size is None else str(size) for size in wanted)
        raise WeightMismatch(f"{file}: weight of shape {list(found)}, the model needs [{needed}]")
