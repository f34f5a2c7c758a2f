"""ModernBERT: norms before each block, rotary positions, and windows in two of three layers."""

from __future__ import annotations

from hybridtei.families.ops import Heads, Ops, Rows
from hybridtei.families.rope import Frequencies, frequencies
from hybridtei.families.settings import FULL, SLIDING, Settings

THETAS = {FULL: 160_000.0, SLIDING: 10_000.0}


def modernbert(o: Ops, s: Settings) -> Rows:
    """After `ModernBertModel`."""
    hidden, eps, count = s.count("hidden_size", 768), s.number("norm_eps", 1e-5), s.count("num_attention_heads", 12)
    norm_bias, bias, mlp_bias = s.flag("norm_bias"), s.flag("attention_bias"), s.flag("mlp_bias")
    layers = s.count("num_hidden_layers", 22)
    every = s.count("global_attn_every_n_layers", 3)
    kinds = s.layer_kinds(layers, lambda layer: SLIDING if layer % every else FULL)
    s.get("layer_norm_eps")  # written, and not read: norms take `norm_eps`
    heads = Heads(count, count, hidden // count)
    rotations = {kind: o.rotation(*_frequencies(s, heads.dim, kind)) for kind in sorted(set(kinds))}
    windows = {FULL: None, SLIDING: s.count("local_attention", 128) // 2 + 1}
    s.get("max_position_embeddings")  # no table is that long
    x = o.embedding("embeddings.tok_embeddings.weight", s.count("vocab_size"), hidden, "input_ids")
    x = o.layer_norm(x, "embeddings.norm", eps, bias=norm_bias)
    act, wide = s.activation("hidden_activation"), s.count("intermediate_size", 1152)
    for i, kind in enumerate(kinds):
        layer = f"layers.{i}."
        y = o.layer_norm(x, f"{layer}attn_norm", eps, bias=norm_bias) if i else x
        q, k, v = o.split(o.linear(y, f"{layer}attn.Wqkv", 3 * hidden, bias=bias), [hidden] * 3)
        q, k = (o.rotate(one, rotations[kind], heads.dim) for one in (q, k))
        attended = o.attention(q, k, v, heads, scale=heads.dim**-0.5, window=windows[kind])
        x = o.add(x, o.linear(attended, f"{layer}attn.Wo", hidden, bias=bias))
        y = o.linear(o.layer_norm(x, f"{layer}mlp_norm", eps, bias=norm_bias), f"{layer}mlp.Wi", 2 * wide, bias=mlp_bias)
        y, gate = o.split(y, [wide] * 2)
        x = o.add(x, o.linear(o.multiply(o.activate(y, act), gate), f"{layer}mlp.Wo", hidden, bias=mlp_bias))
    return o.layer_norm(x, "final_norm", eps, bias=norm_bias)


def _frequencies(s: Settings, dim: int, kind: str) -> Frequencies:
    older = {FULL: "global_rope_theta", SLIDING: "local_rope_theta"}
    return frequencies(s, dim, theta=s.number(older[kind], THETAS[kind]), kind=kind)
