"""The server as a process: beside HTTP, several models, reflection, draining; and what keeps it
from starting."""

import itertools
import re
import signal
import socket
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from conformance.small import tiny
from hybridtei.config import EngineConfig, ServerConfig
from hybridtei.errors import LoadError
from hybridtei.server.grpc.server import REFLECTIONS
from hybridtei.server.start import serve
from tests.sampled import sampled
from tests.server.grpc.live import free_port, rpc_serving, start
from tests.server.live import HANG, commanded, process, until


def address_of(running):
    running.wait_ready()
    found = re.search(r"Starting gRPC server: (127\.0\.0\.1:\d+)", "".join(running.lines))
    assert found is not None, "".join(running.lines)
    return found[1]


@pytest.fixture(scope="module")
def ranker(tmp_path_factory):
    return tiny.write_classifier(tmp_path_factory.mktemp("ranker"), "bert")


def test_several_models_beside_http_and_reflection(hybrid, ranker):
    port = str(free_port())
    models = ["--model-id", str(hybrid), "--model-id", str(ranker)]
    with commanded(*models, "--grpc-port", port, "--api-key", "secret") as url:
        assert httpx.get(f"{url}/health").status_code == 200
        key = ("authorization", "Bearer secret")
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            # The first that can
            embedded, _ = start(channel, "Embed", {"inputs": "baka"}, metadata=[key])
            assert embedded.embeddings
            ranked, _ = start(
                channel, "Rerank", {"query": "baka", "texts": ["bulo", "bomo"]}, metadata=[key]
            )
            assert len(ranked.ranks) == 2
            named = [key, ("model", ranker.name)]
            assert start(channel, "Info", {}, metadata=named)[0].model_type == 2
            refused = {"embedding": [key, ("model", "nobody")], "reranker": named}
            for metadata, code in (
                (refused["embedding"], "NOT_FOUND"),
                (refused["reranker"], "FAILED_PRECONDITION"),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    start(channel, "Embed", {"inputs": "baka"}, metadata=metadata)
                assert caught.value.code().name == code
            check_reflection(channel)


def check_reflection(channel):
    """Without the key, and enough to build every message from."""
    database = ProtoReflectionDescriptorDatabase(channel)
    own = {f"tei.v1.{name}" for name in ("Info", "Embed", "Predict", "Rerank", "Tokenize")}
    assert {*database.get_services()} == {*own, "grpc.health.v1.Health", *REFLECTIONS}
    pool = DescriptorPool(database)
    embed = pool.FindServiceByName("tei.v1.Embed").methods_by_name["EmbedStream"]
    assert embed.client_streaming
    assert embed.server_streaming
    assert embed.input_type.fields_by_name["normalize"].has_presence
    assert (
        pool.FindMessageTypeByName("tei.v1.RerankResponse")
        .fields_by_name["ranks"]
        .message_type.name
        == "Rank"
    )
    assert pool.FindServiceByName("grpc.health.v1.Health").methods_by_name.keys() == [
        "Check",
        "List",
        "Watch",
    ]
    for name in REFLECTIONS:
        asked = pool.FindServiceByName(name).methods_by_name["ServerReflectionInfo"].input_type
        assert asked.full_name == name.replace("ServerReflection", "ServerReflectionRequest")


def fake(folder, seconds, *settings):
    return [
        "-m",
        "tests.server.processes.fake_process",
        str(folder),
        seconds,
        "grpc_port=0",
        *settings,
    ]


@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_a_signal_lets_open_calls_finish_and_the_status_is_0(hybrid, number):
    with process(fake(hybrid, "0.2")) as running, ThreadPoolExecutor(4) as pool:
        address = address_of(running)
        with grpc.insecure_channel(address) as channel:
            texts = [{"inputs": f"baka {place}"} for place in range(4)]
            singles = [pool.submit(start, channel, "Embed", text) for text in texts[:3]]
            stream = pool.submit(lambda: [*start(channel, "EmbedStream", texts)])
            url = running.wait_ready()
            while "te_embed_count 7" not in httpx.get(f"{url}/metrics").text:
                pass
            running.process.send_signal(number)
            assert all(single.result(HANG)[0].embeddings for single in singles)
            assert len(stream.result(HANG)) == 4
            assert running.wait() == 0
            with pytest.raises(grpc.RpcError) as caught:
                start(channel, "Embed", texts[0])
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert running.errors == []


def test_open_calls_whose_clients_say_nothing_do_not_keep_it_alive(hybrid):
    ended = threading.Event()

    def silent(*said):
        yield from said
        ended.wait(HANG)

    with (
        process(fake(hybrid, "0", "drain_seconds=3600")) as running,
        grpc.insecure_channel(address_of(running)) as channel,
    ):
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        calls = [
            start(channel, "EmbedStream", silent({"inputs": "baka"})),
            reflection(silent(reflection_pb2.ServerReflectionRequest(list_services=""))),
        ]
        assert all(next(call) for call in calls)
        calls.append(channel.stream_stream("/tei.v1.Embed/Embed")(silent()))
        running.terminate()
        try:
            assert running.wait() == 0
        finally:
            ended.set()
        for call in calls:
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "Traceback" not in "".join([*running.lines, *running.errors])


def test_a_second_interrupt_ends_the_wait(hybrid):
    with process(fake(hybrid, "0", "drain_seconds=3600")) as running:
        address = address_of(running)
        with grpc.insecure_channel(address) as channel, ThreadPoolExecutor(1) as pool:
            answers = start(channel, "EmbedStream", itertools.repeat({"inputs": "baka"}))
            assert next(answers).embeddings
            reading = pool.submit(deque, answers, maxlen=0)
            running.process.send_signal(signal.SIGINT)
            # It drains
            until(lambda: refused(channel))
            running.process.send_signal(signal.SIGINT)
            # How uvicorn breaks off the application is in the log
            assert running.wait() == 0
            assert isinstance(reading.exception(HANG), grpc.RpcError)


def refused(channel):
    try:
        start(channel, "Info", {})
    except grpc.RpcError:
        return True
    return False


def test_a_port_that_is_taken(hybrid, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with commanded("--model-id", str(hybrid), "--grpc-port", str(port)) as url:
            # It does not start
            assert url == ""
        told = capsys.readouterr().err
        assert f"Error: cannot listen on 127.0.0.1:{port} (gRPC)\n" in told
        assert "Traceback" not in told


def test_two_servers_share_a_port_if_they_are_told_to():
    shared = {"grpc_port": free_port(), "reuse_port": True}
    with rpc_serving(server=shared) as first, rpc_serving(server=shared) as second:
        assert [rpc.running.get("/health").status_code for rpc in (first, second)] == [200, 200]
        assert second.ask("Info", {})


def test_a_missing_extra_is_named_before_anything_is_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "hybridtei.server.grpc.server", raising=False)
    monkeypatch.setitem(sys.modules, "grpc", None)
    with pytest.raises(LoadError, match=re.escape("pip install 'hybridtei[grpc]'")):
        serve([], EngineConfig(), ServerConfig(grpc_port=0))
