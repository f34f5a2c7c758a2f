"""Which graph a configuration asks for: a name made of all that shapes the computation, and of nothing else.

A key that is wrongly left out gives a graph of another model, silently; one that is wrongly kept costs an export. So keys
count unless they are known not to.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from hybridtei.checkpoint.spec import ModelSpec

FORMAT = 5  # raised when the exporter changes what it makes
# What a configuration says of its maker, its task or its training changes no graph.
IRRELEVANT = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "cls_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "label2id",
        "mask_token_id",
        "model_max_length",
        "num_labels",
        "output_past",
        "problem_type",
        "sbert_ce_default_activation_function",
        "sentence_transformers",
        "sep_token_id",
        "tie_weights_",
        "tie_word_embeddings",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_POOLER = frozenset(
    {
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    }
)
_MODERNBERT_HEADS = frozenset(
    {
        "classifier_activation",
        "classifier_bias",
        "classifier_pooling",
        "decoder_bias",
        "deterministic_flash_attn",
        "initializer_cutoff_factor",
        "layer_norm_eps",  # written, and not read: its norms take `norm_eps`
        "reference_compile",
        "repad_logits_with_grad",
        "sparse_pred_ignore_index",
        "sparse_prediction",
    }
)
# Of families whose positions do not begin at the padding id, that id only marks a row of the word table.
FAMILY_IRRELEVANT: Mapping[str, frozenset[str]] = {
    "bert": frozenset({"pad_token_id"}) | _POOLER,
    "distilbert": frozenset({"pad_token_id"}),
    "electra": frozenset({"pad_token_id"}),
    "modernbert": frozenset({"pad_token_id"}) | _MODERNBERT_HEADS,
}
# Rows of a table and nothing else, so that one graph serves them all. A rotary embedding may read the number of positions.
_TABLES = frozenset({"vocab_size", "max_position_embeddings"})
FREE_SIZES: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(("bert", "camembert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta"), _TABLES),
    "modernbert": frozenset({"vocab_size"}),
}
# Said or not, these change nothing; any other value does.
DEFAULTS: Mapping[str, object] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "position_embedding_type": "absolute",
    "pruned_heads": {},
    "sinusoidal_pos_embds": False,
}
FAMILY_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "modernbert": {
        "attention_bias": False,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000,
        "hidden_activation": "gelu",
        "local_attention": 128,
        "local_rope_theta": 10000,
        "mlp_bias": False,
        "norm_bias": False,
        "norm_eps": 1e-5,
        "rope_parameters": {
            "full_attention": {"rope_theta": 160000, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
        },
    },
}


def graph_name(spec: ModelSpec, made_of: str = "") -> str:
    """File name of the graph of a model's architecture. `made_of`: what else its content depends on."""
    facts = {key: _plain(value) for key, value in spec.config.items() if _matters(spec.model_type, key, value)}
    told = [FORMAT, facts, made_of] if made_of else [FORMAT, facts]
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    return f"{spec.model_type}-{digest}.zip"


def _matters(family: str, key: str, value: object) -> bool:
    if key in IRRELEVANT or "dropout" in key:
        return False
    if key in FAMILY_IRRELEVANT.get(family, ()) or key in FREE_SIZES.get(family, ()):
        return False
    defaults = {**DEFAULTS, **FAMILY_DEFAULTS.get(family, {})}
    return not (key in defaults and (value is None or _plain(value) == defaults[key]))


def _plain(value: object) -> object:
    """Whole numbers as such, however a JSON file spells them: 160000.0 is 160000."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
