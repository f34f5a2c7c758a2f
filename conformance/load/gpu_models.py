"""Models by shape, with random weights, made on the device: nothing is downloaded and nothing is read.

What they compute is noise; how long it takes and how much memory it needs is what a checkpoint of that shape takes and needs.
Imports neither the server nor its packages, so it runs where only torch, transformers and numpy are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch.nn.functional import linear

from hybridtei.backends.torch.acceleration import AccelerationOptions
from hybridtei.backends.torch.backend import DTYPES, TorchBackend
from hybridtei.backends.torch.cuda_graphs import Replay
from hybridtei.backends.torch.heads import HeadWeights, LexicalWeights
from hybridtei.backends.torch.ops import ModuleOptions, family_module
from hybridtei.backends.torch.trunk import PackedTrunk
from hybridtei.batch import Head, Positions
from hybridtei.families import run_family


@dataclass(frozen=True)
class Shape:
    """transformers' name for the classes, and the sizes. `outputs`: it has BGE-M3's sparse and multi-vector heads, too."""

    classes: str
    pooling: str
    longest: int
    sizes: dict[str, Any] = field(default_factory=dict)
    outputs: bool = False


BERT_BASE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
}
QWEN3_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151665,
    "max_position_embeddings": 40960,
}
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 500}
SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512, "vocab_size": 2000}
MINILM = {**BERT_BASE, "hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}
BGE_M3 = {
    **BERT_BASE,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "vocab_size": 250002,
    "max_position_embeddings": 8194,
    "type_vocab_size": 1,
    "pad_token_id": 1,
}
M3_OFFSET = 2  # RoBERTa's positions begin behind its padding id
SHAPES = {
    "BERT": Shape("Bert", "cls", 512, SMALL),
    "Qwen3": Shape("Qwen3", "lasttoken", 1024, {**SMALL, "num_key_value_heads": 2, "head_dim": 64}),
    "BERT-base": Shape("Bert", "cls", 512, BERT_BASE),
    "MiniLM": Shape("Bert", "mean", 512, MINILM),
    "BGE-M3": Shape("XLMRoberta", "cls", 8192, BGE_M3, outputs=True),
    "Qwen3-Embedding-8B": Shape("Qwen3", "lasttoken", 8192, QWEN3_8B),
    "tiny BERT": Shape("Bert", "cls", 512, TINY),
    "tiny Qwen3": Shape("Qwen3", "lasttoken", 1024, {**TINY, "num_key_value_heads": 2, "head_dim": 8}),
    "tiny M3": Shape("XLMRoberta", "cls", 512, {**TINY, "max_position_embeddings": 514, "pad_token_id": 1}, outputs=True),
}


@dataclass(frozen=True)
class Made:
    """A model that is ready to run; what it weighs in the arithmetic of a pass."""

    backend: TorchBackend
    matrix_weights: int
    attention_width: int  # heads * width of a head, over all layers
    causal: bool

    def flop_per_token(self, mean_keys: float) -> float:
        """Of products with weights, and of attention where a query meets so many keys on average."""
        seen = mean_keys / 2 if self.causal else mean_keys
        return 2.0 * self.matrix_weights + 4.0 * self.attention_width * seen


TensorOf = Callable[[str, tuple[int, ...]], torch.Tensor]


def make(
    shape: Shape, *, dtype: str, device: str, acceleration: AccelerationOptions | None = None, tensor_of: TensorOf | None = None
) -> Made:
    """A model on the device. What a checkpoint would say of itself is said by its configuration and by `Shape`.

    `tensor_of`: weights by transformers' names [default: random ones, see `drawn`].
    """
    config = config_of(shape)
    offset = M3_OFFSET if shape.outputs else 0
    every = {Head.DENSE, Head.TOKENS, *({Head.SPARSE, Head.MULTIVECTOR} if shape.outputs else {})}
    spec: Any = SimpleNamespace(
        folder=shape.classes,
        model_type=config.model_type,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_input_length=shape.longest,
        positions=Positions(offset),
        pooling=(shape.pooling,),
        dense_modules=(),
        sparse=SimpleNamespace(inputs=("hidden",)) if shape.outputs else None,
        multivector=SimpleNamespace(drop="first") if shape.outputs else None,
        classifier=None,
        removed_ids=frozenset(),
        has_token_types=shape.classes == "Bert",
        padding_id=0,
        config=config.to_dict(),
        is_splade=False,
        sparse_width=config.vocab_size,
        is_rounded=False,
        adapters=None,
        heads=frozenset(every),
    )
    on, precision = torch.device(device), DTYPES[dtype]
    tensor_of = tensor_of or drawn(on, precision)
    family = partial(run_family, model_type=config.model_type, config=spec.config, file=shape.classes)
    options = ModuleOptions(precision, on, joined=True, typed=spec.has_token_types)
    model, forms = family_module(family, tensor_of, options)
    trunk = PackedTrunk(model, forms, spec, device=on, dtype=precision)
    heads = HeadWeights()
    if shape.outputs:
        one, square = (
            tensor_of("sparse", (1, config.hidden_size)),
            tensor_of("colbert", (config.hidden_size, config.hidden_size)),
        )
        heads = HeadWeights(lexical=LexicalWeights(one, one[0, :1]), projection=(square, square[0]))
    backend = TorchBackend(spec, dtype=dtype, device=device, loaded=(trunk, heads), acceleration=acceleration)
    weights = sum(getattr(model, node.args[1].target).numel() for node in model.graph.nodes if node.target is linear)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    causal = any(form.causal for form in forms)
    return Made(backend, weights, config.num_hidden_layers * config.num_attention_heads * width, causal)


def drawn(on: torch.device, dtype: torch.dtype, *, place: str | None = None) -> TensorOf:
    """Random weights for a device, drawn there, or at `place`, so that another device has the same."""
    draw = torch.Generator(place or on).manual_seed(0)

    def tensor_of(name: str, size: tuple[int, ...]) -> torch.Tensor:
        drawn_as = torch.float32 if place else dtype
        random = torch.randn(size, generator=draw, device=draw.device, dtype=drawn_as) * 0.02
        return (random + 1 if "norm" in name.lower() and name.endswith("weight") else random).to(on, dtype)

    return tensor_of


def config_of(shape: Shape) -> Any:
    """transformers' configuration of a shape."""
    return getattr(transformers, f"{shape.classes}Config")(**{"max_position_embeddings": shape.longest, **shape.sizes})


def called_again(run: Callable[[], object]) -> Replay:
    """A recorder where there is no GPU to record on, so that the rest can be tried."""

    def replay() -> None:
        run()

    return replay


def write(shape: Shape, folder: str, dtype: str) -> list[str]:
    """A checkpoint of a BERT's shape with a tokenizer of made-up words, to be served; the words, a token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    config = config_of(shape)
    transformers.utils.logging.disable_progress_bar()
    transformers.AutoModel.from_config(config, dtype=DTYPES[dtype]).save_pretrained(folder)
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = map("".join, itertools.product("abcdefghijklmnopqrstuvwxyz", repeat=4))
    words = [*itertools.islice(letters, config.vocab_size - len(specials))]
    raw = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate([*specials, *words])}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    raw.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    raw.add_special_tokens(specials)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=raw, **names).save_pretrained(folder)
    return words
