"""Translates the config.json of publishers' own code to the keys of transformers' class for the
same model.

There is one translator for each published `model_type`. A translator keeps unknown keys: the family
refuses them unless they change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.files import JsonObject
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.models.families import family_of

Config = dict[str, Any]
PPLX = "bidirectional_pplx_qwen3"
GEMMA = "embedding_gemma2"
# Families that transformers' own class computes under another name or other keys
RENAMED = ("t5", "mt5", GEMMA)


def translate(config: Mapping[str, Any], file: Path) -> JsonObject:
    """Return a model's settings in the form that its family reads, `model_type` included.

    Raises UnsupportedArchitecture or LoadError, naming the file and the key.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in TRANSLATORS:
        config = TRANSLATORS[model_type](dict(config), file)
    elif family_of(model_type).turns:
        config = _turned(config)
    return JsonObject(config, file)


def is_native(published: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """True if transformers' own class, not a publisher's code, computes the model of `config`, made
    by `translate`."""
    renamed = published.get("model_type") in RENAMED
    return "auto_map" not in published and (renamed or config == published)


def _gte(config: Config, file: Path) -> Config:
    """Alibaba's `NewConfig`. Its defaults differ from transformers' `GteConfig`."""
    if config["model_type"] == "new":
        config = {
            "type_vocab_size": 1,
            "rope_theta": 10_000.0,
            "max_position_embeddings": 2048,
            **config,
            "model_type": "gte",
        }
    served = {
        "layer_norm_type": ("layer_norm",),
        "position_embedding_type": ("rope",),
        "pack_qkv": (True,),
        "logn_attention_scale": (False,),
        "logn_attention_clip1": (False,),
    }
    _take(config, file, served)
    _drop(config, "unpad_inputs", "use_memory_efficient_attention")
    scaling = config.get("rope_scaling")
    if isinstance(scaling, dict) and scaling.get("type") == "ntk":
        config["rope_parameters"] = _ntk(config, config.pop("rope_scaling"), file)
    return config


def _ntk(config: Config, scaling: Mapping[str, Any], file: Path) -> Config:
    """NTK scaling equals linear scaling with another base: base * factor, frequencies / factor **
    (2 / dim)."""
    if scaling.keys() - {"type", "factor"}:
        raise UnsupportedArchitecture(
            f"{file}: `rope_scaling` is {scaling!r}; served of type 'ntk': `factor` alone"
        )
    fields = JsonObject(config, file)
    dim = fields.count("hidden_size") // fields.count("num_attention_heads")
    if dim < 2:
        raise LoadError(
            f"{file}: `hidden_size` and `num_attention_heads` leave heads of {dim} numbers"
        )
    factor, theta = JsonObject(scaling, file).number("factor"), fields.number("rope_theta")
    return {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / dim)}


# Nomic's names, like GPT-2's -> transformers' names.
NOMIC_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
}
NOMIC_DEFAULTS: Config = {
    "qkv_proj_bias": True,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "type_vocab_size": 2,
}
# -> the function of the gate
NOMIC_GATED = {"swiglu": "silu", "geglu": "gelu"}
# Keys with the values that are served
NOMIC_SERVED: Mapping[str, tuple[object, ...]] = {
    "causal": (False,),
    "expert_choice_router": (False,),
    "ffn_div": (1,),
    "moe_normalize_expert_weights": (False,),
    "norm_mlp": (False,),
    "num_shared_experts": (0,),
    "parallel_block": (False,),
    "prenorm": (False,),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (),
    "rotary_head_dim": (False,),
    "rotary_scaling_factor": (),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_rms_norm": (False,),
}
# Keys of training and of speed
NOMIC_UNUSED = (
    "add_pooling_layer",
    "attn_pdrop",
    "dense_seq_output",
    "embd_pdrop",
    "fused_bias_fc",
    "fused_dropout_add_ln",
    "last_layer_subset",
    "moe_impl",
    "moe_resid_pdrop",
    "n_ctx",
    "pad_vocab_to_multiple_of",
    "parallel_block_tied_norm",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "router_aux_loss_coef",
    "summary_proj_to_labels",
    "use_flash_attn",
    "use_xentropy",
)


