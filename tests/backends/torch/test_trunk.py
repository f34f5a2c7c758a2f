"""Every family, packed, against transformers' own eager attention on each text alone; and rotary embeddings that follow the
length: no text depends on those beside it, before it, or in another thread."""

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
from hybridtei.backends.torch.trunk import forget_lengths
from hybridtei.batch import Encoding, Head, pack
from hybridtei.checkpoint.spec import read_spec
from hybridtei.errors import LoadError, WeightMismatch
from tests import tiny, tolerances

LENGTHS = (7, 1, 120, 2, 64, 17, 16, 33, 3, 15, 120)  # some longer than every window, some on its edges
LOCAL_TWIN = ["sliding_attention", "full_attention"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in tiny.FAMILIES},
    "qwen2 that looks both ways": ("qwen2", {"is_causal": False}),
    "qwen2 with a window": ("qwen2", {"use_sliding_window": True, "sliding_window": tiny.WINDOW, "layer_types": LOCAL_TWIN}),
    "qwen2 that looks both ways through a window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": tiny.WINDOW, "layer_types": LOCAL_TWIN, "is_causal": False},
    ),
    "mistral that looks both ways through a window": ("mistral", {"is_causal": False}),
    "mistral without a window": ("mistral", {"sliding_window": None}),
    "llama that looks both ways": ("llama", {"is_causal": False}),
    "qwen3 that looks both ways": ("qwen3", {"is_causal": False}),
    "gemma3 that looks both ways": ("gemma3_text", {"use_bidirectional_attention": True}),
    "bert with one head a layer": ("bert", {"num_attention_heads": 1}),
}


def random_encodings(spec: Any, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Encoding]:
    """Ids of the whole vocabulary, padding and other special ids among them; token types where the model has them."""
    draw = np.random.default_rng(seed)
    return [
        Encoding(
            draw.integers(0, spec.vocab_size, length),
            draw.integers(0, 2, length) if spec.has_token_types else None,
        )
        for length in lengths
    ]


def hidden_of(backend: TorchBackend, encodings: list[Encoding]) -> list[np.ndarray]:
    outputs = backend.forward(pack(encodings, frozenset({Head.TOKENS}), backend.spec.positions))
    assert outputs.tokens is not None
    return list(outputs.tokens)


def reference(folder: Path, encodings: list[Encoding]) -> list[np.ndarray]:
    """Each text alone, unpadded, by transformers' eager attention; it numbers the positions itself."""
    model = tiny.model_of(folder)
    rows = []
    with torch.inference_mode():
        for encoding in encodings:
            inputs = {"input_ids": torch.tensor(encoding.input_ids)[None]}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            if encoding.token_type_ids is not None:
                inputs["token_type_ids"] = torch.tensor(encoding.token_type_ids)[None]
            rows.append(model(**inputs).last_hidden_state[0].numpy())
    return rows


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda name: name.replace(" ", "-"))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TorchBackend]:
    model_type, settings = VARIANTS[request.param]
    folder = tiny.write_family(tmp_path_factory.mktemp("family"), model_type, **settings)
    return folder, TorchBackend(read_spec(folder, pooling="mean"))


def test_a_packed_batch_equals_each_text_alone_through_transformers(family: tuple[Path, TorchBackend]) -> None:
    folder, backend = family
    encodings = random_encodings(backend.spec)
    for ours, theirs in zip(hidden_of(backend, encodings), reference(folder, encodings), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerances.HIDDEN["float32"], rtol=0)


def test_a_packed_batch_equals_each_text_alone_through_our_backend(family: tuple[Path, TorchBackend]) -> None:
    _, backend = family
    encodings = random_encodings(backend.spec, seed=1)
    for encoding, packed in zip(encodings, hidden_of(backend, encodings), strict=True):
        np.testing.assert_allclose(hidden_of(backend, [encoding])[0], packed, atol=tolerances.HIDDEN["float32"], rtol=0)


def test_tokens_of_one_text_differ(family: tuple[Path, TorchBackend]) -> None:
    """The tiny models are not degenerate: a neighbour's row or a shifted position would show."""
    _, backend = family
    ids = np.random.default_rng(0).integers(4, backend.spec.vocab_size, 64)  # no padding id: RoBERTa puts them in one place
    row = hidden_of(backend, [Encoding(ids)])[0]
    distances = np.abs(row[:, None] - row[None]).max(2) + np.eye(len(row))
    assert distances.min() > 100 * tolerances.HIDDEN["float32"]


@pytest.mark.parametrize("model_type", ["xlm-roberta", "roberta", "camembert", "mpnet"])
def test_a_padding_id_inside_a_text_does_not_count_as_a_position(tmp_path: Path, model_type: str) -> None:
    folder = tiny.write_family(tmp_path, model_type)
    backend = TorchBackend(read_spec(folder, pooling="mean"))
    padding = backend.spec.config["pad_token_id"]
    encodings = [Encoding(np.array(ids)) for ids in ([0, padding, 9, 10, padding, padding, 11, 2], [0, 9, 2], [padding, 9])]
    for ours, theirs in zip(hidden_of(backend, encodings), reference(folder, encodings), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerances.HIDDEN["float32"], rtol=0)


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "qwen3", "modernbert", "distilbert"])
def test_half_precision_stays_near_single_precision(tmp_path: Path, model_type: str) -> None:
    spec = read_spec(tiny.write_family(tmp_path, model_type), pooling="mean")
    encodings = random_encodings(spec)
    exact, rough = (hidden_of(TorchBackend(spec, dtype=dtype), encodings) for dtype in ("float32", "bfloat16"))
    for one, other in zip(exact, rough, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerances.HIDDEN["bfloat16"], rtol=0)


