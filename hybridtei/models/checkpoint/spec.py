"""Facts of a checkpoint, from its configuration files without reading weights.

No config.json mentions BGE-M3's sparse and multi-vector heads; they exist if their files do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hybridtei.batch import Head, Positions
from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch
from hybridtei.models.checkpoint.classifiers import (
    LANGUAGE_MODELS,
    ClassifierHead,
    Kind,
    read_classifier,
    skipped_padding,
)
from hybridtei.models.checkpoint.contents import check_contents
from hybridtei.models.checkpoint.files import JsonObject, LoadedFiles, inside, read_object
from hybridtei.models.checkpoint.heads import (
    MultivectorHead,
    SparseHead,
    find_heads,
    read_coder,
    read_splade,
    token_projection,
)
from hybridtei.models.checkpoint.hub_layouts import PPLX, check_head_code, is_native, translate
from hybridtei.models.checkpoint.late import STANFORD, LateInteraction, is_late, read_late
from hybridtei.models.checkpoint.modules import (
    CODER,
    QUANTIZER,
    STATIC,
    DenseModule,
    Modules,
    Pooling,
    StepModule,
    codes_tokens,
    module_path,
    pools_prompts,
    read_modules,
    read_pooling,
    read_router,
    read_steps,
    splade_function,
    transformer_folder,
)
from hybridtei.models.checkpoint.peft import (
    largest_rank,
    modules_of,
    own_folders,
    weights_of,
)
from hybridtei.models.checkpoint.rankers import PairTemplate, language_ranker
from hybridtei.models.checkpoint.sentence import (
    MODEL_FILE,
    adds_specials,
    check_similarity,
    default_prompt,
    read_prompts,
    score_activation,
)
from hybridtei.models.checkpoint.sizes import (
    ABSOLUTE_FAMILIES,
    KEYS,
    MAX_RANKS,
    UNSET_LENGTH,
    Adapters,
    check_sizes,
    config_arguments,
    has_token_types,
    max_input_length,
    positions_of,
    read_adapters,
    read_hidden_size,
    read_padding_id,
    sentence_config,
    tokenizer_arguments,
    with_whole_sizes,
)
from hybridtei.models.checkpoint.tokenizer.settings import (
    UNCHANGED,
    TokenizerSettings,
    read_tokenizer_settings,
)
from hybridtei.models.checkpoint.tokenizer.vocabularies import (
    read_tokenizer,
    read_vocabulary,
    removed_ids,
    token_text,
    tokenizer_config,
    tokenizer_sha256,
)
from hybridtei.models.checkpoint.weights import Weights, has_weights

# The model type of a table of token vectors, which has no trunk
STATIC_TYPE = "static"
# The table's name in sentence-transformers' and in Model2Vec's files
STATIC_TABLES = ("embedding.weight", "embeddings")


@dataclass(frozen=True)
class ModelSpec:
    """Trunk, heads and limits of a model. `folder`: the transformer's configuration, weights and
    tokenizer.

    `default_prompt_name`: the prompt of texts without another. `truncate_dim`: the width that dense
    vectors are cut to.
    `bare`: texts get no special tokens. `pools_prompts`: prompts' tokens are pooled too.
    `skipped_padding`: from `classifiers.skipped_padding`. `template`: the prompt of a language
    model that ranks. `activation`: sentence-transformers' function of a reranker's logit, for
    information only, since scores follow TEI's rule. `config`: config.json, translated by
    `hub_layouts`; `is_native`: transformers' own class computes it. `tanh_gelu`: replaces the gelu
    of `config` (`layers.with_tanh_gelu`). `is_rounded`: pooled vectors are `round(127 tanh(x))`.
    `query`: the model that reads queries, if this one reads only documents; `default_route`: the
    side that reads a text of unknown kind: "query", "document" or None.
    """

    folder: Path
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    max_input_length: int
    positions: Positions
    pooling: tuple[Pooling, ...]
    dense_modules: tuple[StepModule, ...] = ()
    sparse: SparseHead | None = None
    multivector: MultivectorHead | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    bare: bool = False
    pools_prompts: bool = True
    removed_ids: frozenset[int] = frozenset()
    has_token_types: bool = False
    padding_id: int = 0
    skipped_padding: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    is_native: bool = True
    classifier: ClassifierHead | None = None
    template: PairTemplate | None = None
    late: LateInteraction | None = None
    activation: str | None = None
    unknown_token: str | None = None
    tanh_gelu: bool = False
    adapters: Adapters | None = None
    is_rounded: bool = False
    query: ModelSpec | None = None
    default_route: str | None = None
    tokenizer_settings: TokenizerSettings = UNCHANGED
    # A fingerprint that is read later is of these files, or there is none
    loaded_files: LoadedFiles = field(default_factory=LoadedFiles, repr=False, compare=False)
    # The files may change later
    tokenizer_sha256: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokenizer_sha256", tokenizer_sha256(self.folder))

    # Derived values, computed once since every request reads them.
    @cached_property
    def kind(self) -> Kind:
        """What the model does."""
        return "embedding" if self.classifier is None else self.classifier.kind

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """In the order of the logits."""
        return () if self.classifier is None else self.classifier.labels

    @cached_property
    def is_splade(self) -> bool:
        """True if the MLM head gives one weight a vocabulary entry."""
        return self.sparse is not None and self.sparse.kind == "splade"

    @cached_property
    def codes_tokens(self) -> bool:
        """True if a SparseAutoEncoder reads each token's state, without a pooling."""
        return self.sparse is not None and self.sparse.kind == "code" and not self.pooling

    @cached_property
    def dense_width(self) -> int:
        """The numbers of a dense vector."""
        if self.is_splade:
            return self.vocab_size
        width = self.hidden_size * len(self.pooling)
        if self.dense_modules:
            width = self.dense_modules[-1].out_features
        return min(width, self.truncate_dim or width)

    @cached_property
    def sparse_width(self) -> int:
        """The width of the vocabulary, or a code's number of latents."""
        return getattr(self.sparse, "width", 0) or self.vocab_size

    @cached_property
    def multivector_width(self) -> int:
        """The numbers of a token's vector; 0 without multi-vectors."""
        return getattr(self.multivector, "width", 0)

    @cached_property
    def heads(self) -> frozenset[Head]:
        """All outputs of the model."""
        if self.classifier is not None:
            return frozenset({Head.TAGS if self.classifier.kind == "tagger" else Head.SCORES})
        if self.is_splade:
            return frozenset({Head.SPARSE})
        if self.codes_tokens:
            return frozenset({Head.SPARSE, Head.TOKENS})
        # Only these have the same width on both routes
        if self.query is not None:
            return frozenset({Head.DENSE})
        if self.late is not None:
            return frozenset({Head.MULTIVECTOR, Head.TOKENS})
        optional = {Head.SPARSE: self.sparse, Head.MULTIVECTOR: self.multivector}
        return frozenset(
            {Head.DENSE, Head.TOKENS}
            | {head for head, spec in optional.items() if spec is not None}
        )


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
    spec = _read_sides(folder, pooling, dense_path, heads_file, trusted=trusted)
    return replace(spec, loaded_files=loaded_files)


