"""Every family against transformers, on both engines, alone and among neighbours; and what is not understood is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from transformers import AutoModel

from hybridtei.backends.base import Backend
from hybridtei.backends.onnx_backend import OnnxBackend
from hybridtei.backends.onnx_ops import family_graph
from hybridtei.batch import Encoding, Head, pack
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.families import FAMILIES
from hybridtei.families.deberta import buckets as deberta_buckets
from hybridtei.families.mpnet import buckets as mpnet_buckets
from hybridtei.outputs import Floats
from tests import tiny

TOLERANCE = 3e-6  # of float32 hidden states, relative to the largest
LENGTHS = (1, 3, 40, 17, 100)  # beyond the windows and the buckets of the tiny families
ENGINES = ["ort", "openvino"]
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32}
# Settings that change a family's computation, beside those of its tiny checkpoint.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in tiny.FAMILIES),
    ("bert", {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
    ("bert", {"type_vocab_size": 1}),
    ("electra", {"embedding_size": 32}),
    ("modernbert", {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "hidden_activation": "silu"}),
    ("modernbert", {"layer_types": ["full_attention", "full_attention"]}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 4}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    ("qwen3", {"rope_parameters": YARN}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("deberta-v2", {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False}),
    ("deberta-v2", {"pos_att_type": ["p2c"], "position_buckets": -1, "max_relative_positions": 20}),
    ("deberta-v2", {"pos_att_type": ["c2p"], "type_vocab_size": 2}),
    ("deberta-v2", {"relative_attention": False}),
]


# As the configurations of older checkpoints are written.
OLDER: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"rope_parameters": ..., "rope_theta": 500.0}),
    ("llama", {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("modernbert", {"rope_parameters": ..., "layer_types": ..., "global_rope_theta": 500.0, "local_rope_theta": 50.0}),
    ("gemma3_text", {"rope_parameters": ..., "rope_theta": 500.0, "rope_local_base_freq": 50.0}),
    ("gemma3_text", {"rope_parameters": ..., "rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("gemma3_text", {"layer_types": ..., "sliding_window_pattern": 2}),
    ("nomic_bert", {"head_dim": ...}),
    ("bert", {"layer_norm_eps": ..., "hidden_act": ...}),
]


def texts_of(spec: ModelSpec) -> list[Encoding]:
    random = np.random.default_rng(0)
    lowest = max(spec.positions.offset, 3)
    return [Encoding(random.integers(lowest, spec.vocab_size, length)) for length in LENGTHS]


def hidden(backend: Backend, texts: list[Encoding]) -> Floats:
    tokens = backend.forward(pack(texts, frozenset({Head.TOKENS}), backend.spec.positions)).tokens
    assert tokens is not None
    return tokens.values


def reference(folder: Path, texts: list[Encoding]) -> Floats:
    """transformers' own attention, a text at a time."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        states = [model(input_ids=torch.tensor(text.input_ids)[None]).last_hidden_state[0].numpy() for text in texts]
    return np.concatenate(states)


def opened(name: str, spec: ModelSpec) -> Backend:
    if name == "ort":
        return OnnxBackend(spec, family_graph(spec), Weights.open(spec.folder))
    if find_spec("openvino") is None:
        pytest.skip("openvino is not installed")
    from hybridtei.backends.openvino_backend import OpenVinoBackend

    return OpenVinoBackend(spec, family_graph(spec), Weights.open(spec.folder))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("family", "settings"), VARIANTS, ids=lambda value: value if isinstance(value, str) else ",".join(value)
)
def test_it_computes_what_transformers_does(tmp_path: Path, family: str, settings: dict[str, Any], engine: str) -> None:
    folder = tiny.write_family(tmp_path, family, **settings)
    spec = read_spec(folder, pooling="mean")
    texts = texts_of(spec)
    expected = reference(folder, texts)
    backend = opened(engine, spec)
    limit = TOLERANCE * np.abs(expected).max()
    np.testing.assert_allclose(hidden(backend, texts), expected, rtol=0, atol=limit)
    alone = np.concatenate([hidden(backend, [text]) for text in texts])
    np.testing.assert_allclose(alone, expected, rtol=0, atol=limit)


@pytest.mark.parametrize(("family", "changes"), OLDER, ids=str)
def test_older_configurations_mean_what_they_mean_to_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = tiny.write_family(tmp_path, family)
    tiny.edit_json(folder / "config.json", **changes)
    spec = read_spec(folder, pooling="mean")
    texts = texts_of(spec)
    expected = reference(folder, texts)
    limit = TOLERANCE * np.abs(expected).max()
    np.testing.assert_allclose(hidden(opened("ort", spec), texts), expected, rtol=0, atol=limit)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("rectangle", [False, True])
