"""What a checkpoint says about itself, read from its configuration files without touching weights.

Reads both sentence-transformers layouts: the old one (boolean pooling flags, `max_seq_length` beside the model) and that
of version 6 (`pooling_mode` as a word, the length in `tokenizer_config.json`). The surprise: a config.json never mentions
BGE-M3's sparse and multi-vector heads; they exist if their files do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hybridtei.batch import Head, Positions
from hybridtei.checkpoint.files import inside, read_json, read_object, require
from hybridtei.checkpoint.heads import MultivectorHead, SparseHead, find_multivector_head, find_sparse_head
from hybridtei.errors import LoadError, MissingArtifact, UnsupportedArchitecture

Pooling = Literal["cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
POOLINGS: tuple[Pooling, ...] = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
LEGACY_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
OFFSET_FAMILIES = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "data2vec-text", "mpnet"})
TOKEN_TYPE_FAMILIES = frozenset({"bert", "electra", "nomic_bert", "gte", "deberta-v2", "deberta"})
LENGTH_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
ORDER = ("MLMTransformer", "Transformer", "Pooling", "SpladePooling", "Normalize")  # Dense: anywhere after the first
UNSET_LENGTH = 1_000_000  # transformers writes about 1e30 for "no limit"


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A sentence-transformers Dense layer after the pooling: `activation(W x + b)`."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which trunk, which heads, which limits."""

    folder: Path
    model_type: str
    architectures: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    max_input_length: int
    positions: Positions
    pooling: tuple[Pooling, ...]
    dense_modules: tuple[DenseModule, ...] = ()
    sparse: SparseHead | None = None
    multivector: MultivectorHead | None = None
    prompts: Mapping[str, str] | None = None
    removed_ids: frozenset[int] = frozenset()
    has_token_types: bool = False
    lowercase: bool = False
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def heads(self) -> frozenset[Head]:
        """Every output this model has."""
        if self.is_splade:
            return frozenset({Head.SPARSE})
        optional = {Head.SPARSE: self.sparse, Head.MULTIVECTOR: self.multivector}
        return frozenset({Head.DENSE, Head.TOKENS} | {head for head, spec in optional.items() if spec is not None})

    @property
    def is_splade(self) -> bool:
        """The pooled vector is a weight for each vocabulary entry, from the masked-language-model head."""
        return self.sparse is not None and self.sparse.kind == "splade"

    @property
    def dense_width(self) -> int:
        """Width of the dense vector."""
        if self.is_splade:
            return self.vocab_size
        return self.dense_modules[-1].out_features if self.dense_modules else self.hidden_size * len(self.pooling)


def read_spec(
    folder: Path, *, pooling: str | None = None, dense_path: str | None = None, heads_file: Path | None = None
) -> ModelSpec:
    """Read a model folder. `pooling` and `dense_path` override what it declares; `heads_file` adds heads kept elsewhere.

    Raises MissingArtifact, UnsupportedArchitecture or LoadError, each naming the file.
    """
    config = read_object(folder / "config.json")
    tokenizer_config = read_object(folder / "tokenizer_config.json", optional=True)
    require(folder / "tokenizer.json")
    architectures = tuple(config.get("architectures") or ())
    model_type = str(_needed(config, "model_type", folder))
    _refuse_other_tasks(folder, architectures)
    hidden_size = int(config.get("hidden_size") or config.get("dim") or _needed(config, "hidden_size", folder))
    modules = _modules(folder)
    splade = _is_splade(folder, pooling, modules, architectures)
    positions = _positions(model_type, config)
    sentence = read_object(folder / "config_sentence_transformers.json", optional=True)
    return ModelSpec(
        folder=folder,
        model_type=model_type,
        architectures=architectures,
        hidden_size=hidden_size,
        vocab_size=int(_needed(config, "vocab_size", folder)),
        max_input_length=_max_input_length(folder, config, tokenizer_config, positions),
        positions=positions,
        pooling=() if splade else _pooling(folder, pooling, modules, model_type),
        dense_modules=() if splade else _dense_modules(folder, modules, dense_path),
        sparse=SparseHead("splade") if splade else find_sparse_head(folder, hidden_size, heads_file),
        multivector=None if splade else find_multivector_head(folder, hidden_size, heads_file),
        prompts=_prompts(sentence, folder),
        removed_ids=_removed_ids(folder, tokenizer_config),
        has_token_types=model_type in TOKEN_TYPE_FAMILIES and int(config.get("type_vocab_size") or 0) > 1,
        lowercase=bool(_sentence_config(folder).get("do_lower_case")),
        config=config,
    )


