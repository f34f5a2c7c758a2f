"""Variants of config.json: families and keys."""

from functools import partial
from pathlib import Path
from typing import Any

from conformance.checkpoints.build import BASES, Case, Step, config, rewritten, sbert, words
from conformance.small import published
from hybridtei.models.families import SERVED

# Families that torch alone runs
FOREIGN = {name for name, base in BASES.items() if base.model_type not in SERVED}
# The self-test finds a family that reads its neighbours
TESTED = {"load": {"measures": True}}
TASKS = {"t5-encoder": "EncoderModel", "mt5-encoder": "EncoderModel"}
NAMED_SO = "the publisher's class sees both ways, which transformers does not know by its name"
EMPTY_ADAPTERS: dict[str, Any] = {
    "adapters": {},
    "config_map": {},
    "fusion_config_map": {},
    "fusions": {},
}


def case(
    base: str, *steps: Step, by_design: str = "", task: str = "Model", **settings: Any
) -> Case:
    """An embedder with mean pooling; `settings` are the configuration's."""
    return Case(base, settings, steps, by_design=by_design, task=task)


bert = partial(case, "bert")


def remote(name: str) -> Case:
    """A family computed by code in the repository."""
    auto = {"AutoConfig": f"configuration_{name}.Config", "AutoModel": f"modeling_{name}.Model"}
    return bert(config(model_type=name, architectures=["Model"], auto_map=auto))


def old_thetas(folder: Path) -> None:
    """ModernBERT as transformers 4 wrote it."""
    config(
        rope_parameters=...,
        global_rope_theta=160000.0,
        local_rope_theta=10000.0,
        layer_types=...,
        global_attn_every_n_layers=2,
    )(folder)


def families() -> dict[str, Case]:
    nested = config(
        model_type="gemma3",
        text_config={"hidden_size": 32, "model_type": "gemma3_text"},
        hidden_size=...,
    )
    more = {
        "gemma3-bidir": case("gemma3-text", use_bidirectional_attention=True),
        "t5-full": case("t5-encoder"),
        "ernie-task": case("ernie", use_task_id=True),
        "gemma3-nested": case("gemma3-text", nested),
        "new-gte": case("gte", rewritten(published.as_new)),
        "nomic-old": case("nomic", rewritten(published.as_nomic)),
        **{
            f"remote-{name}": remote(name)
            for name in (
                "internlm2",
                "hf_nomic_bert",
                "nvembed",
            )
        },
    }
    found = {
        name: Case(name, task=TASKS.get(name, "Model"), options=TESTED if name in FOREIGN else {})
        for name in BASES
    }
    return {f"fam-{name}": one for name, one in {**found, **more}.items()}


def activations() -> dict[str, Case]:
    key = {"modernbert": "hidden_activation", "distilbert": "activation"}
    acts = {
        "bert": "gelu gelu_new gelu_fast gelu_pytorch_tanh gelu_python gelu_accurate relu relu2 silu swish quick_gelu mish "
        "tanh linear laplace leaky_relu",
        "llama": "gelu gelu_new relu quick_gelu silu",
        "modernbert": "gelu silu relu gelu_pytorch_tanh",
        "distilbert": "gelu relu",
        "gte": "gelu silu",
        "nomic": "silu",
    }
    return {
        f"{base}-act-{act}": case(base, **{key.get(base, "hidden_act"): act})
        for base, many in acts.items()
        for act in many.split()
    }


