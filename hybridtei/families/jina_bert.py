"""JinaBERT: BERT without a table of positions, whose scores fall with the distance of tokens, and mostly with gated MLPs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridtei.families.ops import Heads, Ops, Rows
from hybridtei.families.settings import Settings

GATES = {"geglu": "gelu", "reglu": "relu"}  # feed_forward_type -> the function of the gate
PLAIN = "original"


@dataclass(frozen=True)
class _Mlp:
    """Names of the tensors below a layer, and how the product of the first is cut."""

    wide: str
    narrow: str
    norm: str
    wide_bias: bool = False
    gate_first: bool = True


# (whether queries and keys have norms, whether the MLP has a gate) -> its MLP
MLPS = {
    (False, True): _Mlp("mlp.gated_layers", "mlp.wo", "mlp.layernorm"),
    (False, False): _Mlp("intermediate.dense", "output.dense", "output.LayerNorm", wide_bias=True),
    (True, True): _Mlp("mlp.up_gated_layer", "mlp.down_layer", "layer_norm_2", gate_first=False),
    (True, False): _Mlp("mlp.up_layer", "mlp.down_layer", "layer_norm_2"),
}


def jina_bert(o: Ops, s: Settings) -> Rows:
    """After jinaai/jina-bert-implementation; with `qk_norm`, after jinaai/jina-bert-v2-qk-post-norm, which adds the input of
    attention twice."""
    hidden, eps, count = s.count("hidden_size"), s.number("layer_norm_eps", 1e-12), s.count("num_attention_heads")
    heads, qk_norm = Heads(count, count, hidden // count), s.flag("qk_norm")
    s.get("max_position_embeddings")  # no table is that long
    words = o.embedding("embeddings.word_embeddings.weight", s.count("vocab_size"), hidden, "input_ids")
    types = o.embedding("embeddings.token_type_embeddings.weight", s.count("type_vocab_size", 2), hidden, "token_type_ids")
    x = o.layer_norm(o.add(words, types), "embeddings.LayerNorm", eps)
    bias = o.alibi(slopes(count))
    for i in range(s.count("num_hidden_layers")):
        layer, attn = f"encoder.layer.{i}.", f"encoder.layer.{i}.attention."
        q, k, v = o.linears(x, [f"{attn}self.{name}" for name in ("query", "key", "value")], [hidden] * 3)
        if qk_norm:
            q, k = (o.layer_norm(one, f"{attn}self.layer_norm_{name}", eps) for one, name in ((q, "q"), (k, "k")))
        y = o.linear(o.attention(q, k, v, heads, scale=heads.dim**-0.5, bias=bias), f"{attn}output.dense", hidden)
        y = o.layer_norm(o.add(y, x), f"{attn}output.LayerNorm", eps)
        x = o.layer_norm(o.add(y, x), f"{layer}layer_norm_1", eps) if qk_norm else y
        x = _mlp(o, s, x, layer, eps, qk_norm=qk_norm)
    return x


def _mlp(o: Ops, s: Settings, x: Rows, layer: str, eps: float, *, qk_norm: bool) -> Rows:
    kind = s.get("feed_forward_type", PLAIN)
    s.only("feed_forward_type", PLAIN, *GATES)
    is_gated, size, act = kind in GATES, s.count("intermediate_size"), s.activation("hidden_act")
    mlp = MLPS[qk_norm, is_gated]
    y = o.linear(x, layer + mlp.wide, 2 * size if is_gated else size, bias=mlp.wide_bias)
    if is_gated:  # by a function of its own, whatever `hidden_act` says
        one, other = o.split(y, [size] * 2)
        gate, up = (one, other) if mlp.gate_first else (other, one)
        y = o.multiply(o.activate(gate, GATES[kind]), up)
    else:
        y = o.activate(y, act)
    return o.layer_norm(o.add(o.linear(y, layer + mlp.narrow, x.width), x), layer + mlp.norm, eps)


def slopes(heads: int) -> NDArray[np.float32]:
    """ALiBi's of each head: powers of 2 ** (-8 / n) for a power of two n; for other numbers those of the power below, then
    every second one of its double."""
    below = 1 << (heads.bit_length() - 1)
    between = _powers(2 * below)[::2][: heads - below]
    return np.array([*_powers(below), *between], dtype=np.float32)


def _powers(heads: int) -> list[float]:
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]