def _needed(config: Mapping[str, Any], key: str, folder: Path) -> Any:
    if config.get(key) is None:
        raise LoadError(f"{folder / 'config.json'}: lacks `{key}`")
    return config[key]


def _refuse_other_tasks(folder: Path, architectures: tuple[str, ...]) -> None:
    if any(name.endswith("Classification") and name != "NewForTokenClassification" for name in architectures):
        raise UnsupportedArchitecture(
            f"{folder}: architectures {list(architectures)}: a classifier or reranker; this version serves embedding models"
        )


def _modules(folder: Path) -> list[tuple[str, str]]:
    """(type, path) of each sentence-transformers module; the type is the last dotted word, since versions moved modules."""
    if not (folder / "modules.json").exists():
        return []
    listed = read_json(folder / "modules.json")
    try:
        modules = [(str(module["type"]).rsplit(".", 1)[-1], str(module["path"])) for module in listed]
    except (TypeError, KeyError) as error:
        raise LoadError(f"{folder / 'modules.json'}: should list objects with `type` and `path`") from error
    unknown = [name for name, _ in modules if name not in (*ORDER, "Dense")]
    if unknown:
        raise UnsupportedArchitecture(f"{folder / 'modules.json'}: modules of type {unknown} are not served")
    _check_order(folder, [name for name, _ in modules])
    return modules


def _check_order(folder: Path, names: Sequence[str]) -> None:
    """A Normalize anywhere but at the end would change what comes after it; whether the end is normalised is asked for."""
    middle = [name for name in names if name != "Dense"]
    if "Normalize" in names[:-1] or names[:1] == ["Dense"] or middle != [name for name in ORDER if name in middle]:
        raise UnsupportedArchitecture(f"{folder / 'modules.json'}: the order {list(names)} is not served")


def _is_splade(folder: Path, pooling: str | None, modules: list[tuple[str, str]], architectures: tuple[str, ...]) -> bool:
    declared = [path for name, path in modules if name == "SpladePooling"]
    if pooling is not None and pooling != "splade":
        return False
    if declared:
        settings = read_object(inside(folder, declared[0]) / "config.json")
        strategy, activation = settings.get("pooling_strategy", "max"), settings.get("activation_function", "relu")
        if (strategy, activation) != ("max", "relu"):
            raise UnsupportedArchitecture(
                f"{folder / declared[0]}: SPLADE pooling {strategy!r} with {activation!r}; served: 'max' with 'relu'"
            )
        return True
    if pooling == "splade" and not any(name.endswith("MaskedLM") for name in architectures):
        raise UnsupportedArchitecture(
            f"{folder}: splade pooling needs an architecture ending in MaskedLM, config.json names {list(architectures)}"
        )
    return pooling == "splade"


def _pooling(folder: Path, override: str | None, modules: list[tuple[str, str]], model_type: str) -> tuple[Pooling, ...]:
    if override is not None:
        return ("lasttoken",) if override == "last-token" else (_pooling_name(override, folder),)
    path = next((path for name, path in modules if name == "Pooling"), "1_Pooling")
    settings = read_object(inside(folder, path) / "config.json", optional=not modules)
    if settings:
        return _declared_pooling(settings, inside(folder, path) / "config.json")
    if "bert" in model_type.lower():
        return ("cls",)  # TEI's default; /info shows it
    raise MissingArtifact(f"{folder / path / 'config.json'}: missing, and no --pooling given")