def _read_sides(
    folder: Path,
    pooling: str | None,
    dense_path: str | None,
    heads_file: Path | None,
    *,
    trusted: bool,
) -> ModelSpec:
    """Read the model, or the two models of a router: `query` and the one for documents."""
    sentence = read_object(folder / MODEL_FILE, optional=True)
    names = read_object(folder / "config.json", optional=True).get("architectures")
    is_colbert = is_late(sentence, tuple(names) if isinstance(names, list) else ())
    modules = read_modules(folder, late=is_colbert)
    is_unit = module_path(modules, "Normalize") is not None or is_colbert
    check_similarity(sentence, is_unit=is_unit)
    routes = read_router(folder, modules)
    read = partial(
        _read,
        folder,
        sentence=sentence,
        pooling=pooling,
        dense_path=dense_path,
        trusted=trusted,
    )
    if not routes.query:
        return read(
            routes.document, queries=routes.table, is_colbert=is_colbert, heads_file=heads_file
        )
    document, query = read(routes.document), read(routes.query)
    if document.dense_width != query.dense_width:
        widths = f"{query.dense_width} numbers, those of documents {document.dense_width}"
        raise WeightMismatch(f"{folder}: the router's vectors of queries have {widths}")
    return replace(
        document, query=query, default_route=routes.default, sparse=None, multivector=None
    )


