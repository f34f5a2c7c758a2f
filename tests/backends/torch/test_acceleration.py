"""Whether, when and for whom: from the settings to the backend, and what memory allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hybridtei.backends.base import Accelerated, Replicas
from hybridtei.backends.select import open_backend
from hybridtei.backends.torch.acceleration import PROBES, AccelerationOptions, probes
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.backends.torch.cuda_graphs import BYTES_OF_RECORDING, FORMS, TOKENS
from hybridtei.checkpoint.spec import read_spec
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.load import load_model
from tests import tiny
from tests.backends.torch.test_cuda_graphs import Player


def test_settings_reach_the_backend(bert: Path) -> None:
    config = ModelConfig(model_id=str(bert), backend="torch", dtype="float32", cuda_graphs=True, torch_compile="true")
    backend = open_backend(config, read_spec(bert))
    assert isinstance(backend, TorchBackend)
    assert backend.faster.options == AccelerationOptions(graphs=True, compiled="true")
    usual = open_backend(ModelConfig(model_id=str(bert), backend="torch"), read_spec(bert))
    assert isinstance(usual, TorchBackend)
    assert usual.faster.options == AccelerationOptions(graphs=False, compiled="auto")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_on_a_cpu_the_usual_settings_change_nothing(bert: Path) -> None:
    loaded = load_model(ModelConfig(model_id=str(bert), backend="torch"), EngineConfig(max_batch_tokens=256))
    assert isinstance(loaded.backend, TorchBackend)
    assert loaded.backend.faster.graphs is None
    assert loaded.backend.trunk.instead is None
    loaded.backend.close()


def test_a_loaded_model_is_accelerated_and_not_before(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    monkeypatch.setattr(TorchBackend, "accelerate", lambda backend: passes.append(backend.forwards))
    loaded = load_model(ModelConfig(model_id=str(bert), backend="torch"), EngineConfig(max_batch_tokens=256))
    assert passes == [loaded.backend.forwards]
    assert passes[0] > 0


def test_each_replica_is_accelerated(bert: Path) -> None:
    spec, player = read_spec(bert), Player()
    replicas = Replicas([TorchBackend(spec, acceleration=AccelerationOptions(graphs=True, recorder=player)) for _ in range(2)])
    assert isinstance(replicas, Accelerated)
    replicas.accelerate()
    assert all(replica.backend.faster.graphs is not None for replica in replicas.replicas)
    replicas.close()


def test_recordings_are_counted_and_left_out_where_they_are_too_much(bert: Path) -> None:
    lists = len(TOKENS) * len(FORMS) * BYTES_OF_RECORDING

    def reserved(allowed: int, peak: int | None) -> tuple[int, bool]:
        backend = TorchBackend(read_spec(bert), acceleration=AccelerationOptions(graphs=True, recorder=Player()))
        taken = backend.faster.reserved(allowed, lambda tokens: peak)
        backend.accelerate()
        return taken, backend.faster.graphs is not None

    assert reserved(8 * lists, lists) == (2 * lists, True)
    assert reserved(8 * lists - 1, lists) == (0, False)
    assert reserved(8 * lists, None) == (0, False)


def test_probes_keep_a_models_limit_and_differ(tmp_path: Path) -> None:
    backend = TorchBackend(read_spec(tiny.write_family(tmp_path, "roberta"), pooling="mean"))
    made = probes(backend.spec)
    assert len(made) == len(PROBES)
    for probe in made:
        assert probe.max_seqlen <= backend.spec.max_input_length
        assert backend.trunk.run(backend.trunk.place(probe), backend.trunk.layout(probe)).isfinite().all()
    assert len({len(probe.input_ids) for probe in made}) == len(made)
