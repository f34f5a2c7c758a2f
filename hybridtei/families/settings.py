"""A family's settings, read from config.json and checked one by one.

A key that the family does not read, and that is not known to be without effect, could change the computation: it is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hybridtei.errors import LoadError, UnsupportedArchitecture

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers: without a window, and with one
# config.json's names of activations -> those of `Ops.activate`.
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
# What a configuration says of its maker, its task, its training or its generation.
IRRELEVANT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "cache_implementation",
        "classifier_activation",
        "classifier_bias",
        "classifier_from_token",
        "classifier_pooling",
        "clf_pooling",
        "cls_token_id",
        "decoder_bias",
        "decoder_start_token_id",
        "deterministic_flash_attn",
        "directionality",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "final_logit_softcapping",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_cutoff_factor",
        "initializer_factor",
        "initializer_range",
        "is_matryoshka",
        "is_original_qwen3_reranker",
        "label2id",
        "legacy",
        "length_penalty",
        "mask_token_id",
        "matryoshka_dimensions",
        "max_length",
        "min_length",
        "model_max_length",
        "model_type",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_labels",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "output_scores",
        "pad_token_id",
        "pooler_fc_size",
        "pooler_hidden_act",
        "pooler_hidden_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
        "pooling",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "reference_compile",
        "remove_invalid_values",
        "repad_logits_with_grad",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sbert_ce_default_activation_function",
        "sentence_transformers",
        "sep_token_id",
        "sparse_pred_ignore_index",
        "sparse_prediction",
        "summary_activation",
        "summary_type",
        "summary_use_proj",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_weights_",
        "tie_word_embeddings",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_return_dict",
        "vocab_size",
    }
)
# Values of keys under which they change nothing.
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
    """A config.json. Keys that were read are remembered: see `check`."""

    def __init__(self, config: Mapping[str, Any], file: str) -> None:
        self._config = config
        self._file = file
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is missing or null."""
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer. Raises LoadError."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LoadError(f"{self._file}: `{key}` is {value!r}, should be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. Raises LoadError."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise LoadError(f"{self._file}: `{key}` is {value!r}, should be a positive number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false. Raises LoadError."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise LoadError(f"{self._file}: `{key}` is {value!r}, should be true or false")
        return value

    def activation(self, key: str, default: str = "gelu") -> str:
        """Raises UnsupportedArchitecture."""
        value = self.get(key, default)
        if value not in ACTIVATIONS:
            raise self.unsupported(key, value, tuple(ACTIVATIONS))
        return ACTIVATIONS[value]

    def layer_kinds(self, layers: int, default: Callable[[int], str]) -> list[str]:
        """`layer_types`, or what `default` says of each layer: FULL or SLIDING. Raises LoadError."""
        kinds = self.get("layer_types", [default(layer) for layer in range(layers)])
        if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
            raise LoadError(f"{self._file}: `layer_types` should hold {FULL!r} or {SLIDING!r} for each of {layers} layers")
        return kinds

    def only(self, key: str, *served: object) -> None:
        """Raises UnsupportedArchitecture for a value that is not one of these; missing and null pass."""
        value = self.get(key)
        if value is not None and value not in served:
            raise self.unsupported(key, value, served)

    def unsupported(self, key: str, value: object, served: tuple[object, ...]) -> UnsupportedArchitecture:
        """The error for a value that is not computed."""
        named = ", ".join(map(repr, served))
        return UnsupportedArchitecture(f"{self._file}: `{key}` is {value!r}; served: {named}")

    def check(self) -> None:
        """Raises UnsupportedArchitecture for a key that could matter and that nothing has read."""
        for key, value in self._config.items():
            if key in self._read or key in IRRELEVANT or "dropout" in key or value is None:
                continue
            if value not in WITHOUT_EFFECT.get(key, ()):
                raise UnsupportedArchitecture(f"{self._file}: `{key}` is {value!r}, which the family is not known to have")
