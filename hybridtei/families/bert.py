"""BERT and what differs from it by positions, the width of its embeddings or its names: RoBERTa, XLM-RoBERTa, CamemBERT,
ELECTRA; and DistilBERT, which has no token types."""

from __future__ import annotations

from hybridtei.families.ops import Heads, Ops, Rows
from hybridtei.families.settings import Settings


def bert(o: Ops, s: Settings) -> Rows:
    """After `BertModel`. RoBERTa's offset of positions is in `position_ids`, which come with the batch."""
    return _encoder(o, s, s.count("hidden_size"))


def electra(o: Ops, s: Settings) -> Rows:
    """After `ElectraModel`."""
    return _encoder(o, s, s.count("embedding_size", 128))


def _encoder(o: Ops, s: Settings, embedding_size: int) -> Rows:
    hidden, eps = s.count("hidden_size"), s.number("layer_norm_eps", 1e-12)
    x = _embeddings(o, s, embedding_size, eps)
    if x.width != hidden:
        x = o.linear(x, "embeddings_project", hidden)
    count = s.count("num_attention_heads")
    heads = Heads(count, count, hidden // count)
    act, wide = s.activation("hidden_act"), s.count("intermediate_size")
    for i in range(s.count("num_hidden_layers")):
        layer = f"encoder.layer.{i}."
        q, k, v = o.linears(x, [f"{layer}attention.self.{name}" for name in ("query", "key", "value")], [hidden] * 3)
        attended = o.attention(q, k, v, heads, scale=heads.dim**-0.5)
        y = o.linear(attended, f"{layer}attention.output.dense", hidden)
        x = o.layer_norm(o.add(y, x), f"{layer}attention.output.LayerNorm", eps)
        y = o.activate(o.linear(x, f"{layer}intermediate.dense", wide), act)
        x = o.layer_norm(o.add(o.linear(y, f"{layer}output.dense", hidden), x), f"{layer}output.LayerNorm", eps)
    return x


def _embeddings(o: Ops, s: Settings, width: int, eps: float) -> Rows:
    words = o.embedding("embeddings.word_embeddings.weight", s.count("vocab_size"), width, "input_ids")
    types = o.embedding("embeddings.token_type_embeddings.weight", s.count("type_vocab_size", 2), width, "token_type_ids")
    places = o.embedding(
        "embeddings.position_embeddings.weight", s.count("max_position_embeddings", 512), width, "position_ids"
    )
    return o.layer_norm(o.add(o.add(words, types), places), "embeddings.LayerNorm", eps)


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
