"""Tiny checkpoints as their makers publish them: config.json in the words of code of their own,
tensors under their names.

Written by transformers' class where it has one, so that this class is the oracle: ask it before the
configuration is rewritten.
"""

import json

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from conformance.small import tiny
from conformance.small.vocabulary import tokenizer

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


def as_new(folder, **changes):
    """Rewrite a gte as Alibaba publishes it; its rotary base stays, unless `changes` name one."""
    config = json.loads((folder / "config.json").read_text())
    architectures = [name.replace("Gte", "New") for name in config["architectures"]]
    theta = config["rope_parameters"]["rope_theta"]
    tiny.edit_json(
        folder / "config.json",
        **{**NEW, "architectures": architectures, "rope_theta": theta, **changes},
    )
    return tiny.change(
        folder, lambda tensors: {name.replace("gte.", "new."): one for name, one in tensors.items()}
    )


def as_nomic(folder, **changes):
    """Rewrite a nomic_bert in the words of Nomic's own code."""
    config = json.loads((folder / "config.json").read_text())
    renamed = {theirs: config[ours] for ours, theirs in NOMIC_NAMES.items()}
    native = (
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rope_parameters",
        "attention_probs_dropout_prob",
    )
    gone = dict.fromkeys((*NOMIC_NAMES, *native, "hidden_dropout_prob"), ...)
    theta = config["rope_parameters"]["rope_theta"]
    tiny.edit_json(
        folder / "config.json", **{**gone, **NOMIC, **renamed, "rotary_emb_base": theta, **changes}
    )
    return folder


def as_llama_bidirec(folder, **changes):
    """Rewrite a llama or ministral3 that sees both ways as NVIDIA publishes its embedders."""
    config = json.loads((folder / "config.json").read_text())
    nvidia = {
        "model_type": f"{config['model_type']}_bidirec",
        "pooling": "avg",
        "temperature": 0.02,
        "is_causal": ...,
    }
    architectures = [
        name.replace("Model", "BidirectionalModel") for name in config["architectures"]
    ]
    tiny.edit_json(folder / "config.json", **{**nvidia, "architectures": architectures, **changes})
    return folder


