"""MPNet: BERT with a bias for each bucket of distances, the same in all layers."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hybridtei.families.ops import Heads, Ops, Rows
from hybridtei.families.settings import Settings

BUCKETS, MAX_DISTANCE = 32, 128


def mpnet(o: Ops, s: Settings) -> Rows:
    """After `MPNetModel`."""
    hidden, eps, count = s.count("hidden_size", 768), s.number("layer_norm_eps", 1e-12), s.count("num_attention_heads", 12)
    positions = s.count("max_position_embeddings", 512)
    words = o.embedding("embeddings.word_embeddings.weight", s.count("vocab_size"), hidden, "input_ids")
    places = o.embedding("embeddings.position_embeddings.weight", positions, hidden, "position_ids")
    x = o.layer_norm(o.add(words, places), "embeddings.LayerNorm", eps)
    s.get("type_vocab_size")  # written, and not read: MPNet has no types
    s.only("relative_attention_num_buckets", BUCKETS)  # transformers takes the table's size from there, and no other number
    bias = o.buckets(buckets(BUCKETS, positions), "encoder.relative_attention_bias.weight", count)
    heads = Heads(count, count, hidden // count)
    act, wide = s.activation("hidden_act"), s.count("intermediate_size", 4 * hidden)
    for i in range(s.count("num_hidden_layers", 12)):
        layer = f"encoder.layer.{i}."
        q, k, v = o.linears(x, [f"{layer}attention.attn.{name}" for name in "qkv"], [hidden] * 3)
        attended = o.attention(q, k, v, heads, scale=heads.dim**-0.5, bias=bias)
        y = o.linear(attended, f"{layer}attention.attn.o", hidden)
        x = o.layer_norm(o.add(y, x), f"{layer}attention.LayerNorm", eps)
        y = o.linear(o.activate(o.linear(x, f"{layer}intermediate.dense", wide), act), f"{layer}output.dense", hidden)
        x = o.layer_norm(o.add(y, x), f"{layer}output.LayerNorm", eps)
    return x


def buckets(number: int, longest: int) -> NDArray[np.int64]:
    """Bucket of each key minus query from -longest to longest: exact when near, logarithmic up to `MAX_DISTANCE`."""
    distance = np.arange(-longest, longest + 1)
    half = number // 2
    exact = half // 2
    far = np.maximum(np.abs(distance), 1).astype(np.float32)
    steps = np.log(far / np.float32(exact)) / np.float32(math.log(MAX_DISTANCE / exact)) * np.float32(half - exact)
    large = np.minimum(exact + steps.astype(np.int64), half - 1)
    return np.where(distance > 0, half, 0) + np.where(np.abs(distance) < exact, np.abs(distance), large)
