"""Gemma 3's text model: norms around each block, windows in most layers, and weights of norms that are added to one."""

from __future__ import annotations

from hybridtei.families.decoder import gated_mlp
from hybridtei.families.ops import Heads, Ops, Rows
from hybridtei.families.rope import Frequencies, frequencies, plain
from hybridtei.families.settings import FULL, SLIDING, Settings

THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}


def gemma3(o: Ops, s: Settings) -> Rows:
    """After `Gemma3TextModel`."""
    hidden, eps = s.count("hidden_size"), s.number("rms_norm_eps", 1e-6)
    count, dim = s.count("num_attention_heads"), s.count("head_dim", 256)
    heads = Heads(count, s.count("num_key_value_heads", count), dim)
    scale = s.number("query_pre_attn_scalar", 256) ** -0.5
    both_ways, bias = s.flag("use_bidirectional_attention"), s.flag("attention_bias")
    window = s.count("sliding_window", 4096)
    windows = {FULL: None, SLIDING: window // 2 + 1 if both_ways else window}
    layers = s.count("num_hidden_layers")
    every = s.count("sliding_window_pattern", s.get("_sliding_window_pattern", 6))
    kinds = s.layer_kinds(layers, lambda layer: SLIDING if (layer + 1) % every else FULL)
    rotations = {kind: o.rotation(*_frequencies(s, dim, kind)) for kind in sorted(set(kinds))}
    s.get("max_position_embeddings")  # no table is that long
    act, wide = s.activation("hidden_activation", "gelu_pytorch_tanh"), s.count("intermediate_size")
    x = o.scale(o.embedding("embed_tokens.weight", s.count("vocab_size"), hidden, "input_ids"), hidden**0.5)

    def norm(x: Rows, name: str, dim: int | None = None) -> Rows:
        return o.rms_norm(x, name, eps, dim=dim, offset=1.0)

    for i, kind in enumerate(kinds):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        y = norm(x, f"{layer}input_layernorm")
        q, k, v = o.linears(y, [f"{attn}{name}_proj" for name in "qkv"], heads.widths, bias=bias)
        q, k = (o.rotate(norm(one, f"{attn}{name}_norm", dim), rotations[kind], dim) for one, name in ((q, "q"), (k, "k")))
        attended = o.attention(q, k, v, heads, scale=scale, causal=not both_ways, window=windows[kind])
        x = o.add(x, norm(o.linear(attended, f"{attn}o_proj", hidden, bias=bias), f"{layer}post_attention_layernorm"))
        y = gated_mlp(o, norm(x, f"{layer}pre_feedforward_layernorm"), f"{layer}mlp.", wide, act)
        x = o.add(x, norm(y, f"{layer}post_feedforward_layernorm"))
    return norm(x, "norm")


def _frequencies(s: Settings, dim: int, kind: str) -> Frequencies:
    """Older files have one base for windows, and one with its scaling for the other layers."""
    local = s.number("rope_local_base_freq", THETAS[SLIDING])
    if kind == SLIDING and SLIDING not in s.get("rope_parameters", {}):
        return plain(dim, local), 1.0
    return frequencies(s, dim, theta=THETAS[kind], kind=kind)