# Of SPLADE models whose queries are looked up in it
IDF_TABLE = "idf.json"


def _read(
    folder: Path,
    modules: Modules,
    *,
    sentence: JsonObject,
    pooling: str | None,
    dense_path: str | None,
    trusted: bool,
    queries: Path | None = None,
    is_colbert: bool = False,
    heads_file: Path | None = None,
) -> ModelSpec:
    """Read a model of these modules. `queries`: the table that replaces the model for queries."""
    home = transformer_folder(folder, modules)
    if module_path(modules, STATIC) is not None:
        return _static(folder, home, modules, sentence)
    check_contents(folder, home)
    file = home / "config.json"
    settings = sentence_config(home) if modules else JsonObject({}, home)
    published = with_whole_sizes(
        JsonObject({**read_object(file), **config_arguments(settings)}, file)
    )
    config = translate(published, file)
    native = is_native(published, config)
    adapters = read_adapters(config) or _side_by_side(home)
    config = JsonObject({key: value for key, value in config.items() if key not in KEYS}, file)
    words = tokenizer_arguments(settings, tokenizer_config(home))
    architectures = _architectures(config)
    model_type = _model_type(config)
    check_sizes(config, home, has_position_table=model_type in ABSOLUTE_FAMILIES)
    hidden_size = read_hidden_size(config)
    is_masked = any(name.endswith("MaskedLM") for name in architectures)
    if pooling is None and is_masked and not modules and (folder / IDF_TABLE).exists():
        pooling, queries = "splade", folder / IDF_TABLE
    splade = splade_function(folder, pooling, modules, architectures)
    classifier = None if splade else read_classifier(folder, home, modules, config, hidden_size)
    template = None
    if not splade:
        classifier, template = language_ranker(
            folder, home, modules, classifier, config=config, sentence=sentence
        )
    check_head_code(config, file, has_head=bool(splade) or classifier is not None)
    # sentence-transformers' cross-encoders read these only with modules.json
    transformer = (
        JsonObject({}, home) if classifier is not None and not modules else sentence_config(home)
    )
    late = None
    if is_colbert:
        late = read_late(
            folder,
            modules,
            sentence=sentence,
            transformer=transformer,
            tokenizer=words,
            vocabulary=read_vocabulary(home),
            stanford=STANFORD in architectures,
        )
    of_tokens = codes_tokens(modules)
    pooled = not splade and classifier is None and late is None and not of_tokens
    sparse, multivector = None, None
    if pooled:
        sparse, multivector = find_heads(folder, hidden_size, heads_file)
    elif splade is not None:
        sparse = read_splade(
            folder, modules, splade, queries, sentence.count_if_any("max_active_dims") or 0
        )
    if late is not None:
        multivector = token_projection(folder, home, modules, hidden_size)
    can_rank = model_type in LANGUAGE_MODELS
    poolings = (
        read_pooling(folder, pooling, modules, model_type, config, can_rank=can_rank)
        if pooled
        else ()
    )
    # Without a pooling, the width of token states
    pooled_width = hidden_size * max(1, len(poolings))
    dense = read_steps(folder, modules, dense_path, pooled_width, trusted=trusted) if pooled else ()
    if pooled and not dense:
        dense = _projection(home, model_type, config, pooled_width)
    if (coder := module_path(modules, CODER)) is not None:
        sparse = read_coder(
            inside(folder, coder),
            dense[-1].out_features if dense else pooled_width,
            sentence.count_if_any("max_active_dims"),
            of_tokens=of_tokens,
        )
    prompts = read_prompts(sentence, folder, adapters)
    padding_id = read_padding_id(model_type, config)
    positions = positions_of(model_type, padding_id)
    return ModelSpec(
        folder=home,
        model_type=model_type,
        architectures=architectures,
        hidden_size=hidden_size,
        vocab_size=config.count("vocab_size"),
        max_input_length=max_input_length(
            home, config, words, positions, sides=late is not None or not transformer
        ),
        positions=positions,
        pooling=poolings,
        dense_modules=dense,
        sparse=sparse,
        multivector=multivector,
        late=late,
        prompts=prompts,
        default_prompt_name=default_prompt(
            sentence,
            folder,
            prompts,
            embeds=pooled or splade is not None or of_tokens,
            ignores=classifier is not None and template is None,
        ),
        truncate_dim=sentence.count_if_any("truncate_dim") if pooled else None,
        bare=not adds_specials(home, scores=not pooled),
        pools_prompts=not pooled or pools_prompts(folder, pooling, modules),
        removed_ids=removed_ids(home, words),
        has_token_types=has_token_types(model_type, config, words),
        padding_id=padding_id,
        skipped_padding=skipped_padding(classifier, config),
        config=config,
        is_native=native,
        classifier=classifier,
        template=template,
        activation=score_activation(config, sentence),
        unknown_token=token_text(words.get("unk_token")),
        adapters=adapters,
        tokenizer_settings=read_tokenizer_settings(
            words,
            published.get("model_type", ""),
            published,
            lowercase=bool(transformer.get("do_lower_case")),
        ),
        is_rounded=pooled
        and (published.get("model_type") == PPLX or module_path(modules, QUANTIZER) is not None),
    )


