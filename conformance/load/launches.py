"""Kernel launches and host time of a pass on a GPU, by family, counted without one.

    python -m conformance.load.launches [--families BERT-base,MPNet] [--fp8] [--device cuda|meta]

Launches: the operations of a pass over fake tensors, of the sizes of well-known models in float16.
Views and empty tensors are free, an operation of torch is one launch, and a norm of rows that are
not contiguous is two. A build of torch for CUDA counts what a card would run, and needs no card
(`pip install torch==2.11.0`); other builds count on the device "meta", where norms of rows may be
several operations. Columns: a pass of one text of 5 tokens, of 32 texts of 50, and what each
further length adds, which is a further group for families whose scores have a bias.

Host time: microseconds of Python and torch's dispatcher for a pass of 5 tokens, the layers in full
number, their widths tiny, attention empty; one thread of this machine's CPU, the best of 60.
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtei.batch import offsets_of
from hybridtei.inference.backends.heads import Segments, column_maxima, pooled
from hybridtei.inference.backends.torch import kernels
from hybridtei.inference.backends.torch.fp8 import to_eight_bits
from hybridtei.inference.backends.torch.fusing import sum_inside
from hybridtei.inference.backends.torch.layout import PackedLayout
from hybridtei.inference.backends.torch.ops import TORCH, ModuleOptions, TorchOps, family_module
from hybridtei.models.families import run_family

BERT = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
}
UNTYPED = {name: value for name, value in BERT.items() if name != "type_vocab_size"}
M3 = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
QWEN3 = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151669,
}
MODERNBERT = {
    "hidden_size": 768,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "intermediate_size": 1152,
    "vocab_size": 50368,
}
GEMMA = {
    "hidden_size": 768,
    "num_hidden_layers": 24,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 1152,
    "vocab_size": 262144,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
}
DEBERTA = {
    "type_vocab_size": 0,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
T5 = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "head_dim": 64,
    "intermediate_size": 3072,
    "vocab_size": 32128,
    "hidden_act": "relu",
}
# Name -> (model_type, settings)
FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "MiniLM-L6": ("bert", BERT | {"hidden_size": 384, "num_hidden_layers": 6}),
    "BERT-base": ("bert", BERT),
    "BGE-M3": ("xlm-roberta", BERT | M3 | {"type_vocab_size": 1}),
    "ModernBERT-base": ("modernbert", MODERNBERT),
    "GTE-base-v1.5": ("gte", UNTYPED | {"type_vocab_size": 0}),
    "Qwen3-0.6B": ("qwen3", QWEN3),
    "Qwen3-8B": ("qwen3", QWEN3 | {"hidden_size": 4096, "num_hidden_layers": 36}),
    "EmbeddingGemma": ("gemma3_text", GEMMA),
    "MPNet": ("mpnet", UNTYPED),
    "T5-base": ("t5", T5),
    "DeBERTa-v3": ("deberta-v2", BERT | DEBERTA),
    "Jina-v2": ("jina_bert", BERT | {"feed_forward_type": "geglu"}),
}
BIASED = ("MPNet", "T5-base", "DeBERTa-v3", "Jina-v2")
# Operations without a launch: views, and tensors without values
FREE = frozenset(
    re.findall(
        r"\w+",
        "device view _unsafe_view t transpose split split_with_sizes slice select as_strided expand "
        "unsqueeze squeeze detach alias permute unbind empty empty_like empty_strided new_empty "
        "lift_fresh",
    )
)
# Launches beside an operation's own: of rows that are not contiguous, a copy
COPIES_ROWS = ("native_layer_norm", "_fused_rms_norm")


class Launches(TorchDispatchMode):
    """Counts launches by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in FREE:
            self.counts[name] += 1
        if name in COPIES_ROWS and not args[0].is_contiguous():
            self.counts["copy of rows"] += 1
        return func(*args, **(kwargs or {}))


def fake_attention(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Any, **_: Any) -> Tensor:
    """The memory-efficient kernel's result, which a card's SDPA chooses for a mask; one launch. A
    fake device's SDPA is a dozen operations."""
    assert attn_mask is None or attn_mask.dtype == q.dtype
    shape = q.shape[0], q.shape[2], q.shape[1], v.shape[3]
    return torch.zeros(shape, dtype=q.dtype, device=q.device).transpose(1, 2)