def test_an_old_checkpoint_in_a_pickle_loads_the_same(tmp_path: Path) -> None:
    folder = tiny.write_bert(tmp_path)
    spec = read_spec(folder)
    encodings = random_encodings(spec)
    before = hidden_of(TorchBackend(spec), encodings)
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for one, other in zip(before, hidden_of(TorchBackend(spec), encodings), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_checkpoint_of_a_whole_language_model_loads_its_trunk(tmp_path: Path) -> None:
    """Names under `bert.` and a head that is not used: the trunk is the same, and no weight is made up."""
    folder = tiny.write_family(tmp_path, "bert", task="ForMaskedLM")
    backend = TorchBackend(read_spec(folder, pooling="mean"))
    encodings = random_encodings(backend.spec)
    for ours, theirs in zip(hidden_of(backend, encodings), reference(folder, encodings), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerances.HIDDEN["float32"], rtol=0)


def without(folder: Path, name: str, replacement: torch.Tensor | None = None) -> None:
    """Take a tensor out of a checkpoint, or put another in its place."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    if replacement is not None:
        tensors[name] = replacement
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_missing_weight_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = tiny.write_bert(tmp_path)
    without(folder, "encoder.layer.1.output.dense.bias")
    with pytest.raises(WeightMismatch, match=r"encoder\.layer\.1\.output\.dense\.bias") as caught:
        TorchBackend(read_spec(folder))
    assert str(folder) in str(caught.value)


def test_a_misshapen_weight_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = tiny.write_bert(tmp_path)
    without(folder, "encoder.layer.0.output.dense.bias", torch.zeros(tiny.HIDDEN + 1))
    with pytest.raises(LoadError, match=str(folder)):
        TorchBackend(read_spec(folder))


def test_a_pooler_that_is_not_there_is_not_needed(tmp_path: Path) -> None:
    folder = tiny.write_bert(tmp_path)
    without(folder, "pooler.dense.weight")
    without(folder, "pooler.dense.bias")
    assert TorchBackend(read_spec(folder)).forwards == 0


@pytest.mark.parametrize(
    ("model_type", "changes", "left"),
    [
        ("bert", {"num_hidden_layers": 1}, r"encoder\.layer\.1\."),
        ("qwen3", {"num_hidden_layers": 1, "layer_types": None}, r"layers\.1\."),
        ("modernbert", {"num_hidden_layers": 1, "layer_types": None}, r"layers\.1\."),
        ("distilbert", {"n_layers": 1}, r"transformer\.layer\.1\."),
    ],
)
@pytest.mark.parametrize("task", ["Model", "ForMaskedLM"])
def test_a_trunk_weight_that_is_left_over_is_an_error_that_names_it(
    tmp_path: Path, model_type: str, changes: dict[str, Any], left: str, task: str
) -> None:
    if model_type == "qwen3":
        task = task.replace("Masked", "Causal")
    folder = tiny.write_family(tmp_path, model_type, task=task)
    spec = read_spec(folder, pooling="mean")
    TorchBackend(spec)  # whatever else the task's head brings along may stay unused
    tiny.edit_json(folder / "config.json", **changes)
    with pytest.raises(WeightMismatch, match=left) as caught:
        TorchBackend(read_spec(folder, pooling="mean"))
    assert str(folder) in str(caught.value)


def write_with(folder: Path, name: str) -> Path:
    """A BERT with one more tensor in its weights."""
    from safetensors.torch import load_file, save_file

    tiny.write_bert(folder)
    tensors = {**load_file(folder / "model.safetensors"), name: torch.zeros(4, 4)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "name", ["embeddings.position_ids", "encoder.layer.0.rotary_emb.inv_freq", "cls.seq_relationship.weight"]
)
def test_buffers_and_heads_may_be_left_over(tmp_path: Path, name: str) -> None:
    assert TorchBackend(read_spec(write_with(tmp_path, name))).forwards == 0


@pytest.mark.parametrize(
    "name",
    [
        "embeddings.segment_embeddings.weight",
        "encoder.layer.0.attention.self.distance_embedding.weight",
        "encoder.layer.1.attention.self.query.lora_A.weight",
    ],
)
def test_a_table_or_an_adapter_may_not_be_left_over(tmp_path: Path, name: str) -> None:
    with pytest.raises(WeightMismatch, match=name):
        TorchBackend(read_spec(write_with(tmp_path, name)))


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "camembert", "mpnet"])
def test_an_offset_family_without_a_padding_id_counts_as_transformers_does(tmp_path: Path, model_type: str) -> None:
    folder = tiny.write_family(tmp_path, model_type)
    tiny.edit_json(folder / "config.json", pad_token_id=...)
    backend = TorchBackend(read_spec(folder, pooling="mean"))
    encodings = random_encodings(backend.spec)
    for ours, theirs in zip(hidden_of(backend, encodings), reference(folder, encodings), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=tolerances.HIDDEN["float32"], rtol=0)


ORIGINAL = 32  # positions the model was trained with at first: longer texts take other frequencies
LENGTHS_AROUND = (7, 200, ORIGINAL, ORIGINAL + 1, 60, 3)
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
    return [Encoding(draw.integers(5, 80, length)) for length in LENGTHS_AROUND]


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