def _nomic(config: Config, file: Path) -> Config:
    """`NomicBertConfig` of Nomic's own code. A configuration without `n_embd` is transformers'."""
    if "n_embd" not in config:
        return config
    _take(config, file, NOMIC_SERVED)
    _take(config, file, {"rotary_emb_fraction": (1.0,)}, needed=True)
    _drop(config, *NOMIC_UNUSED)
    config.setdefault("n_inner", None)
    if config["n_inner"] is None:
        config["n_inner"] = 4 * JsonObject(config, file).count("n_embd")
    for name, ours in NOMIC_NAMES.items():
        _rename(config, name, ours, file)
    config["rope_parameters"] = _nomic_rope(config, file)
    names = ("max_position_embeddings", "max_trained_positions", "n_positions")
    lengths = [config.pop(name, None) for name in names]
    lengths = [length for length in lengths if length is not None]
    config["max_position_embeddings"] = (lengths or [None])[0]
    fields = JsonObject(config, file)
    multiple = fields.count("pad_vocab_size_multiple", 1)
    _drop(config, "pad_vocab_size_multiple")
    config["vocab_size"] = -(-fields.count("vocab_size") // multiple) * multiple
    activation = config.setdefault("activation_function", "gelu_new")
    if isinstance(activation, str) and activation in NOMIC_GATED:
        config["activation_function"] = NOMIC_GATED[activation]
        _rename(config, "activation_function", "hidden_act", file)
    return {**NOMIC_DEFAULTS, **config}


def _nomic_rope(config: Config, file: Path) -> Config:
    theta = JsonObject(config, file).number("rotary_emb_base")
    native = config.get("rope_parameters")
    if native is not None and native != {"rope_type": "default", "rope_theta": theta}:
        raise LoadError(
            f"{file}: `rotary_emb_base` is {theta}, but `rope_parameters` is {native!r}"
        )
    del config["rotary_emb_base"]
    return {"rope_type": "default", "rope_theta": theta}


# Repositories with JinaBERT's code -> True if queries and keys have norms.
JINA = {
    "jinaai/jina-bert-implementation": False,
    "jinaai/jina-bert-v2-qk-post-norm": True,
}
QK_NORM = "encoder.layer.0.attention.self.layer_norm_q.weight"


def _jina_bert(config: Config, file: Path) -> Config:
    """Jina's `JinaBertConfig`, called "bert". If the code lies beside the weights, these tell which
    of two variants it is."""
    if config.get("position_embedding_type") != "alibi":
        return config
    classes = config.get("auto_map")
    source = str(classes.get("AutoConfig", "")) if isinstance(classes, dict) else ""
    names = source.partition("--")[0], str(config.get("_name_or_path"))
    qk_norm = next((JINA[name] for name in names if name in JINA), None)
    if qk_norm is None and not source.endswith(".JinaBertConfig"):
        models = " or ".join(JINA)
        raise UnsupportedArchitecture(
            f"{file}: `position_embedding_type` is 'alibi'; supported if `auto_map` names {models}"
        )
    if qk_norm is None:
        qk_norm = Weights.open(file.parent).find(QK_NORM) is not None
    config = {
        "feed_forward_type": "geglu" if qk_norm else "original",
        **config,
        "model_type": "jina_bert",
        "qk_norm": qk_norm,
    }
    config["pooling"] = config.pop("emb_pooler", None)
    _drop(config, "attn_implementation", "position_embedding_type")
    return config


def _jina_v3(config: Config, file: Path) -> Config:
    """`XLMRobertaFlashConfig` of Jina's own code: rotary positions (embeddings v3), or "absolute",
    from a table (Reranker v2).

    `sizes.read_adapters` reads the keys of adapters.
    """
    if config.get("position_embedding_type") == "absolute" and "use_flash_attn" in config:
        _drop(config, "use_flash_attn", "use_reentrant")
        return {**config, "model_type": "xlm-roberta-flash"}
    if config.get("position_embedding_type") != "rotary":
        return config
    _take(config, file, {"truncate_dim": (config.get("hidden_size"),)})
    _drop(
        config,
        "position_embedding_type",
        "matryoshka_dimensions",
        "use_flash_attn",
        "use_reentrant",
    )
    config["pooling"] = config.pop("emb_pooler", None)
    theta = JsonObject(config, file).number("rotary_emb_base", 10_000.0)
    _drop(config, "rotary_emb_base")
    return {**config, "model_type": "jina_embeddings_v3", "rope_theta": theta}


# NVIDIA's names -> sentence-transformers'
POOLINGS = {"avg": "mean", "cls": "cls", "last": "lasttoken"}


def _llama_bidirec(config: Config, file: Path) -> Config:
    """NVIDIA's `LlamaBidirectionalConfig` and `Ministral3BidirectionalConfig`. `temperature`
    divides a ranker's logits; other models use it only in training."""
    if any(name.endswith("Classification") for name in _architectures(config)):
        _take(config, file, {"temperature": (1.0,)})
    pooling = config.get("pooling", "avg")
    model_type, is_causal = "llama", False
    if config["model_type"] == "ministral3_bidirec":
        model_type, is_causal = "ministral3", config.get("is_causal", False)
    return {
        **config,
        "model_type": model_type,
        "is_causal": is_causal,
        "pooling": POOLINGS.get(str(pooling), pooling),
    }


def _embedding_gemma2(config: Config, file: Path) -> Config:
    """`EmbeddingGemma2Config`. Only the text tower is served."""
    text = JsonObject(config, file).object("text_config")
    outer = {key: value for key, value in config.items() if key in ("architectures", "auto_map")}
    return {**text, **outer, "model_type": "embedding_gemma2_text"}


def _lfm2(config: Config, file: Path) -> Config:
    """Liquid AI's `Lfm2BidirectionalModel`. A causal LFM2 has transformers' class."""
    if not any("Bidirectional" in name for name in _architectures(config)):
        return config
    _take(
        config, file, {"block_use_swiglu": (True,), "use_pos_enc": (True,), "is_causal": (False,)}
    )
    _rename(config, "block_ff_dim", "intermediate_size", file)
    _drop(config, *LFM2_UNUSED)
    return {**config, "model_type": "lfm2_bidirectional"}


# Of its training, and older names that transformers' class does not read
LFM2_UNUSED = (
    "block_dim",
    "block_mlp_init_scale",
    "block_norm_eps",
    "block_out_init_scale",
    "block_use_xavier_init",
    "conv_dim",
    "conv_dim_out",
    "conv_use_xavier_init",
    "num_heads",
    "tie_embedding",
)


def _turned(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """If no key tells the attention's direction, a class named "Bidirectional" is not causal.
    gte-Qwen2's newer revisions have the key; without it TEI and transformers' class are causal."""
    if config.keys() & {"is_causal", "use_bidirectional_attention"}:
        return config
    if any("Bidirectional" in name for name in _architectures(config)):
        return {**config, "is_causal": False}
    return config


def _ultrabert(config: Config, file: Path) -> Config:
    """DMIS Lab's `UltraBERTConfig`, which has a window (null or 0: none) and a rotary base for each
    layer."""
    windows = config.pop("attention_windows", None)
    if windows is None:
        return config
    bases = config.pop("rope_theta", None)
    layers = JsonObject(config, file).count("num_hidden_layers")
    for key, values in (("attention_windows", windows), ("rope_theta", bases)):
        if not isinstance(values, list) or len(values) != layers:
            raise LoadError(
                f"{file}: `{key}` is {values!r}, should be a list with a number for each of "
                f"{layers} layers"
            )
    forms: dict[str, tuple[Any, Any]] = {}
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    for kind, window, base in zip(kinds, windows, bases, strict=True):
        form = forms.setdefault(kind, (window or None, base))
        if form != (window or None, base):
            raise UnsupportedArchitecture(
                f"{file}: `attention_windows` and `rope_theta` are {window!r} and {base!r} in one "
                f"layer of {kind}, {form[0]!r} and {form[1]!r} in another; supported: the same in "
                "all layers of a kind"
            )
    if "sliding_attention" in forms:
        config["sliding_window"] = forms["sliding_attention"][0]
    rotary = {
        kind: {"rope_type": "default", "rope_theta": base} for kind, (_, base) in forms.items()
    }
    return {**config, "layer_types": kinds, "rope_parameters": rotary}


def _dpr(config: Config, file: Path) -> Config:
    """`DPRQuestionEncoder` and `DPRContextEncoder`, which return the first token's state of a
    BERT."""
    _take(config, file, {"projection_dim": (0,)})
    return {**config, "model_type": "bert", "pooling": "cls"}


# T5's names -> the names of most families.
T5_NAMES = {
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
}
T5 = ("t5", "mt5")
# The default
FEED_FORWARD = {"t5": "relu", "mt5": "gated-gelu"}


def _t5(config: Config, file: Path) -> Config:
    """`T5Config` and `MT5Config`. Only the encoder is served. `gated-gelu` is the tanh form of
    GELU."""
    for name, ours in T5_NAMES.items():
        _rename(config, name, ours, file)
    _drop(
        config,
        "dense_act_fn",
        "is_encoder_decoder",
        "n_positions",
        "num_decoder_layers",
        "scale_decoder_outputs",
    )
    written = config.pop("feed_forward_proj", None) or FEED_FORWARD[config["model_type"]]
    gated, _, name = str(written).rpartition("-")
    if gated not in ("", "gated"):
        raise UnsupportedArchitecture(
            f"{file}: `feed_forward_proj` is {written!r}; supported: ACTIVATION or gated-ACTIVATION"
        )
    if written == "gated-gelu":
        name = "gelu_new"
    return {**config, "hidden_act": name, "is_gated_act": bool(gated)}


def _architectures(config: Mapping[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _take(
    config: Config, file: Path, served: Mapping[str, tuple[object, ...]], *, needed: bool = False
) -> None:
    """Remove keys that have only these served values. Null is also served, unless the key is
    `needed`. Raises LoadError."""
    for key, values in served.items():
        value = config.pop(key, None)
        if value not in values and (needed or value is not None):
            named = ", ".join(map(repr, values or (None,)))
            raise UnsupportedArchitecture(f"{file}: `{key}` is {value!r}; supported: {named}")


def _drop(config: Config, *keys: str) -> None:
    """Remove keys that change no output."""
    for key in keys:
        config.pop(key, None)


def _rename(config: Config, name: str, ours: str, file: Path) -> None:
    value = config.pop(name, None)
    if value is not None and config.setdefault(ours, value) != value:
        raise LoadError(f"{file}: `{name}` is {value!r}, but `{ours}` is {config[ours]!r}")


# Characters of repository, module and class, since the pattern's time grows with the square of the
# length
MAX_REFERENCE = 300
# repository--module.Class
CLASS = re.compile(r"(?:.*--)?(?P<trunk>(?:\w+\.)*?(?P<name>\w+?))(?:Model|For[A-Z]\w*)?")


def own_code(config: Mapping[str, Any], loader: str = "AutoModel") -> str | None:
    """Return the class of the publisher's own code that transformers' `loader` would run. None if
    the model has no such code or a family computes the same. `config`: from `translate`.
    """
    classes = config.get("auto_map")
    reference = classes.get(loader) if isinstance(classes, dict) else None
    if not isinstance(reference, str):
        return None
    reference = reference[:MAX_REFERENCE]
    match = CLASS.fullmatch(reference)
    code = family_of(config.get("model_type")).code
    if match and (match["name"] in code or match["trunk"] in code):
        return None
    return reference


def check_code(config: Mapping[str, Any], file: Path) -> None:
    """Raises UnsupportedArchitecture for a model that only its publisher's own code computes."""
    code = own_code(config)
    if code is not None:
        raise needs_code(file, code)


def needs_code(file: Path, code: str) -> UnsupportedArchitecture:
    """The error of a model that needs its publisher's code."""
    return UnsupportedArchitecture(
        f"{file}: `auto_map` names `{code}`, code of the publisher's own, and no family here is "
        "known to compute the same. --trust-remote-code runs it by torch, with all rights of "
        "this process: read it before"
    )


# The end of the name of a class that scores texts, which can be all that `AutoModel` gives.
SCORES = re.compile(r"For\w*(Rank|Classification|Reward)\w*$")


def check_head_code(config: Mapping[str, Any], file: Path, *, has_head: bool) -> None:
    """Raises UnsupportedArchitecture for a head in the publisher's own code, which no setting makes
    available. `has_head`: the heads that `architectures` names count, and not only a class of
    `AutoModel` that scores texts."""
    loaders: list[str] = []
    if has_head:
        tasks = [name.rpartition("For")[2] for name in _architectures(config) if "For" in name]
        loaders = [f"AutoModelFor{task}" for task in tasks]
    if SCORES.search(own_code(config) or ""):
        loaders.append("AutoModel")
    for loader in loaders:
        code = own_code(config, loader)
        if code is not None:
            raise UnsupportedArchitecture(
                f"{file}: `auto_map` names `{code}` as {loader}, a head by the publisher's own "
                "code; supported: heads of transformers' classes, and embedders by such code "
                "with --trust-remote-code"
            )


TRANSLATORS = {
    "bert": _jina_bert,
    "dpr": _dpr,
    # Perplexity's `PPLXQwen3Config`; `spec` handles the rounding of its vectors
    PPLX: lambda config, _: {
        **config,
        "model_type": "qwen3",
        "is_causal": False,
        "pooling": "mean",
    },
    GEMMA: _embedding_gemma2,
    "lfm2": _lfm2,
    "gte": _gte,
    **dict.fromkeys(("llama_bidirec", "ministral3_bidirec"), _llama_bidirec),
    "new": _gte,
    "nomic_bert": _nomic,
    **dict.fromkeys(T5, _t5),
    "ultrabert": _ultrabert,
    "xlm-roberta": _jina_v3,
    "xlm-roberta-flash": _jina_v3,
}
