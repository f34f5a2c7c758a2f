"""The checks after a model is loaded."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from conformance.families.oracle import alone, difference, states_of, texts_of
from conformance.small import published, tiny, vocabulary
from conformance.small.tiny import change
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch
from hybridtei.inference import load
from hybridtei.inference.backends import select as backend_choice
from hybridtei.inference.backends.graph.onnx_backend import OnnxBackend
from hybridtei.inference.backends.torch import trunk
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.load import load_model
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.torch.test_trunk import LONG
from tests.ran import ran


def loaded(folder, **engine):
    return load_model(ModelConfig(model_id=str(folder), pooling="mean"), EngineConfig(**engine))


def test_the_self_test_has_a_short_text_and_a_long_one(bert, monkeypatch):
    lengths = []
    forward = OnnxBackend.forward

    def counted(backend, batch, *, use_all_cores=False):
        lengths.append(batch.lengths.tolist())
        return forward(backend, batch, use_all_cores=use_all_cores)

    def first(**engine):
        lengths.clear()
        loaded(bert, **engine)
        return lengths[0]

    monkeypatch.setattr(OnnxBackend, "forward", counted)
    assert first() == [min(load.GRAPH_TEST_TOKENS, vocabulary.LONGEST), 3]
    assert first(max_batch_tokens=10) == [10, 3]
    monkeypatch.setattr(load, "GRAPH_TEST_TOKENS", 20)
    assert first() == [20, 3]


def test_a_model_whose_texts_depend_on_their_neighbours_is_refused(tmp_path, monkeypatch):
    folder = tiny.write_family(tmp_path, "qwen2", rope_parameters=LONG)
    assert loaded(folder).model.spec.model_type == "qwen2"
    monkeypatch.setattr(trunk, "forget_lengths", lambda model: False)
    with pytest.raises(LoadError, match=f"{folder}: self-test"):
        loaded(folder)


def test_states_beyond_float16_are_refused_with_the_precision_that_holds_them(
    tmp_path,
):
    folder = change(
        tiny.write_family(tmp_path, "qwen3"),
        lambda tensors: {
            name: tensor * (200 if ".0.mlp." in name else 1) for name, tensor in tensors.items()
        },
    )
    model = load.text_model(read_spec(folder, pooling="lasttoken"), EngineConfig())
    ids = load._sample_ids(model, 64)
    assert len(set(ids.tolist())) > 10
    load._self_test(TorchBackend(model.spec, dtype="bfloat16"), ids)
    with pytest.raises(LoadError, match="infinite or NaN in float16; `--dtype bfloat16`"):
        load._self_test(TorchBackend(model.spec, dtype="float16"), ids)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("fnet", "lets a text see"),
        ("lilt", "needs more than the ids"),
        ("nystromformer", "needs more than the ids"),
    ],
)
def test_a_family_that_cannot_run_as_texts_come_is_refused_with_those_that_can(
    tmp_path, model_type, why
):
    folder = tiny.write_family(tmp_path, model_type)
    with pytest.raises(
        UnsupportedArchitecture,
        match=rf"{folder}/config.json: the family `{model_type}` {why}.*; supported: bert",
    ):
        loaded(folder)


@pytest.mark.parametrize("longest", [1, 2, 3])
def test_a_model_of_very_short_texts_loads(tmp_path, longest):
    folder = tiny.write_family(tmp_path, "bert", max_position_embeddings=longest)
    assert loaded(folder).model.reader.max_input_length == longest


# --- which backend


@pytest.fixture
def cache(cache, tmp_path, monkeypatch):
    """On a machine that has no NVIDIA device."""
    monkeypatch.setattr(backend_choice, "NVIDIA", tmp_path / "no-device")
    return cache


def backend_of(folder, **config):
    return load_model(ModelConfig(model_id=str(folder), **config), EngineConfig()).backend


def test_onnxruntime_runs_what_has_a_graph_and_torch_where_it_is_asked_for(bert, cache):
    assert isinstance(backend_of(bert), OnnxBackend)
    assert isinstance(backend_of(bert, backend="ort"), OnnxBackend)
    assert isinstance(backend_of(bert, backend="torch"), TorchBackend)


def test_bare_pickles_go_to_torch(folder, cache):
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (folder / "model.safetensors").unlink()
    assert isinstance(backend_of(folder), TorchBackend)
    with pytest.raises(
        LoadError,
        match=rf"{folder}: cannot run on ort: its weights .* were saved by torch before 1.6",
    ):
        backend_of(folder, backend="ort")


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("setting", "`chunk_size_feed_forward` is 1, which the family is not known to have"),
        ("bfloat16", "float32 and int8 only, not bfloat16"),
    ],
)
def test_what_onnxruntime_cannot_run_goes_to_torch_or_is_refused_with_the_reason(
    folder, cache, monkeypatch, case, why
):
    installed = backend_choice._installed
    monkeypatch.setattr(
        backend_choice, "_installed", lambda package: package != "openvino" and installed(package)
    )
    if case == "setting":
        tiny.configured(folder, chunk_size_feed_forward=1)
    config = {"dtype": case} if case == "bfloat16" else {}
    with pytest.raises(LoadError, match=rf"{folder}: cannot run on ort: .*{why}"):
        backend_of(folder, backend="ort", **config)
    backend = backend_of(folder, **config)
    assert isinstance(backend, TorchBackend)
    assert backend.dtype == config.get("dtype", "float32")


@pytest.mark.parametrize("backend", ["auto", "ort", "torch"])
@pytest.mark.parametrize("model_type", ["bert", "a-type-of-its-own"])
def test_a_publishers_own_code_is_refused_until_it_is_trusted(
    bert, copied, cache, backend, model_type
):
    folder = tiny.configured(
        published.add_own_code(copied(bert), AutoConfig="configuration_own.OwnConfig"),
        model_type=model_type,
    )
    with pytest.raises(
        LoadError,
        match=rf"{folder}/config.json: `auto_map` names `modeling_own.OwnModel`.*--trust-remote-code",
    ):
        backend_of(folder, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_trusted_code_computes_the_model(
    bert,
    copied,
    cache,
    backend,
    caplog,
    monkeypatch,
):
    from transformers import AutoModel, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache / "modules"))
    folder = published.add_own_code(copied(bert))
    oracle = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(oracle).__name__ == "OwnModel"
    found = backend_of(folder, backend=backend, trust_remote_code=True)
    texts = texts_of(found.spec)
    expected = np.concatenate(alone(oracle, texts))
    assert isinstance(found, TorchBackend)
    assert difference(states_of(found, texts), expected, texts).is_within
    assert f"{folder}: runs `modeling_own.OwnModel`" in caplog.text


def test_a_configuration_class_alone_changes_nothing(bert, copied, cache):
    folder = tiny.configured(copied(bert), auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    assert isinstance(backend_of(folder), OnnxBackend)


@pytest.mark.parametrize("backend", ["auto", "ort"])
def test_a_layer_too_many_is_another_model(bert, copied, cache, backend):
    first, another = "encoder.layer.0.", "encoder.layer.7."
    more = change(
        copied(bert),
        lambda tensors: (
            tensors
            | {another + key[len(first) :]: tensors[key].clone() for key in tensors if first in key}
        ),
    )
    with pytest.raises(
        WeightMismatch, match=rf"{more}: .*hold what config\.json does not.*{another}"
    ):
        backend_of(more, backend=backend)


def test_a_tensor_from_under_another_prefix_does_not_stand_in(bert, copied, cache):
    name = "embeddings.LayerNorm.weight"
    moved = change(
        copied(bert),
        lambda tensors: {
            (f"cls.{key}" if key == name else key): value for key, value in tensors.items()
        },
    )
    with pytest.raises(WeightMismatch, match=f"{moved}: .*several prefixes"):
        backend_of(moved, backend="ort")


# --- the embedded model

WITHOUT_TORCH = """
import sys
from hybridtei import Encoder
found = Encoder.load().encode(["hybrid search", "a wing in a slipstream"], ("dense", "sparse", "multivector", "tokens"))
assert all(getattr(found, name) is not None for name in ("dense", "sparse", "multivector", "tokens"))
print(sorted({"torch", "transformers", "scipy"} & set(sys.modules)))
"""


@pytest.mark.skipif(
    backend_choice.NVIDIA.exists(), reason="torch is chosen where there is an NVIDIA device"
)
def test_the_embedded_model_runs_without_importing_torch_or_scipy():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = ran([sys.executable, "-W", "error", "-c", WITHOUT_TORCH], env=environment)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_devices_memory_bounds_a_pass_whatever_was_configured(bert, monkeypatch):
    asked = []

    def room(_, limit, longest, fraction, sharing=1):
        asked.append((limit, longest, fraction))
        return 600

    monkeypatch.setattr("hybridtei.inference.backends.torch.backend.TorchBackend.max_tokens", room)
    engine = EngineConfig(max_batch_tokens=5000, memory_fraction=0.5)
    loaded = load_model(ModelConfig(model_id=str(bert), pooling="mean", backend="torch"), engine)
    assert asked == [(5000, loaded.model.reader.max_input_length, 0.5)]
    assert loaded.budget_tokens <= 600
