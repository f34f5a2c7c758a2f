"""Head files beside a model: BGE-M3's two files, or our one file. They are found by name and
checked by shape.

An incomplete head is an error; the reference implementation uses random weights if a file is
missing.

Our file (`hybridtei_heads.safetensors`, written by `hybridtei train`) has its description as JSON
in the safetensors metadata, under `hybridtei_heads`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from hybridtei.errors import (
    LoadError,
    MissingArtifact,
    UnsupportedArchitecture,
    WeightMismatch,
)
from hybridtei.models.checkpoint.checkpoint import Checkpoint
from hybridtei.models.checkpoint.files import require
from hybridtei.models.checkpoint.modules import (
    CODER,
    OF_TOKENS,
    DenseModule,
    read_steps,
    splade_function,
)
from hybridtei.models.checkpoint.weights import Weights, has_shape

# Of SPLADE models whose queries are looked up in it
IDF_TABLE = "idf.json"
HEADS_FILE = "hybridtei_heads.safetensors"
METADATA_KEY = "hybridtei_heads"
LINEAR_SUFFIXES = (".pt", ".safetensors")
Drop = Literal["first", "specials", "none"]


@dataclass(frozen=True, slots=True)
class SparseHead:
    """`linear`: relu(W h + b), as in BGE-M3; `mlp`: relu(out(act(hidden(x)))); `splade`: the
    masked-language-model head;
    `code`: the `active` largest of `width` latents of the pooled vector, `normalized` first if
    declared; without a pooling, of each token's unit state.

    `inputs`: the parts of x: "hidden" (last hidden state), "embedding" (layer-normed word
    embedding).
    `idf`: query weights are multiplied by the collection's inverse document frequency.
    `own`: the file is in our format, with several named heads.
    `active` of `splade`: the number of largest weights to keep; 0: all.
    `double_log`: SPLADE's weights go through log(1 + x) twice.
    `queries`: the table that replaces the model for queries (a folder, or `idf.json`).
    """

    kind: Literal["linear", "mlp", "splade", "code"]
    file: Path | None = None
    inputs: tuple[str, ...] = ("hidden",)
    activation: str = "relu"
    idf: bool = True
    own: bool = False
    double_log: bool = False
    queries: Path | None = None
    width: int = 0
    active: int = 0
    normalized: bool = False

    @property
    def can_look_up(self) -> bool:
        """True if queries need no model: a table, or the collection's idf, gives their weights."""
        return self.queries is not None or self.idf


class Shares(Struct, frozen=True):
    """The weight of each kind of vector in a score."""

    dense: Annotated[float, Meta(ge=0)]
    sparse: Annotated[float, Meta(ge=0)]
    multivector: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class MultivectorHead:
    """One vector of `width` numbers for each kept token. `own`: as in `SparseHead`.

    In a late-interaction model `module` is the last Dense module and `before` the earlier ones, or
    `tensor` names the projection among the model's weights. `shares`: the weights of the kinds of
    vectors in reranking, if the file has them.
    """

    file: Path
    width: int
    drop: Drop = "first"
    own: bool = False
    before: tuple[DenseModule, ...] = ()
    module: DenseModule | None = None
    tensor: str | None = None
    shares: Shares | None = None


def find_heads(
    folder: Path, hidden_size: int, heads_file: Path | None = None
) -> tuple[SparseHead | None, MultivectorHead | None]:
    """Return the lexical head and the multi-vector head beside a model. Raises LoadError, naming
    the wrong file."""
    own = heads_file or folder / HEADS_FILE
    if heads_file is None and not own.exists():
        lexical = _linear_file(folder, "sparse_linear", 1, hidden_size)
        colbert = _linear_file(folder, "colbert_linear", None, hidden_size)
        # BGE-M3's weights include the idf
        sparse_head = None if lexical is None else SparseHead("linear", lexical[0], idf=False)
        return sparse_head, None if colbert is None else MultivectorHead(*colbert)
    description = read_description(own)
    if description.hidden_size != hidden_size:
        raise WeightMismatch(
            f"{own}: made for a hidden size of {description.hidden_size}, the model has "
            f"{hidden_size}"
        )
    sparse, many, sparse_head = description.sparse, description.multivector, None
    if sparse is not None:
        kind: Literal["linear", "mlp"] = "linear" if sparse.activation is None else "mlp"
        sparse_head = SparseHead(
            kind,
            own,
            sparse.inputs,
            sparse.activation or "relu",
            sparse.idf,
            own=True,
        )
    return sparse_head, None if many is None else MultivectorHead(
        own,
        many.dim,
        many.drop,
        own=True,
        shares=description.rerank,
    )


