"""The graphs that come with the package, made anew:

    python -m hybridtei.backends.ship_graphs [WORD …]

makes those whose name holds one of the words, all without words. Each is exported from random weights with few words, since a
graph knows neither weights nor words, and is held against torch before it is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import torch

from hybridtei.backends.export import export_graph
from hybridtei.backends.graph_names import graph_name
from hybridtei.backends.graphs import SHIPPED
from hybridtei.checkpoint.spec import read_spec

Config = Mapping[str, Any]
FEW_WORDS = 1000


def _bert(layers: int, width: int, heads: int) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width}
    positions = {"max_position_embeddings": 512, "type_vocab_size": 2, "pad_token_id": 0}
    return {"model_type": "bert", **sizes, **positions, "hidden_act": "gelu", "layer_norm_eps": 1e-12}


def _roberta(model_type: str, layers: int, width: int, heads: int) -> Config:
    table = {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
    return {**_bert(layers, width, heads), **table, "model_type": model_type}


def _modernbert(layers: int, width: int, heads: int, intermediate: int) -> Config:
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": intermediate}
    return {"model_type": "modernbert", **sizes, "max_position_embeddings": 8192, "pad_token_id": 3}


MPNET = {
    **{key: value for key, value in _roberta("mpnet", 12, 768, 12).items() if key != "type_vocab_size"},
    "relative_attention_num_buckets": 32,
}
DISTILBERT = {
    "model_type": "distilbert",
    "activation": "gelu",
    "dim": 768,
    "hidden_dim": 3072,
    "max_position_embeddings": 512,
    "n_heads": 12,
    "n_layers": 6,
    "pad_token_id": 0,
}
# The models named are examples: any checkpoint of that shape is served, whatever its words and its number of positions.
ARCHITECTURES: Mapping[str, Config] = {
    "bert-L2-H128": _bert(2, 128, 2),  # bert-tiny, splade-tiny
    "bert-L3-H384": _bert(3, 384, 12),  # paraphrase-MiniLM-L3-v2, bge-micro
    "bert-L4-H512": _bert(4, 512, 8),  # bge-small-zh
    "bert-L6-H384": _bert(6, 384, 12),  # all-MiniLM-L6, arctic-embed-xs; the embedded model
    "bert-L12-H384": _bert(12, 384, 12),  # all-MiniLM-L12, e5-small, multilingual-e5-small, bge-small, gte-small
    "bert-L12-H768": _bert(12, 768, 12),  # bge-base, e5-base, gte-base, arctic-embed-m, splade-v3
    "bert-L24-H1024": _bert(24, 1024, 16),  # bge-large, mxbai-embed-large, e5-large
    "xlm-roberta-L12-H768": _roberta("xlm-roberta", 12, 768, 12),  # multilingual-e5-base
    "xlm-roberta-L24-H1024": _roberta("xlm-roberta", 24, 1024, 16),  # bge-m3, multilingual-e5-large, arctic-embed-l-v2
    "roberta-L6-H768": _roberta("roberta", 6, 768, 12),  # all-distilroberta-v1
    "roberta-L12-H768": _roberta("roberta", 12, 768, 12),
    "mpnet-L12-H768": MPNET,  # all-mpnet-base-v2, multi-qa-mpnet
    "distilbert-L6-H768": DISTILBERT,  # msmarco-distilbert, splade-distil
    "modernbert-L22-H768": _modernbert(22, 768, 12, 1152),  # gte-modernbert-base, modernbert-embed-base
    "modernbert-L28-H1024": _modernbert(28, 1024, 16, 2624),  # modernbert-embed-large
}


def write_checkpoint(folder: Path, config: Config) -> None:
    """Random weights of an architecture with few words, as a model's folder."""
    from transformers import AutoConfig, AutoModel

    settings = {**config, "vocab_size": FEW_WORDS}
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(**settings))
    model.save_pretrained(folder)
    (folder / "config.json").write_bytes(msgspec.json.encode(settings))
    (folder / "tokenizer.json").write_bytes(b'{"added_tokens": []}')


def ship(config: Config, output: Path) -> Path:
    """Export the graph of an architecture into a folder. Raises UnsupportedArchitecture."""
    with TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), config)
        spec = read_spec(Path(folder), pooling="mean")
        path = output / graph_name(spec)
        export_graph(spec).write(path)
    return path


def main(words: Sequence[str]) -> None:
    for name, config in ARCHITECTURES.items():
        if not words or any(word in name for word in words):
            path = ship(config, SHIPPED)
            print(f"{name}: {path.name}, {path.stat().st_size} bytes, exporter {torch.__version__}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
