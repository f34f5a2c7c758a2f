"""A family's settings from config.json, checked one by one, and the frequencies of rotary
positions.

A key is an error if transformers' class declares it, the family does not read it, and it is not
known to have no effect: it could change the computation. transformers ignores a key that its class
does not declare; so does this module, with a warning. `declared.json` has the keys of each class
(`python -m conformance.families.declared`). Source of frequencies: transformers'
`modeling_rope_utils`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridtei.errors import LoadError, UnsupportedArchitecture

log = logging.getLogger(__name__)

DECLARED = Path(__file__).with_name("declared.json")
# Kinds of layers: without and with a window
FULL, SLIDING = "full_attention", "sliding_attention"
# config.json's names of activations -> `Ops.activate`'s names.
ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
# Keys without effect on states, declared by transformers' classes or written by publishers for
# their own code.
IRRELEVANT = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "classifier_activation",
        "classifier_bias",
        "classifier_pooling",
        "clf_pooling",
        "cls_token_id",
        "decoder_bias",
        "decoder_start_token_id",
        "deterministic_flash_attn",
        "dtype",
        "eos_token_id",
        "final_logit_softcapping",
        "gradient_checkpointing",
        "id2label",
        "init_std",
        "initializer_cutoff_factor",
        "initializer_factor",
        "initializer_range",
        "is_matryoshka",
        "label2id",
        "legacy",
        "mask_token_id",
        "matryoshka_dimensions",
        "model_max_length",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pooler_hidden_act",
        "pooler_hidden_size",
        "pooling",
        "prediction_head_size",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "sbert_ce_default_activation_function",
        "sentence_transformers",
        "sep_token_id",
        "sparse_pred_ignore_index",
        "sparse_prediction",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "temperature",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "vocab_size",
    }
)
# Values with which declared keys have no effect.
WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "position_embedding_type": ("absolute",),
    "pruned_heads": ({},),
    "sinusoidal_pos_embds": (False, True),
    "attn_logit_softcapping": (None,),
}


class Settings:
    """A config.json. It records the keys that were read, for `check`."""

    def __init__(self, config: Mapping[str, Any], file: str) -> None:
        self._config = config
        self._file = file
        self._read: set[str] = set()
        self._ignored: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default if it is missing or null."""
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def nested(self, config: Mapping[str, Any], name: str) -> Settings:
        """The settings of a part, called `name` in errors."""
        return Settings(config, f"{self._file}: {name}")

    def has(self, key: str) -> bool:
        """True if the key exists, even with null."""
        return key in self._config

    def has_read(self, *keys: str) -> None:
        """Record these keys as read."""
        self._read.update(keys)

    def ignore(self, key: str) -> None:
        """Let `check` warn of a key that transformers' class ignores."""
        self._ignored.add(f"`{key}`")

    def count(self, key: str, default: int | None = None) -> int:
        """Read a positive integer. Raises LoadError."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LoadError(f"{self._file}: `{key}` is {value!r}, should be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive number. Raises LoadError."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise LoadError(f"{self._file}: `{key}` is {value!r}, should be a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Read true or false. Raises LoadError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise LoadError(f"{self._file}: `{key}` is {value!r}, should be true or false")
        return value

    def activation(self, key: str, default: str = "gelu") -> str:
        """Read an activation. Raises UnsupportedArchitecture."""
        value = self.get(key, default)
        if value not in ACTIVATIONS:
            raise self.unsupported(key, value, tuple(ACTIVATIONS))
        return ACTIVATIONS[value]

    def layer_kinds(
        self, layers: int, default: Callable[[int], str], other: str = SLIDING
    ) -> list[str]:
        """The kind of each layer, FULL or `other`, from `layer_types` or else `default`. Raises
        LoadError."""
        kinds = self.get("layer_types", [default(layer) for layer in range(layers)])
        if (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or not all(kind in (FULL, other) for kind in kinds)
        ):
            raise LoadError(
                f"{self._file}: `layer_types` should hold {FULL!r} or {other!r} for each of "
                f"{layers} layers"
            )
        return kinds

    def only(self, key: str, *served: object) -> None:
        """Raises UnsupportedArchitecture unless the key is missing, null, or one of these
        values."""
        value = self.get(key)
        if value is not None and value not in served:
            raise self.unsupported(key, value, served)

    def unsupported(
        self, key: str, value: object, served: tuple[object, ...]
    ) -> UnsupportedArchitecture:
        """The error of a value that no family computes."""
        named = ", ".join(map(repr, served))
        return UnsupportedArchitecture(f"{self._file}: `{key}` is {value!r}; supported: {named}")

    def check(self, declared: Collection[str] | None) -> None:
        """Raises UnsupportedArchitecture for an unread key that could matter; warns of other unread
        keys.

        `declared`: the keys that could matter; None: all.
        """
        unknown = set(self._ignored)
        for key, value in self._config.items():
            if key in self._read or key in IRRELEVANT or "dropout" in key or value is None:
                continue
            if value in WITHOUT_EFFECT.get(key, ()):
                continue
            if declared is None or key in declared:
                raise UnsupportedArchitecture(
                    f"{self._file}: `{key}` is {value!r}, which the family is not known to have"
                )
            unknown.add(f"`{key}`")
        if unknown:
            warn_once(
                f"{self._file}: ignored, as transformers ignores them in this family: "
                f"{', '.join(sorted(unknown))}"
            )


@cache
def warn_once(message: str) -> None:
    """Warn once: several backends examine a checkpoint before one runs it."""
    log.warning("%s", message)


@cache
def declared_keys(model_type: str) -> frozenset[str] | None:
    """The keys of config.json that transformers 5.23 reads for a family; None without a class of
    that name."""
    keys = json.loads(DECLARED.read_text(encoding="utf-8"))
    return frozenset(keys[model_type]) if model_type in keys else None


# float32[dim / 2], and the factor of cosines and sines
Frequencies = tuple[NDArray[np.float32], float]
SERVED = ("default", "linear", "llama3", "yarn")
READ = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "rope_theta",
        "rope_type",
        "truncate",
        "type",
    }
)


def frequencies(
    settings: Settings,
    head_dim: int,
    *,
    theta: float,
    kind: str | None = None,
    ignored: Collection[str] = (),
) -> Frequencies:
    """The frequencies of the model, or of its layers of one `kind`. `theta`: the family's default.
    `ignored`: parameters that the family reads itself.

    Raises UnsupportedArchitecture for an unsupported kind of scaling, such as one that depends on
    the text's length.
    """
    written = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    nested = (
        written.get(kind)
        if kind is not None and isinstance(written.get(kind), Mapping)
        else written
    )
    parameters: Mapping[str, Any] = {
        "rope_theta": settings.get("rope_theta", theta),
        **(nested or {}),
    }
    how = parameters.get("rope_type") or parameters.get("type") or "default"
    if how not in SERVED:
        raise settings.unsupported("rope_type", how, SERVED)
    for key in parameters.keys() - READ - {*ignored}:
        raise settings.unsupported("rope_parameters", key, tuple(sorted(READ)))
    share = parameters.get("partial_rotary_factor") or settings.get("partial_rotary_factor", 1.0)
    if share != 1 and how != "default":
        raise settings.unsupported("partial_rotary_factor", share, (1.0,))
    # The classes of these families rotate whole heads
    if share != 1:
        settings.ignore("partial_rotary_factor")
    dim, base = head_dim, float(parameters["rope_theta"])
    inverse = plain(dim, base)
    if how == "linear":
        return inverse / np.float32(float(parameters["factor"])), 1.0
    if how == "llama3":
        return _llama3(inverse, parameters), 1.0
    if how == "yarn":
        return _yarn(inverse, dim, base, parameters, settings.get("max_position_embeddings"))
    return inverse, 1.0


def plain(dim: int, theta: float) -> NDArray[np.float32]:
    """The frequencies float32[dim / 2] without scaling."""
    return np.asarray(
        1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)), dtype=np.float32
    )


def _llama3(inverse: NDArray[np.float32], parameters: Mapping[str, Any]) -> NDArray[np.float32]:
    factor, low, high = (
        float(parameters[key]) for key in ("factor", "low_freq_factor", "high_freq_factor")
    )
    context = float(parameters["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = (context / wavelength - low) / (high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = np.where(wavelength > context / low, inverse / factor, inverse)
    is_between = (wavelength <= context / low) & (wavelength >= context / high)
    return np.where(is_between, between, scaled).astype(np.float32)


def _yarn(
    inverse: NDArray[np.float32], dim: int, base: float, parameters: Mapping[str, Any], length: Any
) -> Frequencies:
    context = float(parameters.get("original_max_position_embeddings") or length)
    factor = float(parameters.get("factor") or float(length) / context)
    attention = parameters.get("attention_factor")
    if attention is None:
        whole, part = parameters.get("mscale"), parameters.get("mscale_all_dim")
        attention = (
            _mscale(factor, whole) / _mscale(factor, part)
            if whole and part
            else _mscale(factor, 1.0)
        )

    def dimension(rotations: float) -> float:
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = (
        dimension(parameters.get("beta_fast") or 32),
        dimension(parameters.get("beta_slow") or 1),
    )
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    mixed = inverse / np.float32(factor) * ramp + inverse * (1 - ramp)
    return mixed.astype(np.float32), float(attention)


def _mscale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
