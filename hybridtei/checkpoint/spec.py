"""What a checkpoint says about itself, read from its configuration files without touching weights.

The surprise: a config.json never mentions BGE-M3's sparse and multi-vector heads; they exist if their files do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridtei.batch import Head, Positions
from hybridtei.checkpoint.files import positive, read_object, require
from hybridtei.checkpoint.heads import MultivectorHead, SparseHead, find_multivector_head, find_sparse_head
from hybridtei.checkpoint.modules import (
    DenseModule,
    Pooling,
    is_splade,
    read_dense_modules,
    read_modules,
    read_pooling,
    transformer_folder,
)
from hybridtei.errors import LoadError, UnsupportedArchitecture

# Count positions from the padding id on, which is 1 for all of them where config.json is silent.
OFFSET_FAMILIES = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "data2vec-text", "mpnet"})
# Could be trained with relative or ALiBi positions, which transformers 5 no longer computes: it would run them as absolute.
ABSOLUTE_FAMILIES = OFFSET_FAMILIES | {"bert", "electra"}
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
UNSET_LENGTH = 1_000_000  # transformers writes about 1e30 for "no limit"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Which trunk, which heads, which limits. `folder` holds the transformer's configuration, weights and tokenizer."""

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
    padding_id: int = 0
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
    modules = read_modules(folder)
    home = transformer_folder(folder, modules)
    file = home / "config.json"
    config = read_object(file)
    tokenizer_config = read_object(home / "tokenizer_config.json", optional=True)
    require(home / "tokenizer.json")
    architectures = _architectures(config, file)
    model_type = _model_type(config, file)
    _refuse_other_tasks(home, architectures)
    hidden_size = positive(config, "dim" if config.get("dim") and not config.get("hidden_size") else "hidden_size", file)
    splade = is_splade(folder, pooling, modules, architectures)
    poolings = () if splade else read_pooling(folder, pooling, modules, model_type)
    padding_id = _padding_id(model_type, config, file)
    positions = Positions(padding_id + 1, padding_id) if model_type in OFFSET_FAMILIES else Positions()
    sentence = read_object(folder / "config_sentence_transformers.json", optional=True)
    return ModelSpec(
        folder=home,
        model_type=model_type,
        architectures=architectures,
        hidden_size=hidden_size,
        vocab_size=positive(config, "vocab_size", file),
        max_input_length=_max_input_length(home, config, tokenizer_config, positions),
        positions=positions,
        pooling=poolings,
        dense_modules=() if splade else read_dense_modules(folder, modules, dense_path, hidden_size * len(poolings)),
        sparse=SparseHead("splade") if splade else find_sparse_head(folder, hidden_size, heads_file),
        multivector=None if splade else find_multivector_head(folder, hidden_size, heads_file),
        prompts=_prompts(sentence, folder),
        removed_ids=_removed_ids(home, tokenizer_config),
        has_token_types=_has_token_types(model_type, config, file),
        lowercase=bool(_sentence_config(home)[1].get("do_lower_case")),
        padding_id=padding_id,
        config=config,
    )


def _model_type(config: Mapping[str, Any], file: Path) -> str:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise LoadError(f"{file}: lacks `model_type`")
    form = config.get("position_embedding_type")
    if model_type in ABSOLUTE_FAMILIES and form not in (None, "absolute"):
        raise UnsupportedArchitecture(f"{file}: `position_embedding_type` {form!r} of {model_type}; served: 'absolute'")
    return model_type


def _architectures(config: Mapping[str, Any], file: Path) -> tuple[str, ...]:
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise LoadError(f"{file}: `architectures` is {names!r}, should be a list of names")
    return tuple(names)


def _refuse_other_tasks(folder: Path, architectures: tuple[str, ...]) -> None:
    if any(name.endswith("Classification") and name != "NewForTokenClassification" for name in architectures):
        raise UnsupportedArchitecture(
            f"{folder}: architectures {list(architectures)}: a classifier or reranker; this version serves embedding models"
        )


def _has_token_types(model_type: str, config: Mapping[str, Any], file: Path) -> bool:
    return (
        model_type in TOKEN_TYPE_FAMILIES
        and bool(config.get("type_vocab_size"))
        and positive(config, "type_vocab_size", file) > 1
    )


def _padding_id(model_type: str, config: Mapping[str, Any], file: Path) -> int:
    """What padding is filled with, and where an offset family's positions begin.

    Where config.json is silent: transformers' own default for the offset families. Other families pad under a mask, so any
    id will do; some decoders write -1 for "none".
    """
    declared, offset = config.get("pad_token_id"), model_type in OFFSET_FAMILIES
    if declared is None or (declared == -1 and not offset):
        return 1 if offset else 0
    if not isinstance(declared, int) or isinstance(declared, bool) or declared < 0:
        raise LoadError(f"{file}: `pad_token_id` is {declared!r}, should be a token id")
    return declared


def _max_input_length(
    folder: Path, config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], positions: Positions
) -> int:
    """The smallest of what the tokenizer, sentence-transformers and the table of positions allow."""
    sentence_file, sentence = _sentence_config(folder)
    lengths = (
        _length(tokenizer_config, "model_max_length", folder / "tokenizer_config.json"),
        _length(sentence, "max_seq_length", sentence_file),
        _table_length(config, positions, folder / "config.json"),
    )
    told = [length for length in lengths if length is not None]
    if not told:
        raise LoadError(f"{folder / 'config.json'}: lacks `max_position_embeddings`, and no other file tells the length")
    return min(told)


def _table_length(config: Mapping[str, Any], positions: Positions, file: Path) -> int | None:
    key = next((key for key in ("max_position_embeddings", "max_trained_positions") if config.get(key)), None)
    if key is None:
        return None
    length = positive(config, key, file) - positions.offset
    if length < 1:
        raise LoadError(f"{file}: `{key}` is {config[key]}, but positions begin at {positions.offset}")
    return length


def _length(settings: Mapping[str, Any], key: str, file: Path) -> int | None:
    if settings.get(key) is None:
        return None
    length = positive(settings, key, file)
    return None if length >= UNSET_LENGTH else length


def _sentence_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The first of sentence-transformers' settings files that is there, and what it says."""
    file = next((folder / name for name in LENGTH_FILES if (folder / name).exists()), folder / LENGTH_FILES[0])
    return file, read_object(file, optional=True)


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
    file = folder / "tokenizer.json"
    try:
        added = read_object(file).get("added_tokens") or []
        return frozenset(int(token["id"]) for token in added if token.get("content") in names)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise LoadError(f"{file}: `added_tokens` should list objects with `id` and `content`") from error


def _token_text(value: object) -> str | None:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
