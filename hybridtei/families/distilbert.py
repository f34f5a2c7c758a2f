"""DistilBERT: BERT without token types, under names of its own."""

from __future__ import annotations

from hybridtei.families.ops import Heads, Ops, Rows
from hybridtei.families.settings import Settings

EPS = 1e-12


def distilbert(o: Ops, s: Settings) -> Rows:
    """After `DistilBertModel`."""
    hidden, count = s.count("dim", 768), s.count("n_heads", 12)
    words = o.embedding("embeddings.word_embeddings.weight", s.count("vocab_size"), hidden, "input_ids")
    places = o.embedding(
        "embeddings.position_embeddings.weight", s.count("max_position_embeddings", 512), hidden, "position_ids"
    )
    x = o.layer_norm(o.add(words, places), "embeddings.LayerNorm", EPS)
    heads = Heads(count, count, hidden // count)
    act, wide = s.activation("activation"), s.count("hidden_dim", 4 * hidden)
    for i in range(s.count("n_layers", 6)):
        layer = f"transformer.layer.{i}."
        q, k, v = o.linears(x, [f"{layer}attention.{name}_lin" for name in "qkv"], [hidden] * 3)
        attended = o.attention(q, k, v, heads, scale=heads.dim**-0.5)
        x = o.layer_norm(o.add(o.linear(attended, f"{layer}attention.out_lin", hidden), x), f"{layer}sa_layer_norm", EPS)
        y = o.linear(o.activate(o.linear(x, f"{layer}ffn.lin1", wide), act), f"{layer}ffn.lin2", hidden)
        x = o.layer_norm(o.add(y, x), f"{layer}output_layer_norm", EPS)
    return x
