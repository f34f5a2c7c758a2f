"""How near a model on a device is to another: to float32 on the CPU by each kernel and dtype, in fp8 to itself in bfloat16, and
to sentence-transformers with the same weights, whose speed is measured in the same process."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_drive import Source, passes, synchronise
from gpu_models import Shape, drawn, make, write

from hybridtei.backends.torch import attention
from hybridtei.backends.torch.backend import DTYPES, TorchBackend
from hybridtei.backends.torch.compiling import NEAR, deviation
from hybridtei.backends.torch.fp8 import to_eight_bits
from hybridtei.batch import Encoding, Head, PackedBatch, pack

DENSE = frozenset({Head.DENSE})
PROBE = (9, 250, 61, 33, 1, 512)
PEER_LENGTHS = (50, 512)


def near(shape: Shape, kernel: str, dtype: str, device: str) -> dict[str, Any]:
    """How far states of the device are from float32's on the CPU, with the same weights, relative to the largest."""
    exact = make(shape, dtype="float32", device="cpu", tensor_of=drawn(torch.device("cpu"), torch.float32, place="cpu"))
    on = torch.device(device)
    made = make(shape, dtype=dtype, device=device, tensor_of=drawn(on, DTYPES[dtype], place="cpu"))
    with_kernel(made.backend, kernel)
    batch = probe(exact.backend, frozenset({Head.DENSE, Head.TOKENS}))
    expected, found = exact.backend.forward(batch), made.backend.forward(batch)
    assert expected.tokens is not None and found.tokens is not None  # noqa: PT018 - for the type checker
    worst = deviation(torch.from_numpy(found.tokens.values), torch.from_numpy(expected.tokens.values))
    row = {"deviation": worst, "tolerance": NEAR[dtype], "cosine": _cosine(found.dense, expected.dense)}
    return {**row, **({} if worst <= NEAR[dtype] else {"failed": "farther than the tolerance"})}


def with_kernel(backend: TorchBackend, name: str) -> None:
    """Have attention computed by another kernel. Raises SystemExit with the reason if it cannot run here."""
    trunk: Any = backend.trunk
    if backend.device.type == "cuda":
        refused = attention.why_not(name, attention.facts_of(trunk.forms, trunk.dtype, backend.device))
        if refused:
            sys.exit(f"{name}: {refused}")
    trunk.kernel = attention.OPENERS[name]()


def in_fp8(backend: TorchBackend) -> float:
    """Put eight bits in place of a bfloat16 backend's matrices; the least cosine of its dense vectors with those before."""
    batch = probe(backend, DENSE)
    before = backend.forward(batch).dense
    to_eight_bits(backend.trunk.model)
    backend.catch_up()
    return _cosine(backend.forward(batch).dense, before)


def peer(shape: Shape, cell: Any) -> Iterator[dict[str, Any]]:
    """Rows of sentence-transformers and of ours, with the same weights. `tokens_per_s` is of `encode`, which tokenises, too;
    `passes_tokens_per_s` of passes alone, its texts padded to the longest, which is as long as all of them are here."""
    from sentence_transformers import SentenceTransformer, models

    with tempfile.TemporaryDirectory() as folder:
        words = write(shape, folder, cell.dtype)
        transformer = models.Transformer(folder, max_seq_length=shape.longest, model_args={"dtype": DTYPES[cell.dtype]})
        width = transformer.get_word_embedding_dimension()
        theirs = SentenceTransformer(modules=[transformer, models.Pooling(width, shape.pooling)], device=cell.device)
    weights = transformer.auto_model.state_dict()

    def tensor_of(name: str, size: tuple[int, ...]) -> torch.Tensor:
        """Heads that the peer's model does not have are zeros: none of them is asked for."""
        head = name in ("sparse", "colbert")
        return torch.zeros(size, dtype=DTYPES[cell.dtype], device=cell.device) if head else weights[name].to(cell.device)

    made = make(shape, dtype=cell.dtype, device=cell.device, tensor_of=tensor_of)
    for length in PEER_LENGTHS:
        inner = min(length, shape.longest) - 2  # and a token at each end
        draw, count = np.random.default_rng(0), max(cell.budget // length, 1)
        texts = [" ".join(draw.choice(words, inner)) for _ in range(count)]
        encoded = partial(theirs.encode, texts, batch_size=count, show_progress_bar=False)
        encode = _rate(encoded, count * length, cell)
        asked = theirs.tokenize(texts)
        features = {name: value.to(cell.device) if isinstance(value, torch.Tensor) else value for name, value in asked.items()}
        with torch.inference_mode():
            alone = _rate(partial(_passed, theirs, features), count * length, cell)
        ids = features["input_ids"].cpu().numpy()
        batch = pack([Encoding(row) for row in ids], DENSE, made.backend.spec.positions)
        cosine = _cosine(made.backend.forward(batch).dense, encoded())
        source = Source(((1.0, (length, length)),), shape.longest, made.backend.spec.vocab_size, cell.budget)
        ours = passes(made.backend, source, cell.budget, cell.pass_seconds, DENSE)
        row = {"tokens": str(length), "tokens_per_s": encode, "passes_tokens_per_s": alone}
        yield {**row, "ours_passes_tokens_per_s": ours, "cosine": cosine}


def probe(backend: TorchBackend, heads: frozenset[Head]) -> PackedBatch:
    """Texts of several lengths."""
    spec, draw = backend.spec, np.random.default_rng(1)
    lengths = [min(length, spec.max_input_length) for length in PROBE]
    return pack([Encoding(draw.integers(5, spec.vocab_size, length)) for length in lengths], heads, spec.positions)


def _passed(theirs: Any, features: dict[str, Any]) -> torch.Tensor:
    return theirs(dict(features))["sentence_embedding"].float().cpu()  # type: ignore[no-any-return]


def _rate(run: Callable[[], Any], tokens: int, cell: Any) -> float:
    run()
    passed, began = 0, time.perf_counter()
    while not passed or time.perf_counter() - began < cell.pass_seconds:
        run()
        passed += 1
    synchronise(cell.device)
    return passed * tokens / (time.perf_counter() - began)


def _cosine(found: Any, expected: Any) -> float:
    found, expected = (np.asarray(one, dtype=np.float64) for one in (found, expected))
    return float(((found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)).min())