def test_it_is_valid_onnx_of_a_few_kilobytes(family: str, rectangle: bool) -> None:
    graph = tiny.graph_of(family, rectangle)
    model = onnx.load_from_string(graph.body)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in graph.weights.items()
    )
    onnx.checker.check_model(model, full_check=True)
    assert len(graph.body) < 20_000


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_rectangle_gives_the_same(tmp_path: Path, family: str) -> None:
    """As others' ONNX files take it; what lies under padding is nobody's business."""
    import onnxruntime as ort

    folder = tiny.write_family(tmp_path, family)
    spec = read_spec(folder, pooling="mean")
    texts = texts_of(spec)
    from hybridtei.backends.graph_weights import graph_tensors
    from hybridtei.backends.onnx_writer import contents

    graph = family_graph(spec, rectangle=True)
    model = graph.body + contents(graph_tensors(graph, Weights.open(folder)))
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    ids = np.full(mask.shape, spec.padding_id, dtype=np.int64)
    ids[mask] = np.concatenate([text.input_ids for text in texts])
    feed = {"input_ids": ids, "attention_mask": mask.astype(np.int64)}
    if spec.has_token_types:
        feed["token_type_ids"] = np.zeros_like(ids)
    (states,) = ort.InferenceSession(model).run(["last_hidden_state"], feed)
    expected = reference(folder, texts)
    np.testing.assert_allclose(states[mask], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"hidden_act": "mish"}, "`hidden_act` is 'mish'"),
    ("bert", {"is_decoder": True}, "`is_decoder` is True"),
    ("bert", {"an_option_nobody_knows_yet": 1}, "`an_option_nobody_knows_yet` is 1"),
    ("deberta-v2", {"conv_kernel_size": 3}, "`conv_kernel_size` is 3"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "`rope_type` is 'dynamic'"),
    ("qwen3", {"rope_scaling": {"type": "longrope"}, "rope_parameters": ...}, "`rope_type` is 'longrope'"),
    ("mpnet", {"relative_attention_num_buckets": 8}, "`relative_attention_num_buckets` is 8"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` is 50.0"),
]


@pytest.mark.parametrize(("family", "changes", "why"), REFUSED)
def test_a_setting_that_is_not_known_is_refused_by_name(tmp_path: Path, family: str, changes: dict[str, Any], why: str) -> None:
    folder = tiny.write_family(tmp_path, family)
    tiny.edit_json(folder / "config.json", **changes)
    with pytest.raises(UnsupportedArchitecture, match=f"{folder}/config.json: {why}"):
        family_graph(read_spec(folder, pooling="mean"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_attention_heads": "4"}, "positive integer"),
        ({"layer_norm_eps": -1}, "positive number"),
        ({"hidden_size": True}, "positive integer"),
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(bert: Path, changes: dict[str, Any], why: str) -> None:
    spec = read_spec(bert)
    with pytest.raises(LoadError, match=f"`{next(iter(changes))}` is .*{why}"):
        family_graph(replace(spec, config={**spec.config, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention"]},
        {"layer_types": ["full_attention", "chunked_attention"]},
        {"layer_types": "full_attention"},
        {"rope_parameters": {"rope_type": "linear", "factor": None}},
        {"rope_parameters": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["qwen3", "modernbert", "gemma3_text"])
def test_nested_settings_of_another_form_are_refused(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = tiny.write_family(tmp_path, family)
    tiny.edit_json(folder / "config.json", **changes)
    with pytest.raises(LoadError, match=str(folder / "config.json")):
        family_graph(read_spec(folder, pooling="mean"))


def test_an_unknown_family_is_refused_by_name(bert: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match="no graph of `t5`"):
        family_graph(replace(read_spec(bert), model_type="t5"))


def test_every_family_has_a_checkpoint_here() -> None:
    assert set(FAMILIES) == set(tiny.FAMILIES)


Buckets = Callable[..., Any]


@pytest.mark.parametrize(("number", "furthest"), [(256, 512), (32, 128), (8, 128), (-1, 20)])
def test_debertas_buckets_are_transformers(number: int, furthest: int) -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    side = torch.zeros(1, 600, 1)
    span = number if number > 0 else furthest
    expected = build_relative_position(side, side, bucket_size=number, max_position=furthest)[0].numpy()
    ours = deberta_buckets(number, furthest, span, 600)
    distance = np.arange(600)[:, None] - np.arange(600)
    np.testing.assert_array_equal(ours[distance + 600], np.clip(expected + span, 0, 2 * span - 1))


@pytest.mark.parametrize("number", [32, 8, 64])
def test_mpnets_buckets_are_transformers(number: int) -> None:
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distance = torch.arange(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(distance, num_buckets=number).numpy()
    np.testing.assert_array_equal(mpnet_buckets(number, 600), expected)
