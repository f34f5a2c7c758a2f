"""The table of current models in `notebooks/models.md`, by publisher and name: `python -m
conformance.families.published` writes it, `--check` exits with 1 if it is out of date.

For each model the keys of its config.json that decide what computes it are translated and looked
up, as they are when a folder is read: a row says "every backend" only if a family is found.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridtei.errors import UnsupportedArchitecture
from hybridtei.models.checkpoint.hub_layouts import check_code, translate
from hybridtei.models.families import SERVED

PAGE = Path(__file__).parents[2] / "notebooks" / "models.md"
BEGIN, END = "<!-- current models -->", "<!-- end of current models -->"
FILE = Path("config.json")


@dataclass(frozen=True)
class Published:
    """A model of the hub: the keys of its config.json that decide, and what it gives."""

    name: str
    gives: str
    config: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


def code(module: str, *classes: str) -> dict[str, Any]:
    """The keys of a model whose publisher has code of its own."""
    return {"architectures": [*classes], "auto_map": {"AutoModel": f"{module}.{classes[0]}"}}


LFM2 = {
    "model_type": "lfm2",
    **code("modeling_lfm2_bidirectional", "Lfm2BidirectionalModel"),
}
ULTRABERT = {
    "model_type": "ultrabert",
    "num_hidden_layers": 2,
    "attention_windows": [128, None],
    "rope_theta": [1e4, 2.56e6],
    **code("modeling_ultrabert", "UltraBERTModel"),
}
MODELS = [
    Published(
        "google/embeddinggemma-2",
        "dense, 768 numbers or fewer",
        {"model_type": "embedding_gemma2", "text_config": {"hidden_size": 512}},
        "texts only; float16 is refused",
    ),
    Published("dmis-lab/UltraBERT-150M", "dense", ULTRABERT, "both layouts"),
    Published(
        "nvidia/Nemotron-3-Embed-1B-BF16",
        "dense",
        {"model_type": "ministral3", "is_causal": False},
    ),
    Published(
        "nvidia/Nemotron-3-Embed-8B-BF16",
        "dense",
        {"model_type": "ministral3", "is_causal": False},
    ),
    Published(
        "nvidia/Nemotron-3-Embed-1B-NVFP4", "dense", {}, "its weights are quantised: give the BF16"
    ),
    Published("LiquidAI/LFM2.5-Embedding-350M", "dense", LFM2),
    Published("LiquidAI/LFM2.5-ColBERT-350M", "multi-vectors", LFM2),
    Published("LiquidAI/LFM2.5-Encoder-230M", "states, to be pooled", LFM2),
    Published(
        "lightonai/SlideOn",
        "sparse",
        {"model_type": "modernbert"},
        "if its encoder of token states is saved as a `SparseAutoEncoder` after the Transformer; "
        "its own class is refused by name",
    ),
    Published(
        "Qwen/Qwen3.5 and its embedders",
        "",
        {"model_type": "qwen3_5"},
        "linear attention needs a recurrence that no backend here has",
    ),
    Published("Qwen/Qwen3-Embedding-0.6B", "dense", {"model_type": "qwen3"}),
    Published(
        "Qwen/Qwen3-Reranker-0.6B",
        "scores",
        {"model_type": "qwen3"},
        "also under another name, such as R3-rerank",
    ),
]


def is_served(model: Published) -> bool:
    """Whether a family computes the model."""
    try:
        config = translate(model.config, FILE)
        check_code(config, FILE)
    except UnsupportedArchitecture:
        return False
    return config.get("model_type") in SERVED


def table() -> str:
    """The table's lines, between the marks."""
    rows = ["| model | it gives | how it runs |", "| --- | --- | --- |"]
    for model in MODELS:
        how = "every backend" if is_served(model) else "not supported"
        rows.append(
            f"| {model.name} | {model.gives} | {'; '.join(filter(None, (how, model.note)))} |"
        )
    return "\n".join([BEGIN, "", *rows, "", END])


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 1 if `--check` finds that the table is out of date."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(argv).check
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    new = before + table() + rest.partition(END)[2]
    if not check:
        PAGE.write_text(new, encoding="utf-8")
    elif new != text:
        print(f"{PAGE} is out of date: python -m conformance.families.published", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
