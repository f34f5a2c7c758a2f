"""Facts of a checkpoint, from its configuration files without reading weights.

No config.json mentions BGE-M3's sparse and multi-vector heads; they exist if their files do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridtei.batch import Head, Positions
from hybridtei.errors import LoadError, WeightMismatch
from hybridtei.models.checkpoint.checkpoint import (
    STATIC,
    Checkpoint,
    Flags,
    removed_ids,
)
from hybridtei.models.checkpoint.classifiers import Role
from hybridtei.models.checkpoint.contents import check_contents
from hybridtei.models.checkpoint.files import JsonObject, LoadedFiles
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.heads import MultivectorHead, SparseHead
from hybridtei.models.checkpoint.keys import check_keys
from hybridtei.models.checkpoint.kinds import (
    Embedding,
    Kind,
    Labels,
    Late,
    Splade,
    Static,
    cut_width,
    read_kind,
)
from hybridtei.models.checkpoint.late import is_late
from hybridtei.models.checkpoint.modules import read_modules, read_steps
from hybridtei.models.checkpoint.router import read_router
from hybridtei.models.checkpoint.sentence import (
    adds_specials,
    check_similarity,
    default_prompt,
    read_prompts,
)
from hybridtei.models.checkpoint.sizes import (
    UNSET_LENGTH,
    Adapters,
    check_sizes,
    has_token_types,
    max_input_length,
)
from hybridtei.models.checkpoint.tokenizer.settings import (
    UNCHANGED,
    TokenizerSettings,
    read_tokenizer_settings,
)
from hybridtei.models.checkpoint.tokenizer.vocabularies import (
    TOKENIZER,
    read_tokenizer,
    token_text,
    tokenizer_sha256,
)
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families.family import Pooling

# The table's name in sentence-transformers' and in Model2Vec's files
STATIC_TABLES = ("embedding.weight", "embeddings")


@dataclass(frozen=True)
class ModelSpec:
    """What all models have, and their kind. `folder`: the transformer's configuration, weights and
    tokenizer.

    `default_prompt_name`: the prompt of texts without another. `bare`: texts get no special tokens.
    `config`: config.json, translated by `hub_layouts`; `is_native`: transformers' own class
    computes it. `tanh_gelu`: replaces the gelu of `config` (`layers.with_tanh_gelu`).
    """

    folder: Path
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    max_input_length: int
    positions: Positions
    kind: Kind
    prompts: Mapping[str, str] | None = None
    default_prompt_name: str | None = None
    bare: bool = False
    removed_ids: frozenset[int] = frozenset()
    has_token_types: bool = False
    padding_id: int = 0
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    is_native: bool = True
    unknown_token: str | None = None
    tanh_gelu: bool = False
    adapters: Adapters | None = None
    tokenizer_settings: TokenizerSettings = UNCHANGED
    # A fingerprint that is read later is of these files, or there is none
    loaded_files: LoadedFiles = field(default_factory=LoadedFiles, repr=False, compare=False)
    # The files may change later
    tokenizer_sha256: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer_sha256", tokenizer_sha256(self.folder))

    # Derived values, computed once since every request reads them.
    @cached_property
    def role(self) -> Role:
        """What the model does."""
        return self.kind.role

    @cached_property
    def heads(self) -> frozenset[Head]:
        """All outputs of the model."""
        return self.kind.heads

    @cached_property
    def is_splade(self) -> bool:
        """True if the MLM head gives one weight a vocabulary entry."""
        return isinstance(self.kind, Splade)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """In the order of the logits."""
        return self.kind.head.labels if isinstance(self.kind, Labels) else ()

    @cached_property
    def pooling(self) -> tuple[Pooling, ...]:
        """The poolings whose vectors are concatenated."""
        return self.kind.pooling

    @cached_property
    def sparse(self) -> SparseHead | None:
        """The head of sparse vectors."""
        return self.kind.sparse

    @cached_property
    def multivector(self) -> MultivectorHead | None:
        """The head of multi-vectors."""
        return self.kind.multivector

    @cached_property
    def dense_width(self) -> int:
        """The numbers of a dense vector."""
        return self.kind.width

    @cached_property
    def sparse_width(self) -> int:
        """The width of the vocabulary, or a code's number of latents."""
        return getattr(self.sparse, "width", 0) or self.vocab_size

    @cached_property
    def sparse_idf(self) -> bool:
        """True if query weights are multiplied by the collection's inverse document frequency."""
        return getattr(self.sparse, "idf", False)

    @cached_property
    def reads_words(self) -> bool:
        """True if the sparse head reads the word embeddings beside the states."""
        return "embedding" in getattr(self.sparse, "inputs", ())

    @cached_property
    def multivector_width(self) -> int:
        """The numbers of a token's vector; 0 without multi-vectors."""
        return getattr(self.multivector, "width", 0)


@dataclass(frozen=True, kw_only=True)
class Router(Embedding):
    """A dense vector by one of two models. The spec is that of documents, of the kind
    `of_documents`; `of_queries` reads queries; `default`: the side that reads a text of unknown
    type: "query", "document" or None."""

    of_documents: Embedding
    of_queries: ModelSpec
    default: str | None

    @property
    def heads(self) -> frozenset[Head]:
        """Only these have the same width on both routes."""
        return frozenset({Head.DENSE})


