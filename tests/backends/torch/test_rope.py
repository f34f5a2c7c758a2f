"""Rotary embeddings that follow the length: no text depends on those beside it, before it, or in another thread."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.backends.torch.rope import forget_lengths
from hybridtei.batch import Encoding, Head, pack
from hybridtei.checkpoint.spec import read_spec
from tests import tiny, tolerances

ORIGINAL = 32  # positions the model was trained with at first: longer texts take other frequencies
LENGTHS = (7, 200, ORIGINAL, ORIGINAL + 1, 60, 3)
HALF = tiny.HIDDEN // 4 // 2
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * HALF,
    "long_factor": [1.0 + 3 * i for i in range(HALF)],
    "original_max_position_embeddings": ORIGINAL,
    "factor": 8.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "longrope": ("qwen2", {"rope_parameters": LONG, "max_position_embeddings": 256}),
    "dynamic": ("qwen2", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
    "longrope of one kind of layer": (
        "modernbert",
        {"rope_parameters": {"full_attention": LONG, "sliding_attention": PLAIN}, "max_position_embeddings": 256},
    ),
    "dynamic, encoder": ("nomic_bert", {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}),
}


def encodings() -> list[Encoding]:
    draw = np.random.default_rng(0)
    return [Encoding(draw.integers(5, 80, length)) for length in LENGTHS]


def states(backend: TorchBackend, texts: list[Encoding]) -> list[np.ndarray]:
    tokens = backend.forward(pack(texts, frozenset({Head.TOKENS}), backend.spec.positions)).tokens
    assert tokens is not None
    return list(tokens)


def close(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, atol=tolerances.HIDDEN["float32"], rtol=0)


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_type, settings = MODELS[request.param]
    return tiny.write_family(tmp_path_factory.mktemp("rope"), model_type, **settings)


@pytest.fixture
def backend(folder: Path) -> TorchBackend:
    """Families refuse such embeddings, so transformers' own modules run them."""
    return TorchBackend(read_spec(folder, pooling="mean"))


def test_a_text_alone_equals_it_beside_a_long_one(folder: Path, backend: TorchBackend) -> None:
    texts = encodings()
    together = states(backend, texts)
    for text, row in zip(texts, together, strict=True):
        fresh = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        with torch.inference_mode():
            close(row, fresh(input_ids=torch.tensor(text.input_ids)[None], use_cache=False).last_hidden_state[0].numpy())
        close(row, states(backend, [text])[0])
    for row, again in zip(together[::-1], states(backend, texts[::-1]), strict=True):
        close(row, again)


def test_threads_do_not_see_each_others_lengths(backend: TorchBackend) -> None:
    texts = encodings()
    alone = [states(backend, [text])[0] for text in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda place: states(backend, [texts[place % len(texts)]])[0], range(60)))
    for place, row in enumerate(found):
        close(row, alone[place % len(texts)])


def test_the_frequencies_matter(folder: Path) -> None:
    """Without care a short text changes beside a long one: the tiny models show the fault."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    short, long = (torch.tensor(text.input_ids) for text in encodings()[:2])
    padded = torch.zeros(2, len(long), dtype=torch.long)
    padded[0, : len(short)], padded[1] = short, long
    mask = torch.ones_like(padded)
    mask[0, len(short) :] = 0
    with torch.inference_mode():
        alone = model(input_ids=short[None]).last_hidden_state[0]
        beside = model(input_ids=padded, attention_mask=mask).last_hidden_state[0, : len(short)]
    assert (alone - beside).abs().max() > 100 * tolerances.HIDDEN["float32"]


@pytest.mark.parametrize("model_type", ["bert", "qwen2", "modernbert", "nomic_bert"])
def test_other_models_go_together(tmp_path: Path, model_type: str) -> None:
    model = AutoModel.from_pretrained(tiny.write_family(tmp_path, model_type))
    assert not forget_lengths(model)