def keys() -> dict[str, Case]:
    """Keys of BERT's kin."""
    three = {"num_hidden_layers": 3, "layer_types": None}
    noted = {
        "unknown-key": {"my_training_note": "x"},
        "adapters-key": {"adapters": EMPTY_ADAPTERS},
        "attn-impl": {"_attn_implementation": "eager"},
        "no-architectures": {"architectures": ...},
        "arch-own": {"architectures": ["MyBert"]},
        "arch-qa": {"architectures": ["BertForQuestionAnswering"]},
        "arch-sbert": {"architectures": ["SentenceTransformer"]},
        "arch-tokencls-with-modules": {"architectures": ["BertForTokenClassification"]},
        "arch-seqcls-with-modules": {"architectures": ["BertForSequenceClassification"]},
        "no-model-type": {"model_type": ...},
        "no-vocab-size": {"vocab_size": ...},
        "no-hidden-size": {"hidden_size": ...},
        "id2label": {"id2label": {"0": "x", "1": "y"}, "label2id": {"x": 0, "y": 1}},
        "relative_key": {"position_embedding_type": "relative_key"},
        "relative_key_query": {"position_embedding_type": "relative_key_query"},
        "is-decoder": {"is_decoder": True},
        "pad-5": {"pad_token_id": 5},
    }
    return {
        **{f"bert-{name}": bert(config(**changes)) for name, changes in noted.items()},
        **{f"bert-types-{count}": bert(type_vocab_size=count) for count in (1, 2, 4)},
        "bert-types-0": bert(config(type_vocab_size=0)),
        "bert-eps-1e-05": bert(layer_norm_eps=1e-5),
        "bert-heads-8-hidden-32": bert(num_attention_heads=8),
        "bert-layers-1": bert(num_hidden_layers=1),
        **{
            f"roberta-pad-{pad}": case(
                "roberta", pad_token_id=pad, max_position_embeddings=129 + pad
            )
            for pad in (0, 1, 3, 5)
        },
        "mpnet-pad-0": case("mpnet", pad_token_id=0),
        "xlmr-pad-0": case("xlmr", pad_token_id=0),
        "camembert-pad-3": case("camembert", pad_token_id=3, max_position_embeddings=132),
        "roberta-null-pad": case("roberta", config(pad_token_id=None)),
        "mpnet-defaults-missing": case(
            "mpnet", config(relative_attention_num_buckets=..., layer_norm_eps=..., hidden_act=...)
        ),
        "mpnet-buckets-64": case("mpnet", relative_attention_num_buckets=64),
        "electra-defaults-missing": case(
            "electra", config(hidden_act=..., layer_norm_eps=..., type_vocab_size=...)
        ),
        "distilbert-types": case(
            "distilbert", words(model_input_names=["input_ids", "token_type_ids", "attention_mask"])
        ),
        "deberta-biased": case("deberta-v3", position_biased_input=True),
        "deberta-no-share": case("deberta-v3", share_att_key=False),
        "deberta-embedding-size": case("deberta-v3", embedding_size=16),
        "deberta-no-relative": case(
            "deberta-v3", relative_attention=False, position_biased_input=True
        ),
        "deberta-max-rel": case("deberta-v3", max_relative_positions=64),
        "deberta-head-size": case("deberta-v3", attention_head_size=8),
        "deberta-long": case("deberta-v3", words(model_max_length=512), sbert(max_seq_length=256)),
        "modernbert-biases": case("modernbert", attention_bias=True, mlp_bias=True, norm_bias=True),
        **{
            f"modernbert-every-{n}": case("modernbert", **three, global_attn_every_n_layers=n)
            for n in (2, 3)
        },
        "modernbert-old-config-thetas": case("modernbert", old_thetas),
        # transformers 5 takes no null, so the oracle has the other layers' base written out
        "modernbert-local-null": Case(
            "modernbert",
            steps=(old_thetas, config(local_rope_theta=None)),
            oracle=(config(local_rope_theta=160000.0),),
        ),
        "modernbert-local-odd": case("modernbert", local_attention=9),
        "modernbert-eps": case("modernbert", norm_eps=1e-3),
        "jina3-types": case("jina3", type_vocab_size=2),
    }


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"original_max_position_embeddings": 32}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **YARN},
    "yarn-full": {
        "factor": 4.0,
        **YARN,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.1,
    },
    "yarn-mscale": {"factor": 4.0, **YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn-notrunc": {"factor": 4.0, **YARN, "truncate": False},
    "yarn-no-original": {"factor": 4.0},
    "llama3": {"factor": 4.0, **LLAMA3},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0, **YARN},
    "default": {},
}