def _side_by_side(home: Path) -> Adapters | None:
    """Return the adapters in folders of their own, by the folders' names."""
    folders = own_folders(home)
    if not folders:
        return None
    rank, names = largest_rank(folders), [folder.name for folder in folders]
    if rank * len(names) > MAX_RANKS:
        raise LoadError(
            f"{home}: {len(names)} adapters of rank {rank} are more than {MAX_RANKS} ranks"
        )
    factors = [Weights.of_file(weights_of(folder)).names() for folder in folders]
    targets = frozenset[str]().union(*map(modules_of, factors))
    return Adapters(tuple(names), rank, 1.0, dict.fromkeys(names, ""), targets)


def _static(folder: Path, home: Path, modules: Modules, sentence: JsonObject) -> ModelSpec:
    """Read a table of token vectors; a text's vector is their mean. Texts have any length, as in
    sentence-transformers.

    Model2Vec's own library also cuts at 512 tokens, and skips unknown words.
    """
    read_tokenizer(home)
    weights = Weights.open(home)
    name = next(filter(weights.has, STATIC_TABLES), None)
    if name is None or len(weights.shape(name)) != 2:
        raise LoadError(
            f"{home}: the weights lack a table `embedding.weight` or `embeddings` of two dimensions"
        )
    rows, width = weights.shape(name)
    if name == "embeddings" and weights.has("mapping"):
        rows = weights.shape("mapping")[0]
    prompts = read_prompts(sentence, folder, None)
    return ModelSpec(
        folder=home,
        model_type=STATIC_TYPE,
        architectures=(),
        hidden_size=width,
        vocab_size=rows,
        max_input_length=UNSET_LENGTH,
        positions=Positions(),
        pooling=("mean",),
        dense_modules=read_steps(folder, modules, None, width),
        prompts=prompts,
        default_prompt_name=default_prompt(sentence, folder, prompts, embeds=True),
        truncate_dim=sentence.count_if_any("truncate_dim"),
        bare=True,
    )


def _model_type(config: JsonObject) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise LoadError(
            f"{config.file}: lacks `model_type`, which should name the model's family, such as "
            "'bert'"
        )
    form = config.get("position_embedding_type")
    if model_type in ABSOLUTE_FAMILIES and form not in (None, "absolute"):
        raise UnsupportedArchitecture(
            f"{config.file}: `position_embedding_type` {form!r} of {model_type}; supported: "
            "'absolute'"
        )
    return model_type


def _architectures(config: JsonObject) -> tuple[str, ...]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.wrong("architectures", "a list of names")
    return tuple(names)


def _projection(
    home: Path, model_type: str, config: JsonObject, pooled_width: int
) -> tuple[DenseModule, ...]:
    """Return Qwen3's own projection of pooled vectors, to `num_labels` numbers, as TEI has it; few
    checkpoints have one."""
    if model_type != "qwen3" or config.get("num_labels") is None or not has_weights(home):
        return ()
    if not Weights.open(home).has("linear.weight"):
        return ()
    return (
        DenseModule(
            home,
            pooled_width,
            config.count("num_labels"),
            False,
            "torch.nn.modules.linear.Identity",
        ),
    )
