"""`grpc.health.v1` as its own client sees it."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hybridtei.server.grpc import server
from tests.inference.engine import small
from tests.server.grpc.live import rpc_serving
from tests.server.live import HANG

SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
NAMES = ("Info", "Tokenize", "Embed", "Predict", "Rerank")


def check(rpc, name):
    asked = health_pb2.HealthCheckRequest(service=name)
    return health_pb2_grpc.HealthStub(rpc.channel).Check(asked, timeout=HANG).status


@pytest.mark.parametrize(
    ("kind", "serving"),
    [
        ("dense_rpc", {"Embed"}),
        ("splade_rpc", {"Embed"}),
        # It ranks by its vectors
        ("rpc", {"Embed", "Rerank"}),
        ("classifier_rpc", {"Predict"}),
        ("ranker_rpc", {"Predict", "Rerank"}),
    ],
)
def test_what_fits_the_model_serves(kind, serving, request):
    rpc = request.getfixturevalue(kind)
    assert {name for name in NAMES if check(rpc, f"tei.v1.{name}") == SERVING} == {
        "Info",
        "Tokenize",
        *serving,
    }
    assert check(rpc, "") == SERVING


def test_all_at_once(ranker_rpc):
    told = (
        health_pb2_grpc.HealthStub(ranker_rpc.channel)
        .List(health_pb2.HealthListRequest(), timeout=HANG)
        .statuses
    )
    assert {name: answer.status for name, answer in told.items()} == {
        name: check(ranker_rpc, name) for name in server.FITS
    }


def test_a_name_nobody_has(rpc):
    with pytest.raises(grpc.RpcError) as caught:
        check(rpc, "tei.v1.Other")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    stub = health_pb2_grpc.HealthStub(rpc.channel)
    watching = stub.Watch(health_pb2.HealthCheckRequest(service="tei.v1.Other"), timeout=HANG)
    assert next(watching).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watching.cancel()


def test_it_needs_no_key_and_follows_the_engine_and_who_watches_is_told(monkeypatch):
    monkeypatch.setattr(server, "HEALTH_SECONDS", 0.01)
    gate = {"broken": False}

    def fail(_):
        if gate["broken"]:
            raise ValueError("broken")

    with rpc_serving(small.dense_only(), server={"api_key": "secret"}, gate=fail) as rpc:
        key = (("authorization", "Bearer secret"),)
        # Which outlives the server
        channel = grpc.insecure_channel(rpc.address)
        watching = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="tei.v1.Embed")
        )
        assert next(watching).status == SERVING
        gate["broken"] = True
        assert rpc.refusal("Embed", {"inputs": "one"}, metadata=key)[0] == "FAILED_PRECONDITION"
        assert next(watching).status == NOT_SERVING
        assert check(rpc, "tei.v1.Embed") == NOT_SERVING
        assert check(rpc, "tei.v1.Tokenize") == SERVING
        gate["broken"] = False
        assert next(watching).status == SERVING
    assert next(watching).status == NOT_SERVING
    # And that ends it: the server did not wait for it to leave
    with pytest.raises(grpc.RpcError) as caught:
        next(watching)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    channel.close()
