"""Models of known shapes with random weights, made on the requested device, and batches for
them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from hybridtei.batch import Encoding, Head, PackedBatch, Positions, pack
from hybridtei.inference.backends.heads import HeadLayers
from hybridtei.inference.backends.torch.backend import DTYPES, TorchBackend
from hybridtei.inference.backends.torch.ops import ModuleOptions, family_module
from hybridtei.inference.backends.torch.trunk import PackedTrunk
from hybridtei.models.checkpoint.classifiers import LinearLayer
from hybridtei.models.families import run_family

# (share, (shortest, longest))
Mix = Sequence[tuple[float, tuple[int, int]]]
BATCHES = 8
# RoBERTa's positions begin behind its padding id
M3_OFFSET = 2


@dataclass(frozen=True)
class Shape:
    """transformers' name for the classes, its sizes, and more of them. `outputs`: it has BGE-M3's
    heads."""

    classes: str
    pooling: str
    longest: int
    sizes: Sequence[int]
    outputs: bool = False
    more: Mapping[str, int] = field(default_factory=dict)

    def config(self) -> Any:
        """Return transformers' configuration."""
        names = (
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
            "vocab_size",
        )
        sizes = {
            **dict(zip(names, self.sizes, strict=True)),
            **self.more,
            "max_position_embeddings": self.longest + M3_OFFSET,
        }
        return getattr(transformers, f"{self.classes}Config")(**sizes)


SMALL, TINY, M3 = (
    (256, 4, 4, 512, 2000),
    (32, 2, 4, 48, 500),
    {"type_vocab_size": 1, "pad_token_id": 1},
)
QWEN3_8B = (4096, 36, 32, 12288, 151665)
SHAPES = {
    "BERT": Shape("Bert", "cls", 512, SMALL),
    "Qwen3": Shape(
        "Qwen3", "lasttoken", 1024, SMALL, more={"num_key_value_heads": 2, "head_dim": 64}
    ),
    "BERT-base": Shape("Bert", "cls", 512, (768, 12, 12, 3072, 30522)),
    "MiniLM": Shape("Bert", "mean", 512, (384, 6, 12, 1536, 30522)),
    "BGE-M3": Shape("XLMRoberta", "cls", 8192, (1024, 24, 16, 4096, 250002), outputs=True, more=M3),
    "Qwen3-Embedding-8B": Shape(
        "Qwen3", "lasttoken", 8192, QWEN3_8B, more={"num_key_value_heads": 8, "head_dim": 128}
    ),
    "tiny BERT": Shape("Bert", "cls", 512, TINY),
    "tiny Qwen3": Shape(
        "Qwen3", "lasttoken", 1024, TINY, more={"num_key_value_heads": 2, "head_dim": 8}
    ),
    "tiny M3": Shape("XLMRoberta", "cls", 512, TINY, outputs=True, more=M3),
}


def make(
    shape: Shape, dtype: str, device: str, tensor_of: Callable[..., Tensor] | None = None
) -> Any:
    """Return a TorchBackend. `tensor_of`: weights by transformers' names [default: random ones, see
    `drawn`]."""
    config, on, precision = shape.config(), torch.device(device), DTYPES[dtype]
    spec: Any = SimpleNamespace(
        folder=shape.classes,
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        max_input_length=shape.longest,
        positions=Positions(M3_OFFSET if shape.outputs else 0),
        pooling=(shape.pooling,),
        sparse=SimpleNamespace(inputs=("hidden",)) if shape.outputs else None,
        reads_words=False,
        multivector=SimpleNamespace(drop="first") if shape.outputs else None,
        removed_ids=frozenset(),
        has_token_types=shape.classes == "Bert",
        config=config.to_dict(),
        is_splade=False,
        sparse_width=config.vocab_size,
        kind=SimpleNamespace(is_rounded=False),
        adapters=None,
        heads=frozenset(
            {Head.DENSE, Head.TOKENS, *((Head.SPARSE, Head.MULTIVECTOR) if shape.outputs else ())}
        ),
    )
    family = partial(
        run_family,
        model_type=config.model_type,
        config=spec.config,
        file=shape.classes,
        is_native=True,
    )
    tensor_of = tensor_of or drawn(device, precision, device)
    model, forms = family_module(
        family, tensor_of, ModuleOptions(precision, on, typed=spec.has_token_types)
    )
    heads = HeadLayers()
    if shape.outputs:
        width = config.hidden_size
        one, square = tensor_of("sparse", (1, width)), tensor_of("colbert", (width, width))
        heads = HeadLayers(
            lexical=[LinearLayer(one, one[0, :1])], multivector=[LinearLayer(square, square[0])]
        )
    trunk = PackedTrunk(model, forms, spec, device=on, dtype=precision)
    return TorchBackend(spec, dtype=dtype, device=device, loaded=(trunk, heads))


def drawn(device: str, dtype: torch.dtype, place: str) -> Callable[..., Tensor]:
    """Return random weights for a device, drawn at `place`: two devices with one place have the
    same."""
    draw = torch.Generator(place).manual_seed(0)

    def tensor_of(name: str, size: tuple[int, ...]) -> Tensor:
        random = (
            torch.randn(
                size,
                generator=draw,
                device=place,
                dtype=dtype if place == "cuda" else torch.float32,
            )
            * 0.02
        )
        return (random + 1 if "norm" in name.lower() and name.endswith("weight") else random).to(
            device, dtype
        )

    return tensor_of


def packed(
    backend: Any, lengths: Iterable[int], heads: AbstractSet[Head], seed: int = 0
) -> PackedBatch:
    """Return texts of such lengths, or of as much as the model takes."""
    draw, spec = np.random.default_rng(seed), backend.spec
    texts = [
        Encoding(draw.integers(5, spec.vocab_size, min(length, spec.max_input_length)))
        for length in lengths
    ]
    return pack(texts, frozenset(heads), spec.positions)


def batches_of(backend: Any, mix: Mix, tokens: int, heads: AbstractSet[Head]) -> list[PackedBatch]:
    """Return batches of at most `tokens` tokens, or of one text. Lengths are drawn from the mix."""
    draw, made = np.random.default_rng(0), list[PackedBatch]()
    for seed in range(BATCHES):
        lengths: list[int] = []
        while not lengths or sum(lengths) < tokens:
            low, high = mix[0][1] if draw.random() < mix[0][0] else mix[-1][1]
            lengths.append(int(draw.integers(low, high + 1)))
        made.append(packed(backend, lengths[:-1] or lengths, heads, seed))
    return made