def rotary() -> dict[str, Case]:
    """`rope_parameters` as transformers 5 writes them, and `rope_scaling` with `type`, or both
    words, of transformers 4."""
    found: dict[str, Case] = {}
    for base in ("llama", "qwen3", "qwen2", "mistral"):
        for name, more in SCALINGS.items():
            kind = name.split("-")[0]
            old = {"rope_parameters": ..., "rope_theta": 10000.0}
            found[f"rope-{base}-{name}"] = case(
                base, config(rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **more})
            )
            found[f"ropeold-{base}-{name}-type"] = case(
                base, config(**old, rope_scaling={"type": kind, **more})
            )
            both = {"type": kind, "rope_type": kind, **more}
            found[f"ropeold-{base}-{name}-both"] = case(base, config(**old, rope_scaling=both))
    old = {"rope_parameters": ..., "rope_theta": 1000.0}
    partial = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    gemma = {"rope_theta": 500000.0, "rope_local_base_freq": 1000.0}
    found |= {
        "ropeold-llama-empty": case("llama", config(**old, rope_scaling={})),
        "ropeold-llama-nested-theta-conflict": case(
            "llama",
            config(
                rope_theta=1000.0, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
            ),
        ),
        "rope-partial-llama": case("llama", config(rope_parameters=partial)),
        "rope-partial-llama-top": case("llama", config(**old, partial_rotary_factor=0.5)),
        "rope-partial-nomic": case("nomic", config(rope_parameters=partial)),
        "rope-dynamic-nomic": case(
            "nomic",
            config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ),
        "modernbert-yarn": case(
            "modernbert",
            config(
                rope_parameters={
                    "full_attention": {
                        "rope_type": "yarn",
                        "rope_theta": 160000.0,
                        **SCALINGS["yarn"],
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                }
            ),
        ),
        "rope-gemma-old": case("gemma3-text", config(rope_parameters=..., **gemma)),
        "rope-gemma-old-scaled": case(
            "gemma3-text", config(**gemma, rope_scaling={"rope_type": "linear", "factor": 8.0})
        ),
    }
    rope = ("eurobert", "qwen2", "mistral", "gemma3-text", "gte", "nomic", "jina3", "modernbert")
    defaults = {
        "hidden_act",
        "hidden_activation",
        "rms_norm_eps",
        "layer_norm_eps",
        "norm_eps",
        "rope_parameters",
        "type_vocab_size",
    }
    theirs = "transformers 5 has another default than the publisher's own code"
    for base in rope:
        why = theirs if base == "eurobert" else ""
        found[f"rope-missing-{base}"] = case(base, config(rope_parameters=...), by_design=why)
        found[f"defaults-missing-{base}"] = case(
            base, config(**dict.fromkeys(defaults, ...)), by_design=why
        )
    return found


def decoders() -> dict[str, Case]:
    both = {"layer_types": ["sliding_attention", "full_attention"]}
    windows = {"use_sliding_window": True, "sliding_window": 8}
    old = {"layer_types": ..., "max_window_layers": 1}
    return {
        **{
            f"mistral-window-{width}": case("mistral", sliding_window=width)
            for width in (8, 24, 64)
        },
        "mistral-window-missing": case("mistral", config(sliding_window=...)),
        **{
            f"{base}-bidirectional": case(base, config(is_causal=False))
            for base in ("mistral", "qwen2", "qwen3")
        },
        "qwen2-bidirectional-arch": case(
            "qwen2", config(architectures=["Qwen2BidirectionalModel"]), by_design=NAMED_SO
        ),
        "eurobert-is-decoder": case("eurobert", config(is_decoder=True)),
        "qwen2-window-layertypes": case("qwen2", config(**windows, **both)),
        "qwen2-layer-types-mixed": case(
            "qwen2", config(**windows, layer_types=both["layer_types"][::-1])
        ),
        "qwen2-window-old": case("qwen2", config(**windows, **old)),
        "qwen2-window-old-none": case(
            "qwen2", config(**windows, layer_types=..., max_window_layers=...)
        ),
        "qwen3-window-old": case("qwen3", config(**windows, **old)),
        "qwen2-window-off": case("qwen2", config(**{**windows, "use_sliding_window": False})),
        "llama-layer-types": case("llama", config(layer_types=["full_attention"] * 2)),
        "qwen3-headdim-null": case("qwen3", config(head_dim=None)),
        "mistral-headdim-16": case("mistral", head_dim=16),
        **{
            f"{base}-kv-{count}": case(base, num_key_value_heads=count)
            for base in ("llama", "qwen3")
            for count in (1, 2, 4)
        },
        "llama-kv-missing": case("llama", config(num_key_value_heads=...), num_key_value_heads=4),
        "mistral-kv-missing": case(
            "mistral", config(num_key_value_heads=...), num_attention_heads=8, num_key_value_heads=8
        ),
        "mistral-kv-missing-16heads": case(
            "mistral",
            config(num_key_value_heads=...),
            num_attention_heads=16,
            num_key_value_heads=8,
        ),
        "llama-biases": case("llama", attention_bias=True, mlp_bias=True),
        "qwen3-attention-bias": case("qwen3", attention_bias=True),
        "llama-eps": case("llama", rms_norm_eps=1e-2),
        "llama-unknown-key": case("llama", config(qk_layernorm=True)),
        "qwen3-unsloth-keys": case(
            "qwen3", config(unsloth_fixed=True, unsloth_version="2025.1", model_name="x")
        ),
        "qwen3-eos-list": case("qwen3", config(eos_token_id=[0, 2])),
        "gemma3-window-missing": case("gemma3-text", config(sliding_window=...)),
        "gemma3-scalar-256": case("gemma3-text", query_pre_attn_scalar=256),
        "gemma3-bidir-long": case(
            "gemma3-text", use_bidirectional_attention=True, sliding_window=8
        ),
    }


CONFIGS = {
    **families(),
    **{
        f"cfg-{name}": one
        for name, one in {**activations(), **keys(), **rotary(), **decoders()}.items()
    },
}
