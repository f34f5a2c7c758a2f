"""Tiny checkpoints as their makers publish them: config.json in the words of code of their own, tensors under their names.

Written by transformers' class where it has one, so that this class is the oracle: ask it before the configuration is rewritten.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import tiny

# What the hub's configurations of these families hold beside sizes.
NEW = {
    "model_type": "new",
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "auto_map": {"AutoConfig": "Alibaba-NLP/new-impl--configuration.NewConfig"},
    "rope_parameters": ...,
}
NOMIC = {
    "activation_function": "swiglu",
    "attn_pdrop": 0.0,
    "causal": False,
    "dense_seq_output": True,
    "embd_pdrop": 0.0,
    "fused_bias_fc": True,
    "fused_dropout_add_ln": True,
    "max_trained_positions": 128,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 1,
    "parallel_block": False,
    "parallel_block_tied_norm": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "reorder_and_upcast_attn": False,
    "resid_pdrop": 0.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "use_xentropy": True,
}
NOMIC_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "layer_norm_eps": "layer_norm_epsilon",
}


def as_new(folder: Path, **changes: Any) -> Path:
    """Rewrite a gte as Alibaba publishes it; its rotary base stays, unless `changes` name one."""
    config = json.loads((folder / "config.json").read_text())
    architectures = [name.replace("Gte", "New") for name in config["architectures"]]
    theta = config["rope_parameters"]["rope_theta"]
    tiny.edit_json(folder / "config.json", **{**NEW, "architectures": architectures, "rope_theta": theta, **changes})
    return tiny.change(folder, lambda tensors: {name.replace("gte.", "new."): one for name, one in tensors.items()})


def as_nomic(folder: Path, **changes: Any) -> Path:
    """Rewrite a nomic_bert in the words of Nomic's own code."""
    config = json.loads((folder / "config.json").read_text())
    renamed = {theirs: config[ours] for ours, theirs in NOMIC_NAMES.items()}
    native = ("head_dim", "hidden_act", "max_position_embeddings", "rope_parameters", "attention_probs_dropout_prob")
    gone = dict.fromkeys((*NOMIC_NAMES, *native, "hidden_dropout_prob"), ...)
    theta = config["rope_parameters"]["rope_theta"]
    tiny.edit_json(folder / "config.json", **{**gone, **NOMIC, **renamed, "rotary_emb_base": theta, **changes})
    return folder


REWRITES = {"gte": as_new, "nomic_bert": as_nomic}
