"""The answers of TEI's gRPC build, compared with ours."""

import importlib
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.grpc.live import free_port
from tests.server.live import commanded

GOLDEN = Path(__file__).parents[4] / "shared" / "golden"
grpc_replay = importlib.import_module("conformance.wire.grpc_replay")


@contextmanager
def in_a_thread(model, flags):
    port = free_port()
    with commanded("--model-id", str(model), "--grpc-port", str(port), *flags):
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize("profile", sorted(grpc_replay.PROFILES))
@pytest.mark.parametrize(
    "serve", [in_a_thread, pytest.param(grpc_replay.server, marks=pytest.mark.slow)]
)
def test_every_recorded_call_is_answered_as_recorded(profile, serve):
    if not (GOLDEN / "grpc.json").exists():
        pytest.skip("the recorded calls lie in ../shared/golden, which this checkout lacks")
    total, differences = grpc_replay.replay(GOLDEN, profile, serve)
    assert differences == []
    assert total > 0


def test_the_comparison_sees_differences():
    differ = grpc_replay.differ
    assert differ({"a": [1.0, {"b": "x"}]}, {"a": [1.001, {"b": "x"}]}, "") is None
    for got in (
        {"a": [1.01, {"b": "x"}]},
        {"a": [1.0, {"b": "y"}]},
        {"a": [1.0]},
        {},
        {"a": [1.0, {"b": "x", "c": 1}]},
    ):
        assert differ(got, {"a": [1.0, {"b": "x"}]}, "") is not None
    entry = {"index": 3, "value": 0.5}
    assert differ([entry, {"index": 4, "value": 0.001}], [entry], "") is None
    assert differ([{"index": 4, "value": 0.1}, entry], [entry], "") is not None
    assert differ("12", "any", "") is None
    assert differ("-1", "any", "") is not None