def fake_copy(arrays: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The result of `memory.to_device`, on the fake device."""
    return {
        name: torch.empty(len(array), dtype=torch.int64, device=device)
        for name, array in arrays.items()
    }


@contextmanager
def fakes() -> Iterator[None]:
    """Within, tensors are fake, and attention and copies as above."""
    real = kernels.scaled_dot_product_attention, kernels.to_device
    kernels.scaled_dot_product_attention, kernels.to_device = fake_attention, fake_copy
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            yield
    finally:
        kernels.scaled_dot_product_attention, kernels.to_device = real


def launches(
    name: str, lengths: list[int], device: str, *, fp8: bool = False, unseen: int = 0
) -> Counter[str]:
    """The launches of a pass of texts of these lengths, with mean pooling."""
    on = torch.device(device)
    dtype = torch.bfloat16 if fp8 else torch.float16
    with fakes():
        module = module_of(name, dtype, on, partial(torch.empty, device=on, dtype=dtype))
        if fp8:
            to_eight_bits(module)
        at = Segments(offsets_of(lengths), torch.empty(len(lengths) + 1, device=on).long())
        kernel = kernels.padded_groups if name in BIASED else kernels.flash
        last = np.array([unseen if length < 50 else 0 for length in lengths])
        layout = PackedLayout(
            at.cu_seqlens, on, last if unseen else None, kernel=kernel, offsets=at.offsets
        )
        layout.stage()
        names = ("input_ids", "position_ids", "token_type_ids")
        ids = {key: torch.empty(sum(lengths), dtype=torch.int64, device=on) for key in names}
        with Launches() as counted:
            pooled(TORCH, module(ids, layout), at, ("mean",))
    return counted.counts


def module_of(
    name: str, dtype: torch.dtype, device: torch.device, make: Any, **changes: int
) -> Any:
    """A family's module, its tensors made by `make(shape)`."""
    model_type, config = FAMILIES[name]
    config = {**config, **{key: value for key, value in changes.items() if key in config}}
    family = partial(run_family, model_type=model_type, config=config, file=name, is_native=False)
    options = ModuleOptions(dtype, device, typed=config.get("type_vocab_size", 0) > 1)
    return family_module(family, lambda _, shape: make(shape), options)[0]


def splade_launches(lengths: list[int], device: str) -> int:
    """The launches of a SPLADE head's maxima over 30,522 words."""
    on = torch.device(device)
    with fakes():
        rows = torch.empty(sum(lengths), 768, device=on, dtype=torch.float16)
        table = torch.empty(30522, 768, device=on, dtype=torch.float16)
        at = Segments(offsets_of(lengths), torch.empty(len(lengths) + 1, device=on).long())
        with Launches() as counted:
            column_maxima(TORCH, rows, at, lambda some: some @ table.T)
    return counted.counts.total()


def host_us(name: str) -> float:
    """The host's microseconds for a pass of one text of 5 tokens."""
    torch.set_num_threads(1)
    heads = FAMILIES[name][1].get("num_attention_heads", 12)
    tiny = {"hidden_size": 8 * heads, "intermediate_size": 32, "vocab_size": 100, "head_dim": 8}
    draw = torch.Generator().manual_seed(0)

    def make(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=draw) * 0.02

    with torch.inference_mode():
        TorchOps.joins = True
        module = module_of(name, torch.float32, torch.device("cpu"), make, **tiny)
        sum_inside(module)
        kernel = kernels.padded_groups if name in BIASED else kernels.flash
        zeros = torch.zeros(5, dtype=torch.int64)
        ids = dict.fromkeys(("input_ids", "position_ids", "token_type_ids"), zeros)
        times = []
        for _ in range(63):
            layout = PackedLayout(offsets_of([5]), kernel=kernel)
            layout.stage()
            began = time.process_time()
            module(ids, layout)
            times.append(time.process_time() - began)
    return 1e6 * min(times[3:])


def empty_flash(q: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    """Flash attention on a CPU, without arithmetic."""
    nothing = torch.empty(0)
    return torch.empty_like(q), nothing, nothing, nothing, nothing


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = "cuda" if torch.backends.cuda.is_built() else "meta"
    parser.add_argument("--device", choices=("cuda", "meta"), default=usual)
    parser.add_argument("--families", default=",".join(FAMILIES), help="separated by commas")
    parser.add_argument("--fp8", action="store_true", help="a column of launches in fp8 too")
    options = parser.parse_args()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", empty_flash, "CPU")
    print(f"torch {torch.__version__}, fake device {options.device}")
    print(f"{'model':18} {'1 x 5':>7} {'32 x 50':>8} {'further':>8} {'host us':>8} {'fp8':>6}")
    for name in options.families.split(","):
        count = partial(launches, name, device=options.device)
        alone, equal = count([5]).total(), count([50] * 32).total()
        further = count([50] * 32 + [200] * 8).total() - equal
        fp8 = count([50] * 32, fp8=True).total() if options.fp8 else ""
        print(
            f"{name:18} {alone:7} {equal:8} {further:8} {host_us(name):8,.0f} {fp8:>6}", flush=True
        )
    for lengths in ([50] * 328, [512] * 32, [5] * 3277, [8000, 8000, 384]):
        print(f"SPLADE's maxima, {len(lengths)} texts: {splade_launches(lengths, options.device)}")
    for lengths in ([40] * 8, [200] * 8, [40] + [200] * 7):
        total = launches("ModernBERT-base", lengths, options.device, unseen=8).total()
        print(f"late interaction, texts of {sorted({*lengths})} tokens, 8 unseen in 40: {total}")


if __name__ == "__main__":
    main()
