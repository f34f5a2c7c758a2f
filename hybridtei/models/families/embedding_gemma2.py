"""EmbeddingGemma 2's text tower: Gemma 3's layers, each gated by its own projection of the word
embeddings. Layers without a window have wider heads. All attention is bidirectional, with scores
that nothing scales."""

from __future__ import annotations

from hybridtei.models.families.decoders import GEMMA_THETAS, gated_mlp
from hybridtei.models.families.ops import Heads, Ops, Rows, linears
from hybridtei.models.families.settings import FULL, SLIDING, Settings, frequencies

# The tensors' prefix beside those of the other towers; alone they have none
TOWER = "language_model."


def embedding_gemma2(o: Ops, s: Settings) -> Rows:
    """transformers' `EmbeddingGemma2TextModel`, whose states are projected to the vector's width,
    float[t, embedding_dim]."""
    hidden, eps = s.count("hidden_size", 512), s.number("rms_norm_eps", 1e-6)
    layers, count = s.count("num_hidden_layers", 24), s.count("num_attention_heads", 4)
    bias, window = s.flag("attention_bias"), s.count("sliding_window", 512) + 1
    act = s.activation("hidden_activation", "gelu_pytorch_tanh")
    wide = s.count("intermediate_size", 2048)
    per_layer = s.count("hidden_size_per_layer_input", 512)
    every = s.count("sliding_window_pattern", 6)
    kinds = s.layer_kinds(layers, lambda layer: SLIDING if (layer + 1) % every else FULL)
    # transformers' class changes it too
    kinds[-1] = FULL
    forms = _heads(s, kinds, count, window)
    rotations = {
        (kind, heads.dim): o.rotation(
            *frequencies(s, heads.dim, theta=GEMMA_THETAS[kind], kind=kind)
        )
        for kind, heads in dict.fromkeys(zip(kinds, forms, strict=True))
    }
    # Read for `check`: there is no table of positions
    s.get("max_position_embeddings")
    words = o.embedding(
        f"{TOWER}embed_tokens.weight", s.count("vocab_size", 262_144), hidden, "input_ids"
    )
    x = o.scale(words, hidden**0.5)
    name = f"{TOWER}ple.per_layer_model_projection"
    inputs = o.scale(o.linear(x, name, layers * per_layer, bias=False), hidden**-0.5)
    inputs = o.rms_norm(inputs, f"{TOWER}ple.per_layer_projection_norm", eps, dim=per_layer)
    of_layers = o.split(inputs, [per_layer] * layers)
    for i, (kind, heads) in enumerate(zip(kinds, forms, strict=True)):
        layer, attn = f"{TOWER}layers.{i}.", f"{TOWER}layers.{i}.self_attn."
        y = o.rms_norm(x, f"{layer}input_layernorm", eps)
        q, k, v = linears(o, y, [f"{attn}{part}_proj" for part in "qkv"], heads.widths, bias=bias)
        rotation = rotations[kind, heads.dim]
        q = o.rotate(o.rms_norm(q, f"{attn}q_norm", eps, dim=heads.dim), rotation, heads.dim)
        k = o.rotate(o.rms_norm(k, f"{attn}k_norm", eps, dim=heads.dim), rotation, heads.dim)
        v = o.rms_norm(v, None, eps, dim=heads.dim)
        y = o.linear(o.attention(q, k, v, heads), f"{attn}o_proj", hidden, bias=bias)
        x = o.add(x, o.rms_norm(y, f"{layer}post_attention_layernorm", eps))
        y = o.rms_norm(x, f"{layer}pre_feedforward_layernorm", eps)
        y = gated_mlp(o, y, f"{layer}mlp.", wide, act)
        x = o.add(x, o.rms_norm(y, f"{layer}post_feedforward_layernorm", eps))
        gate = o.linear(x, f"{layer}ple_block.per_layer_input_gate", per_layer, bias=False)
        y = o.multiply(o.activate(gate, act), of_layers[i])
        y = o.linear(y, f"{layer}ple_block.per_layer_projection", hidden, bias=False)
        x = o.add(x, o.rms_norm(y, f"{layer}ple_block.post_per_layer_input_norm", eps))
        x = o.scaled_by(x, f"{layer}layer_scalar")
    x = o.rms_norm(x, f"{TOWER}norm", eps)
    return o.linear(x, f"{TOWER}embedding_projection", s.count("embedding_dim", 768), bias=False)


def _heads(s: Settings, kinds: list[str], count: int, window: int) -> list[Heads]:
    """The heads of each layer: `per_layer_config` has what differs from the whole model's."""
    wide = {
        "head_dim": s.count("global_head_dim", 512),
        "num_key_value_heads": s.count("num_global_key_value_heads", 1),
    }
    usual = {
        "head_dim": s.count("head_dim", 256),
        "num_key_value_heads": s.count("num_key_value_heads", 2),
    }
    written = s.get(
        "per_layer_config", {str(i): wide for i, kind in enumerate(kinds) if kind == FULL}
    )
    forms = []
    for i, kind in enumerate(kinds):
        layer = s.nested({**usual, **written.get(str(i), {})}, f"per_layer_config.{i}")
        forms.append(
            Heads(
                count,
                layer.count("num_key_value_heads"),
                layer.count("head_dim"),
                factor=1.0,
                window=window if kind == SLIDING else None,
            )
        )
        layer.check(None)
    return forms
