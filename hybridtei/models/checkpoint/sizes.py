"""Numbers in a configuration, checked against bounds and against the weight files: sizes, lengths
and LoRA adapters. Each text uses one adapter or none (Jina embeddings v3, Sturua et al. 2024, and
its config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from hybridtei.batch import Positions
from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch
from hybridtei.models.checkpoint.files import JsonObject, require
from hybridtei.models.checkpoint.weights import weight_files
from hybridtei.models.families import SERVED, family_of
from hybridtei.models.families.family import Family

# The names of each size in different families, and a bound above any model's.
SIZES = {
    "vocab": (("vocab_size",), 10_000_000),
    "hidden": (("hidden_size", "dim"), 131_072),
    "layers": (("num_hidden_layers", "n_layers"), 2_048),
    "inner": (("intermediate_size", "hidden_dim"), 2_097_152),
    "heads": (("num_attention_heads", "n_heads", "num_key_value_heads"), 4_096),
    "narrow": (("embedding_size",), 131_072),
    "types": (("type_vocab_size",), 65_536),
    "distances": (("max_relative_positions", "relative_attention_max_distance"), 1_000_000),
    "buckets": (("position_buckets", "relative_attention_num_buckets"), 1_000_000),
    "positions": (("max_position_embeddings", "max_trained_positions"), 100_000_000),
}
# The key of the width in families that are not supported.
OTHER_WIDTHS = ("d_model", "emb_dim", "encoder", "n_embd", "text_config")


def with_whole_sizes(config: JsonObject) -> JsonObject:
    """Return the configuration with sizes such as 48.0 as whole numbers."""
    sized = ("_size", "_dim", "_inner", "_layers", "_heads", "_embeddings", "_layer", "_head")
    whole = {
        key: int(value)
        for key, value in config.items()
        if isinstance(value, float) and value.is_integer() and key.endswith(sized)
    }
    return JsonObject({**config, **whole}, config.file)


def read_hidden_size(config: JsonObject) -> int:
    """Return the width of hidden states. Raises UnsupportedArchitecture for a family with another
    key, or LoadError."""
    key, default = family_of(config.get("model_type")).width
    if key != "hidden_size":
        return config.count(key, default)
    if config.get("dim") and not config.get("hidden_size"):
        return config.count("dim")
    elsewhere = next((key for key in OTHER_WIDTHS if key in config), None)
    if config.get("hidden_size") is None and elsewhere is not None:
        model_type = config.get("model_type")
        raise UnsupportedArchitecture(
            f"{config.file}: the family {model_type!r} is not supported: it has `{elsewhere}`, no "
            f"`hidden_size`; supported: {', '.join(SERVED)}"
        )
    return config.count("hidden_size")


def check_sizes(config: Mapping[str, Any], home: Path, *, has_position_table: bool) -> None:
    """Raises LoadError for a size above its bound or an incomplete weight file, WeightMismatch if
    the files are too small."""
    file = home / "config.json"
    for names, limit in SIZES.values():
        for name in names:
            value = config.get(name)
            if isinstance(value, int | float) and value > limit:
                raise LoadError(f"{file}: `{name}` is {value}, more than {limit}")
    size = sum(_checked(path).stat().st_size for path in weight_files(home))
    weights = min_weights(config, has_position_table=has_position_table)
    if size and weights > size:
        raise WeightMismatch(
            f"{file}: describes at least {weights} weights, but the files of weights hold {size} "
            "bytes"
        )


def min_weights(config: Mapping[str, Any], *, has_position_table: bool = False) -> int:
    """Return a lower bound of the number of weights: the tables, and one matrix a layer."""
    hidden = _size(config, "hidden")
    tables = _size(config, "vocab") * (_size(config, "narrow") or hidden)
    if has_position_table:
        tables += _size(config, "positions") * (_size(config, "narrow") or hidden)
    layers = _size(config, "layers")
    if family_of(config.get("model_type")).shares_layers:
        layers = min(layers, 1)
    return tables + layers * hidden * _size(config, "inner")


def _checked(path: Path) -> Path:
    require(path)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="numpy"):
                # The library checks the header and the file's size
                pass
        except Exception as error:
            # The library's exceptions have no documented base class
            raise LoadError(f"{path}: cannot be read as weights: {error}") from error
    return path


def _size(config: Mapping[str, Any], what: str) -> int:
    """Return the size under the first of its names in `config`, or 0, which `read_spec` refuses."""
    values = (config.get(name) for name in SIZES[what][0])
    return next((int(value) for value in values if isinstance(value, int) and value > 0), 0)


# Transformers writes about 1e30 for "no limit"
UNSET_LENGTH = 1_000_000


def max_input_length(
    transformer: JsonObject,
    config: JsonObject,
    tokenizer_config: JsonObject,
    positions: Positions,
    *,
    sides: bool,
) -> int:
    """Return sentence-transformers' `max_seq_length`, else the tokenizer's length, limited by the
    position table. `sides`: queries and documents have their own lengths, so `max_seq_length` is
    not used.

    Without a position table `max_seq_length` is the limit, as in sentence-transformers and TEI.
    """
    declared, tokenizer_length, table = lengths(transformer, config, tokenizer_config, positions)
    if declared is not None and not sides:
        tokenizer_length = declared
        if not looks_positions_up(config):
            table = None
    limits = [length for length in (tokenizer_length, table) if length is not None]
    if not limits and family_of(config.get("model_type")).positions == "relative":
        return UNSET_LENGTH
    if not limits:
        raise LoadError(
            f"{config.file}: lacks `max_position_embeddings`, and no other file has a length"
        )
    return min(limits)


def lengths(
    transformer: JsonObject,
    config: JsonObject,
    tokenizer_config: JsonObject,
    positions: Positions,
) -> tuple[int | None, int | None, int | None]:
    """Return (`max_seq_length`, `model_max_length`, the config's positions). A missing one is
    None. `transformer`: sentence-transformers' settings of it."""
    arguments = _arguments(transformer, "processor_kwargs", "tokenizer_args", OF_TOKENIZER)
    settings = (
        arguments.count_if_any("model_max_length") or transformer.count_if_any("max_seq_length"),
        tokenizer_config.count_if_any("model_max_length"),
    )
    declared, tokenizer_length = (
        None if length is None or length >= UNSET_LENGTH else length for length in settings
    )
    return declared, tokenizer_length, _table_length(config, positions)


def looks_positions_up(config: Mapping[str, Any]) -> bool:
    """True if the trunk has a table of positions, which bounds the length of a text. Unknown
    families with rotary positions are known by their base."""
    positions = family_of(config.get("model_type")).positions
    computed = positions in ("computed", "relative") or any(
        key.startswith(("rope_", "rotary_")) for key in config
    )
    return not computed and config.get("position_biased_input") is not False


def _table_length(config: JsonObject, positions: Positions) -> int | None:
    for key in ("max_position_embeddings", "max_trained_positions"):
        if config.get(key):
            length = config.count(key) - positions.offset
            if length < 1:
                raise LoadError(
                    f"{config.file}: `{key}` is {config[key]}, but positions begin at "
                    f"{positions.offset}"
                )
            return length
    return None


# Arguments of the three loaders that change no output.
OF_LOADING = frozenset(
    (
        "attn_implementation",
        "cache_dir",
        "clean_up_tokenization_spaces",
        "code_revision",
        "device_map",
        "dtype",
        "local_files_only",
        "low_cpu_mem_usage",
        "padding_side",
        "revision",
        "token",
        "torch_dtype",
        "trust_remote_code",
        "use_cache",
        "use_fast",
        "use_safetensors",
    )
)
# Arguments of the tokenizer that replace keys of tokenizer_config.json.
OF_TOKENIZER = frozenset(
    (
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "do_lower_case",
        "model_input_names",
        "model_max_length",
        "split_special_tokens",
        "strip_accents",
        "tokenize_chinese_chars",
        "truncation_side",
    )
)


def tokenizer_arguments(sentence: JsonObject, written: JsonObject) -> JsonObject:
    """Return tokenizer_config.json (`written`) with the keys that sentence_bert_config.json
    replaces. Raises UnsupportedArchitecture for another argument of the tokenizer or of the model
    that changes vectors."""
    _arguments(sentence, "model_kwargs", "model_args", frozenset())
    arguments = _arguments(sentence, "processor_kwargs", "tokenizer_args", OF_TOKENIZER)
    return JsonObject({**written, **arguments}, written.file)


def config_arguments(sentence: JsonObject) -> JsonObject:
    """Return the keys of config.json that sentence_bert_config.json replaces."""
    return _arguments(sentence, "config_kwargs", "config_args", None)


def _arguments(
    sentence: JsonObject, key: str, older: str, supported: frozenset[str] | None
) -> JsonObject:
    """Return the arguments that have an effect. `supported`: their names; None: all."""
    name = older if older in sentence else key
    arguments = sentence.object(name)
    for argument in [argument for argument in arguments if argument in OF_LOADING]:
        del arguments[argument]
    for argument, value in arguments.items():
        if supported is not None and argument not in supported:
            raise UnsupportedArchitecture(
                f"{sentence.file}: `{name}` {argument} is {value!r}, which is not supported"
            )
    return arguments


# Classes of tokenizers of transformers 5 that give token types to every family, and to none. By
# other classes the family decides; by TokenizersBackend too, whose types TEI reads.
TYPED_TOKENIZERS = frozenset(
    ("Bert", "ConvBert", "Deberta", "DebertaV2", "Electra", "FNet", "MobileBert", "SqueezeBert")
)
UNTYPED_TOKENIZERS = frozenset(
    ("DistilBert", "GPT2", "Llama", "MPNet", "Qwen2", "Roberta", "XLMRoberta")
)


def has_token_types(
    family: Family, config: JsonObject, tokenizer_config: Mapping[str, Any]
) -> bool:
    """True if the second text of a pair has another token type: by `model_input_names`, else by
    the class of the tokenizer, else by the family."""
    if not config.get("type_vocab_size") or config.count("type_vocab_size") == 1:
        return False
    names = tokenizer_config.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    class_name = str(tokenizer_config.get("tokenizer_class")).removesuffix("Fast")
    class_name = class_name.removesuffix("Tokenizer")
    if class_name in TYPED_TOKENIZERS | UNTYPED_TOKENIZERS:
        return class_name in TYPED_TOKENIZERS
    return family.token_types


def positions_of(family: Family, padding_id: int) -> Positions:
    if not family.after_padding:
        return Positions()
    # MPNet's class uses the fixed id 1 and ignores `pad_token_id`
    padding = 1 if family.positions == "after 1" else padding_id
    return Positions(padding + 1, padding)


def read_padding_id(family: Family, config: JsonObject) -> int:
    """Return the id of padding. In offset families positions begin after it.

    Offset families have transformers' default. Other families mask padding, so any id works; some
    decoders write -1 for "none".
    """
    declared = config.get("pad_token_id")
    has_offset = family.after_padding
    if declared is None or (declared == -1 and not has_offset):
        return 1 if has_offset else 0
    if not isinstance(declared, int) or isinstance(declared, bool) or declared < 0:
        raise config.wrong("pad_token_id", "a token id")
    return declared


# config.json's keys of adapters, which families do not read.
KEYS = frozenset(
    {
        "load_trained_adapters",
        "lora_adaptations",
        "lora_alpha",
        "lora_dropout_p",
        "lora_main_params_trainable",
        "lora_rank",
        "task_instructions",
    }
)
# Bounds above any model's; ranks are those of all adapters together
MAX_RANKS, MAX_ALPHA = (4_096, 1_000_000)


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters in the order of their tensors. `prompts`: the text before each adapter's inputs.
    `scale`: the factor of B (A x). `targets`: the modules that have factors; None: all of them.

    A text's adapter is a number: 0 for none, else its place in `names` plus 1.
    """

    names: tuple[str, ...]
    rank: int
    scale: float
    prompts: Mapping[str, str]
    targets: frozenset[str] | None = None

    @property
    def form(self) -> tuple[int, int, float, frozenset[str] | None]:
        """Arguments of `families.ops.adapted`: (count, rank, scale, targets)."""
        return len(self.names), self.rank, self.scale, self.targets


def read_adapters(config: JsonObject) -> Adapters | None:
    """Return the adapters that a configuration names, or None. Raises LoadError or
    UnsupportedArchitecture."""
    names = config.get("lora_adaptations")
    if names is None:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise config.wrong("lora_adaptations", "a list of names")
    if len(set(names)) < len(names):
        raise LoadError(
            f"{config.file}: `lora_adaptations` is {names!r}, which names an adapter twice"
        )
    if config.flag("load_trained_adapters") is False:
        raise UnsupportedArchitecture(
            f"{config.file}: `load_trained_adapters` is False; supported: True"
        )
    instructions = config.object("task_instructions")
    if not all(isinstance(text, str) for text in instructions.values()):
        raise LoadError(f"{config.file}: `task_instructions` should map names to texts")
    alpha = config.number("lora_alpha", 1)
    if alpha > MAX_ALPHA:
        raise config.wrong("lora_alpha", f"a positive number, at most {MAX_ALPHA}")
    rank = config.count("lora_rank", 4)
    if rank * len(names) > MAX_RANKS:
        raise LoadError(
            f"{config.file}: `lora_rank` is {rank}, and {len(names)} adapters of it are more than "
            f"{MAX_RANKS} ranks"
        )
    return Adapters(
        tuple(names), rank, alpha / rank, {name: instructions.get(name, "") for name in names}
    )
