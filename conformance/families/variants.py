"""Settings that change a family's computation, and that its tiny checkpoint lacks."""

from typing import Any

from conformance.small import tiny

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
# (family, settings)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in tiny.FAMILIES),
    ("bert", {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
    ("bert", {"type_vocab_size": 1}),
    ("electra", {"embedding_size": 32}),
    (
        "modernbert",
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "hidden_activation": "silu"},
    ),
    ("modernbert", {"layer_types": ["full_attention", "full_attention"]}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "is_causal": False}),
    ("mistral", {"is_causal": False}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    ("qwen3", {"rope_parameters": YARN}),
    ("gemma", {"attention_bias": True, "hidden_act": "gelu"}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("ministral3", {"max_position_embeddings": 2048}),
    ("ministral3", {"is_causal": True, "sliding_window": 8}),
    ("ministral3", {"rope_parameters": {**tiny.MINISTRAL_ROPE, "llama_4_scaling_beta": 0.0}}),
    ("ultrabert", {"max_position_embeddings": 2048, "layer_types": None, "num_hidden_layers": 3}),
    (
        "ultrabert",
        {"attention_bias": True, "mlp_bias": True, "layer_types": ["full_attention"] * 2},
    ),
    (
        "ultrabert",
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            }
        },
    ),
    ("embedding_gemma2_text", {"max_position_embeddings": 2048}),
    ("embedding_gemma2_text", {"attention_bias": True, "layer_types": ["full_attention"] * 2}),
    (
        "embedding_gemma2_text",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "per_layer_config": {
                "0": {"head_dim": 12},
                "1": {"head_dim": 12},
                "2": {"num_key_value_heads": 4},
            },
        },
    ),
    ("t5", {"feed_forward_proj": "gated-gelu", "d_kv": 12}),
    ("t5", {"feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 32}),
    ("mt5", {"feed_forward_proj": "relu"}),
    (
        "deberta-v2",
        {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
    ),
    ("deberta-v2", {"pos_att_type": ["p2c"], "position_buckets": -1, "max_relative_positions": 20}),
    ("deberta-v2", {"pos_att_type": ["c2p"], "type_vocab_size": 2}),
    ("deberta-v2", {"relative_attention": False}),
]