def _declared_pooling(settings: Mapping[str, Any], file: Path) -> tuple[Pooling, ...]:
    if settings.get("include_prompt") is False:
        raise UnsupportedArchitecture(f"{file}: pooling without the prompt's tokens (`include_prompt`: false) is not served")
    declared = settings.get("pooling_mode")
    if declared is not None:  # the words of sentence-transformers 6
        return tuple(_pooling_name(name, file) for name in ([declared] if isinstance(declared, str) else declared))
    modes = tuple(mode for flag, mode in LEGACY_FLAGS.items() if settings.get(flag))
    if not modes:
        raise LoadError(f"{file}: no pooling mode is true")
    return modes


def _pooling_name(name: str, where: Path) -> Pooling:
    for known in POOLINGS:
        if name == known:
            return known
    raise UnsupportedArchitecture(f"{where}: pooling {name!r}; served: {', '.join(POOLINGS)}")


def _dense_modules(folder: Path, modules: list[tuple[str, str]], override: str | None) -> tuple[DenseModule, ...]:
    paths = [path for name, path in modules if name == "Dense"]
    if override is not None and len(paths) == 1:  # TEI: only a single Dense can be replaced
        paths = [override]
    return tuple(_dense_module(inside(folder, path)) for path in paths)


def _dense_module(folder: Path) -> DenseModule:
    settings = read_object(folder / "config.json")
    if settings.get("use_residual"):
        raise UnsupportedArchitecture(f"{folder / 'config.json'}: Dense with a residual is not served")
    try:
        return DenseModule(
            folder,
            int(settings["in_features"]),
            int(settings["out_features"]),
            bool(settings.get("bias", True)),
            str(settings.get("activation_function") or "torch.nn.modules.activation.Tanh"),
        )
    except KeyError as error:
        raise LoadError(f"{folder / 'config.json'}: lacks `{error.args[0]}`") from error


def _positions(model_type: str, config: Mapping[str, Any]) -> Positions:
    if model_type not in OFFSET_FAMILIES:
        return Positions()
    padding_id = int(config.get("pad_token_id") or 0)
    return Positions(padding_id + 1, padding_id)


def _max_input_length(
    folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], positions: Positions
) -> int:
    table = config.get("max_position_embeddings") or config.get("max_trained_positions")
    limit = int(table) - positions.offset if table else None
    declared = _declared_length(folder)
    if declared is None:
        model_max = tokenizer_config.get("model_max_length")
        declared = int(model_max) if model_max and model_max < UNSET_LENGTH else None
    known = [length for length in (declared, limit) if length is not None]
    if not known:
        raise LoadError(f"{folder / 'config.json'}: lacks `max_position_embeddings`, and no other file tells the length")
    return min(known)


def _declared_length(folder: Path) -> int | None:
    length = _sentence_config(folder).get("max_seq_length")
    return None if length is None else int(length)


def _sentence_config(folder: Path) -> dict[str, Any]:
    """The first of sentence-transformers' settings files that is there."""
    return next((read_object(folder / name) for name in LENGTH_FILES if (folder / name).exists()), {})


def _prompts(sentence: Mapping[str, Any], folder: Path) -> Mapping[str, str] | None:
    prompts = sentence.get("prompts")
    if prompts is None:
        return None
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise LoadError(f"{folder / 'config_sentence_transformers.json'}: `prompts` should map names to texts")
    return prompts


def _removed_ids(folder: Path, tokenizer_config: Mapping[str, Any]) -> frozenset[int]:
    """Ids that lexical weights leave out: cls, sep, bos, eos, pad and unk, as far as the tokenizer has them."""
    names = {
        _token_text(tokenizer_config.get(key))
        for key in ("cls_token", "sep_token", "bos_token", "eos_token", "pad_token", "unk_token")
    }
    added = read_object(folder / "tokenizer.json").get("added_tokens") or []
    return frozenset(int(token["id"]) for token in added if token.get("content") in names)


def _token_text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