def read_spec(
    folder: Path,
    *,
    pooling: str | None = None,
    dense_path: str | None = None,
    heads_file: Path | None = None,
    trusted: bool = False,
) -> ModelSpec:
    """Read a model folder. `pooling` and `dense_path` override its declarations; `heads_file` adds
    heads from another place.
    `trusted`: activations of Dense modules may be classes that are not torch's.

    Raises MissingArtifact, UnsupportedArchitecture or LoadError, each naming the file.
    """
    loaded_files = LoadedFiles.of(folder)
    root, flags = Folder(folder), Flags(pooling, dense_path, heads_file, trusted)
    modules = read_modules(root, late=is_late(root))
    check_similarity(root.sentence, is_unit=is_late(root) or "Normalize" in dict(modules))
    routes = read_router(root, modules)
    spec = _read(Checkpoint(root, routes.document, flags, routes.table, routes.default))
    if routes.query:
        query = _read(Checkpoint(root, routes.query, flags))
        spec = _router(root, spec, query, routes.default)
    return replace(spec, loaded_files=loaded_files)


def _router(root: Folder, document: ModelSpec, query: ModelSpec, default: str | None) -> ModelSpec:
    if document.dense_width != query.dense_width:
        widths = f"{query.dense_width} numbers, those of documents {document.dense_width}"
        raise WeightMismatch(f"{root}: the router's vectors of queries have {widths}")
    assert isinstance(document.kind, Embedding)
    kind = replace(document.kind, sparse=None, multivector=None)
    routed = Router(**vars(kind), of_documents=kind, of_queries=query, default=default)
    return replace(document, kind=routed)


def _read(checkpoint: Checkpoint) -> ModelSpec:
    """Read a model of one chain of modules."""
    if checkpoint.module(STATIC) is not None:
        return _static(checkpoint)
    home, sentence = checkpoint.home, checkpoint.root.sentence
    check_contents(checkpoint.root, home)
    config, adapters, words = checkpoint.config, checkpoint.adapters, checkpoint.words
    check_sizes(
        config,
        home.path,
        has_position_table=checkpoint.family.is_absolute,
    )
    hidden_size, kind = checkpoint.hidden_size, read_kind(checkpoint)
    # sentence-transformers' cross-encoders read these only with modules.json
    transformer = checkpoint.settings if isinstance(kind, Labels) else home.transformer
    published = checkpoint.published
    prompts = read_prompts(sentence, adapters)
    spec = ModelSpec(
        folder=home.path,
        model_type=checkpoint.model_type,
        architectures=checkpoint.architectures,
        hidden_size=hidden_size,
        vocab_size=config.count("vocab_size"),
        max_input_length=max_input_length(
            home.transformer,
            config,
            words,
            checkpoint.positions,
            sides=isinstance(kind, Late) or not transformer,
        ),
        positions=checkpoint.positions,
        kind=kind,
        prompts=prompts,
        default_prompt_name=default_prompt(
            sentence,
            prompts,
            embeds=not isinstance(kind, Labels | Late),
            ignores=isinstance(kind, Labels) and kind.template is None,
        ),
        bare=not adds_specials(
            home.transformer,
            scores=not isinstance(kind, Embedding),
            renders=not transformer or kind.template is not None,
        ),
        removed_ids=removed_ids(home, words),
        has_token_types=has_token_types(checkpoint.family, config, words),
        padding_id=checkpoint.padding_id,
        config=config,
        is_native=checkpoint.is_native,
        unknown_token=token_text(words.get("unk_token")),
        adapters=adapters,
        tokenizer_settings=read_tokenizer_settings(
            words,
            published.get("model_type", ""),
            published,
            lowercase=bool(transformer.get("do_lower_case")),
        ),
    )
    check_keys(checkpoint, kind.tasks)
    return spec


def _static(checkpoint: Checkpoint) -> ModelSpec:
    """Read a table of token vectors; a text's vector is their mean. Texts have any length, unless
    tokenizer.json cuts them, as in sentence-transformers.

    Model2Vec's own library also cuts at 512 tokens, and skips unknown words.
    """
    home, sentence = checkpoint.home.path, checkpoint.root.sentence
    truncation = JsonObject(read_tokenizer(home), home / TOKENIZER).object("truncation")
    weights = checkpoint.home.weights or Weights.open(home)
    name = next(filter(weights.has, STATIC_TABLES), None)
    if name is None or len(weights.shape(name)) != 2:
        raise LoadError(
            f"{home}: the weights lack a table `embedding.weight` or `embeddings` of two dimensions"
        )
    rows, hidden_size = weights.shape(name)
    if name == "embeddings" and weights.has("mapping"):
        rows = weights.shape("mapping")[0]
    prompts, steps = read_prompts(sentence, None), read_steps(checkpoint, hidden_size)
    width = steps[-1].out_features if steps else hidden_size
    return ModelSpec(
        folder=home,
        model_type="static",
        architectures=(),
        hidden_size=hidden_size,
        vocab_size=rows,
        max_input_length=truncation.count("max_length", UNSET_LENGTH),
        positions=Positions(),
        kind=Static(pooling=("mean",), steps=steps, width=cut_width(checkpoint, width)),
        prompts=prompts,
        default_prompt_name=default_prompt(sentence, prompts, embeds=True),
        bare=True,
    )
