"""The Serve application on a cluster of two: one server's answers, whichever replica gives them, and whichever dies."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import yaml

from hybridtei.encoder import Encoder
from hybridtei.errors import InvalidInput
from hybridtei.on_ray import application
from hybridtei.on_ray.cluster import configs_from
from tests.on_ray.processes import named

ROOT = Path(__file__).parents[2]
HANG = 120
TEXTS = [f"a wing of {i} feet in a slipstream" for i in range(24)]
REPLICA = "ServeReplica"


@pytest.fixture(scope="module")
def address(cluster) -> Iterator[str]:
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def deployed(**settings) -> None:
    from ray import serve

    serve.run(application(settings), name="hybridtei", route_prefix="/")


def replicas() -> int:
    """That run now."""
    from ray import serve

    (deployment,) = serve.status().applications["hybridtei"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


def until(true, seconds: float = HANG) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_two_replicas_answer_as_one_and_a_killed_one_is_missed_by_nobody_for_long(address):
    deployed(min_replicas=2, max_replicas=2)
    expected = Encoder.load().encode(TEXTS).dense
    with httpx.Client(base_url=address, timeout=HANG) as client, ThreadPoolExecutor(8) as threads:

        def asked(i: int) -> httpx.Response:
            return client.post("/embed", json={"inputs": TEXTS[i]})

        for i, answer in enumerate(threads.map(asked, range(len(TEXTS)))):
            assert answer.status_code == 200
            assert np.allclose(answer.json()[0], expected[i], atol=1e-5)
        wrong = client.post("/embed", json={"inputs": ""})
        assert (wrong.status_code, wrong.json()["error_type"]) == (400, "Empty")
        before = named(REPLICA)
        assert len(before) == 2
        pending = [threads.submit(asked, i % len(TEXTS)) for i in range(200)]
        next(iter(before.values())).kill()
        answers = [one.result(HANG) for one in pending]
        assert {answer.status_code for answer in answers} <= {200, 500, 502, 503}, "none hangs, and none is answered wrongly"
        for i, answer in enumerate(answers):
            if answer.status_code != 200:
                until(lambda i=i: asked(i % len(TEXTS)).status_code == 200)
            else:
                assert np.allclose(answer.json()[0], expected[i % len(TEXTS)], atol=1e-5)
    until(lambda: replicas() == 2)
    assert named(REPLICA).keys() != before.keys()


@pytest.mark.slow
def test_waiting_tokens_call_for_another_replica(address):
    deployed(min_replicas=1, max_replicas=2, tokens_per_replica=100, upscale_delay_s=0, downscale_delay_s=0)
    until(lambda: replicas() == 1)
    enough = threading.Event()
    long = ["a boundary layer on a flat plate " * 30] * 32

    def pour(client: httpx.Client) -> None:
        while not enough.is_set():
            assert client.post("/embed", json={"inputs": long}).status_code in (200, 429)

    with httpx.Client(base_url=address, timeout=HANG) as client, ThreadPoolExecutor(4) as threads:
        pouring = [threads.submit(pour, client) for _ in range(4)]
        try:
            until(lambda: replicas() == 2)
        finally:
            enough.set()
        for one in pouring:
            one.result(HANG)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"modelid": "x"}, "`modelid` is no setting"),
        ({"port": 80}, "`port` is for Ray Serve to decide"),
        ({"max_replicas": 0}, r"max_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "`min_replicas` is 3, should be at most `max_replicas`, 2"),
        ({"max_batch_tokens": "many"}, "max_batch_tokens"),
    ],
)
def test_settings_that_cannot_be(settings, why):
    with pytest.raises(InvalidInput, match=why):
        configs_from(settings)


def test_the_example_is_what_serve_and_we_take():
    text = (ROOT / "deploy/ray/serve.yaml").read_text()
    schema = pytest.importorskip("ray.serve.schema", reason="the extra `ray` is not installed")
    told = schema.ServeDeploySchema.model_validate(yaml.safe_load(text))
    (only,) = told.applications
    model, engine, _, scale = configs_from(only.args)
    assert (only.import_path, model.model_id) == ("hybridtei.on_ray:application", "minilm-hybrid")
    assert (engine.max_concurrent_requests, scale.max_replicas, scale.processors) == (512, 8, 4)