def read_coder(checkpoint: Checkpoint, width_before: int, *, of_tokens: bool = False) -> SparseHead:
    """Return the sparse head of a SparseAutoEncoder module. `max_active_dims` overrides its `k`.
    `of_tokens`: no pooling comes before it. Raises LoadError."""
    module = checkpoint.module(CODER)
    assert module is not None
    settings, sentence = module.object(), checkpoint.root.sentence
    width, active, inputs = (
        settings.count("hidden_dim", 512),
        settings.count("k", 8),
        settings.get("input_dim"),
    )
    if inputs != width_before:
        raise WeightMismatch(
            f"{settings.file}: `input_dim` is {inputs}, but what comes before it has {width_before}"
        )
    if active > width:
        raise LoadError(f"{settings.file}: `k` is {active}, more than `hidden_dim` {width}")
    active = min(sentence.count_if_any("max_active_dims") or active, width)
    normalized = bool(settings.get("normalize", False))
    if of_tokens and normalized:
        raise UnsupportedArchitecture(
            f"{settings.file}: `normalize` is true, but without a Pooling the SparseAutoEncoder "
            "reads unit token states; put a Pooling before it, or set `normalize` to false"
        )
    return SparseHead(
        "code", module.path, (), idf=False, width=width, active=active, normalized=normalized
    )


def read_splade(checkpoint: Checkpoint) -> SparseHead | None:
    """Return the head of a SPLADE model, or None. Without modules, only the folder's name
    identifies OpenSearch's version 3, which applies two logarithms."""
    folder, sentence = checkpoint.root.path, checkpoint.root.sentence
    pooling, queries = checkpoint.flags.pooling, checkpoint.queries
    has_table = not checkpoint.modules and (folder / IDF_TABLE).exists()
    if pooling is None and has_table and checkpoint.is_a("MaskedLM"):
        pooling, queries = "splade", folder / IDF_TABLE
    function = splade_function(checkpoint, pooling)
    if function is None:
        return None
    double_log = function == "log1p_relu"
    if not checkpoint.modules:
        version = re.search(r"[-_]v3", str(folder.resolve()), re.IGNORECASE)
        double_log = queries is not None and version is not None
    active = sentence.count_if_any("max_active_dims") or 0
    return SparseHead("splade", idf=False, double_log=double_log, queries=queries, active=active)


def token_projection(checkpoint: Checkpoint) -> MultivectorHead:
    """Return the projection of a late-interaction model: Dense modules, or a tensor among its
    weights."""
    dense = [
        step
        for step in read_steps(checkpoint, checkpoint.hidden_size, names=OF_TOKENS)
        if isinstance(step, DenseModule)
    ]
    if dense:
        return MultivectorHead(
            dense[-1].folder,
            dense[-1].out_features,
            "none",
            before=tuple(dense[:-1]),
            module=dense[-1],
        )
    home, name = checkpoint.home.path, "linear.weight"
    weights = checkpoint.home.weights or Weights.open(home)
    if not weights.has(name):
        raise MissingArtifact(
            f"{checkpoint.root}: neither a Dense module nor the tensor `{name}`: no projection of "
            "the token vectors"
        )
    return MultivectorHead(home, weights.shape(name)[0], "none", tensor=name)


class SparseDescription(Struct, frozen=True):
    """The sparse part of our head file. Without an activation the head is linear."""

    inputs: Annotated[tuple[Literal["hidden", "embedding"], ...], Meta(min_length=1)]
    activation: str | None = None
    idf: bool = True


class MultivectorDescription(Struct, frozen=True):
    """The multi-vector part of our head file."""

    dim: Annotated[int, Meta(ge=1)]
    drop: Drop = "first"


class Description(Struct, frozen=True):
    """The metadata of our head file, without the training record."""

    version: Literal[1]
    hidden_size: int
    sparse: SparseDescription | None = None
    multivector: MultivectorDescription | None = None
    rerank: Shares | None = None


def read_description(file: Path) -> Description:
    """Read our head file's metadata. Raises LoadError, naming the file."""
    from safetensors import safe_open

    require(file)
    try:
        with safe_open(file, framework="numpy") as opened:
            return msgspec.json.decode((opened.metadata() or {})[METADATA_KEY], type=Description)
    except KeyError as error:
        raise LoadError(f"{file}: its metadata lacks `{METADATA_KEY}`") from error
    except Exception as error:
        # safetensors' exceptions have no documented base class
        raise LoadError(
            f"{file}: its `{METADATA_KEY}` should describe heads of version 1: {error}"
        ) from error


def _linear_file(
    folder: Path, stem: str, rows: int | None, hidden_size: int
) -> tuple[Path, int] | None:
    """Return (file, rows of its weight) of a one-layer head, or None. `rows` None: any number above
    0."""
    files = sorted(folder.glob(f"{stem}.*"))
    if len(files) > 1 or any(file.suffix not in LINEAR_SUFFIXES for file in files):
        names = ", ".join(str(file) for file in files)
        raise LoadError(f"{names}: should be one file, {stem}{f' or {stem}'.join(LINEAR_SUFFIXES)}")
    if not files:
        return None
    weights = Weights.of_file(files[0])
    if weights.names() != {"weight", "bias"}:
        raise LoadError(
            f"{files[0]}: holds {sorted(weights.names())}, should hold ['bias', 'weight']"
        )
    shape = weights.shape("weight")
    if not has_shape(shape, (rows, hidden_size)) or 0 in shape:
        needed = "any" if rows is None else rows
        raise WeightMismatch(
            f"{files[0]}: weight of shape {list(shape)}, the model needs [{needed}, {hidden_size}]"
        )
    return files[0], shape[0]