def as_ultrabert(folder, **changes):
    """Rewrite an ultrabert with a window and a base for each layer, under the prefix of DMIS Lab's
    own code."""
    config = json.loads((folder / "config.json").read_text())
    kinds, rotary = config["layer_types"], config["rope_parameters"]
    published = {
        "architectures": ["UltraBERTModel"],
        "auto_map": {"AutoModel": "modeling_ultrabert.UltraBERTModel"},
        "attention_windows": [
            config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds
        ],
        "rope_theta": [rotary[kind]["rope_theta"] for kind in kinds],
        "layer_types": ...,
        "rope_parameters": ...,
        "sliding_window": ...,
    }
    tiny.edit_json(folder / "config.json", **{**published, **changes})
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {f"ultrabert.{name}": tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def as_pplx(folder, **changes):
    """Rewrite a qwen3 that sees both ways as Perplexity publishes its embedders."""
    pplx = {
        "model_type": "bidirectional_pplx_qwen3",
        "architectures": ["PPLXQwen3Model"],
        "is_causal": ...,
    }
    tiny.edit_json(
        folder / "config.json", **{**pplx, "use_bidirectional_attention": True, **changes}
    )
    return folder


def as_jina_flash(folder, **changes):
    """Rewrite an xlm-roberta as Jina publishes Reranker v2: transformers' model under other
    names."""

    def renamed(tensors):
        made = {_flash_name(name): tensor for name, tensor in tensors.items()}
        for query in [name for name in made if ".mixer.query." in name]:
            parts = [made.pop(query.replace("query", part)) for part in ("query", "key", "value")]
            made[query.replace("query", "Wqkv")] = torch.cat(parts)
        return made

    code = "modeling_xlm_roberta.XLMRobertaForSequenceClassification"
    jina = {
        "position_embedding_type": "absolute",
        "use_flash_attn": True,
        "auto_map": {"AutoModelForSequenceClassification": code},
    }
    tiny.edit_json(folder / "config.json", **{**jina, **changes})
    return tiny.change(folder, renamed)


FLASH_NAMES = {
    "encoder.layer.": "encoder.layers.",
    "embeddings.LayerNorm": "emb_ln",
    "attention.self.": "mixer.",
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}


def _flash_name(name):
    """After Jina's `convert_roberta_weights_to_flash.py`."""
    for theirs, jinas in FLASH_NAMES.items():
        name = name.replace(theirs, jinas)
    return name


REWRITES = {
    "gte": as_new,
    "nomic_bert": as_nomic,
    "llama": as_llama_bidirec,
    "ministral3": as_llama_bidirec,
    "qwen3": as_pplx,
    "ultrabert": as_ultrabert,
}


def write_jina(folder, *, code=False, **settings):
    """JinaBERT v2, or with `code` its implementation with norms of queries and keys, as Jina
    publishes them."""
    words = tokenizer("wordpiece")
    words.save_pretrained(folder)
    tiny.edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer")
    source = f"jinaai/{'jina-bert-v2-qk-post-norm' if code else 'jina-bert-implementation'}"
    config = {
        **tiny.ENCODER,
        "_name_or_path": source,
        "architectures": ["JinaBertModel"],
        "attention_probs_dropout_prob": 0.0,
        "attn_implementation": None,
        "auto_map": {"AutoConfig": f"{source}--configuration_bert.JinaBertConfig"},
        "emb_pooler": "mean",
        "feed_forward_type": "geglu",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "model_type": "bert",
        "pad_token_id": 0,
        "position_embedding_type": "alibi",
        "type_vocab_size": 2,
        "vocab_size": len(words),
        **settings,
    }
    tiny.write_json(
        folder / "config.json", {key: value for key, value in config.items() if value is not ...}
    )
    save_file(random_tensors(jina_shapes(config, code)), folder / "model.safetensors")
    return folder


def jina_shapes(config, code):
    h, i, gated = (
        config["hidden_size"],
        config["intermediate_size"],
        config["feed_forward_type"] != "original",
    )
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], h),
        **_normed("embeddings.LayerNorm", h),
    }
    shapes["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], h)
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{number}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{layer}attention.{name}", h, h)
        shapes |= _normed(f"{layer}attention.output.LayerNorm", h)
        if code:
            for name in (
                "attention.self.layer_norm_q",
                "attention.self.layer_norm_k",
                "layer_norm_1",
                "layer_norm_2",
            ):
                shapes |= _normed(layer + name, h)
            wide = f"{layer}mlp.up_gated_layer.weight" if gated else f"{layer}mlp.up_layer.weight"
            shapes |= {wide: (2 * i if gated else i, h), **_linear(f"{layer}mlp.down_layer", i, h)}
        elif gated:
            shapes |= {
                f"{layer}mlp.gated_layers.weight": (2 * i, h),
                **_linear(f"{layer}mlp.wo", i, h),
            }
            shapes |= _normed(f"{layer}mlp.layernorm", h)
        else:
            shapes |= {
                **_linear(f"{layer}intermediate.dense", h, i),
                **_linear(f"{layer}output.dense", i, h),
            }
            shapes |= _normed(f"{layer}output.LayerNorm", h)
    return shapes


def write_nomic(folder, **settings):
    """What Nomic's own code runs and transformers' class does not: biases, MLPs without a gate,
    experts."""
    words = tokenizer("unigram")
    words.save_pretrained(folder)
    config = {
        **NOMIC,
        **{NOMIC_NAMES.get(name, name): value for name, value in tiny.SMALL.items()},
        "architectures": ["NomicBertModel"],
        "layer_norm_epsilon": 1e-5,
        "model_type": "nomic_bert",
        "pad_token_id": 1,
        "rotary_emb_base": 10_000,
        "type_vocab_size": 1,
        "vocab_size": len(words),
        **settings,
    }
    tiny.write_json(
        folder / "config.json", {key: value for key, value in config.items() if value is not ...}
    )
    save_file(random_tensors(nomic_shapes(config)), folder / "model.safetensors")
    return folder


def nomic_shapes(config):
    h, i, every = config["n_embd"], config["n_inner"], config.get("moe_every_n_layers", 0)
    bias, bias1, bias2 = (
        config.get(name, True) for name in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias")
    )
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], h),
        **_normed("emb_ln", h),
    }
    shapes["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], h)
    for number in range(config["n_layer"]):
        layer = f"encoder.layers.{number}."
        shapes |= {
            **_linear(f"{layer}attn.Wqkv", h, 3 * h, bias=bias),
            **_linear(f"{layer}attn.out_proj", h, h, bias=bias),
        }
        shapes |= {**_normed(f"{layer}norm1", h), **_normed(f"{layer}norm2", h)}
        if every and number % every == 1:
            experts = config["num_experts"]
            shapes |= {f"{layer}mlp.experts.mlp.{name}": (experts * i, h) for name in ("w1", "w2")}
            shapes |= {
                f"{layer}mlp.router.layer.weight": (experts, h),
                f"{layer}mlp.experts.bias": (h,),
            }
            continue
        for name in ("fc11", "fc12") if config["activation_function"].endswith("glu") else ("fc1",):
            shapes |= _linear(f"{layer}mlp.{name}", h, i, bias=bias1)
        shapes |= _linear(f"{layer}mlp.fc2", i, h, bias=bias2)
    return shapes


OWN_CODE = """
from transformers import BertModel

class OwnModel(BertModel):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = output.last_hidden_state.flip(-1) * 2 - 1
        return output
"""


def add_own_code(folder, **classes):
    """Give a BERT code of its publisher's, which computes other states; `classes`: further entries
    of `auto_map`."""
    (folder / "modeling_own.py").write_text(OWN_CODE, encoding="utf-8")
    tiny.edit_json(
        folder / "config.json", auto_map={"AutoModel": "modeling_own.OwnModel", **classes}
    )
    return folder


def _linear(name, wide, narrow, *, bias=True):
    return {f"{name}.weight": (narrow, wide), **({f"{name}.bias": (narrow,)} if bias else {})}


def _normed(name, width):
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def random_tensors(shapes, seed=0):
    """0.5 for embeddings, 0.2 for matrices, 0.1 around the biases and weights of norms, as
    `tiny.randomise`."""
    random = np.random.default_rng(seed)
    return {
        name: _drawn(name, random.standard_normal(shape, np.float32))
        for name, shape in shapes.items()
    }


def _drawn(name, noise):
    if noise.ndim > 1:
        return noise * np.float32(0.5 if "embeddings" in name else 0.2)
    return noise * np.float32(0.1) + np.float32(name.endswith(".weight"))
