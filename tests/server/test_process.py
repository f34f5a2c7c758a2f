"""Worker processes over one engine: the same answers, one house, one account; and who dies, is told to go, or is left alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hybridtei.backends.fake import FakeBackend
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.engine.service import EngineService
from hybridtei.load import LoadedModel, find_model, text_reader
from hybridtei.observability.metrics import Registry
from hybridtei.server import run, start
from hybridtei.server import supervisor as workers
from hybridtei.server.http.connection import bound
from hybridtei.server.start import http_processes
from hybridtei.tasks.base import Model
from tests.engine import small
from tests.rpc.live import free_port
from tests.sampled import sampled
from tests.server.live import HANG, Process, process
from tests.vocabulary import texts

POISON, MURDER = "duti", "dura"  # see `fake_workers`
FAKE = ["-m", "tests.server.fake_workers"]
WEB = httpx.Client(  # A connection a request, so any worker may get it. `max_keepalive_connections=0` would give that too, but
    # httpcore's pool then closes a connection that another thread has just been given.
    timeout=HANG,
    trust_env=False,
    verify=False,
    limits=httpx.Limits(max_connections=None),
    headers={"Connection": "close"},
)
DEEDS = (POISON, MURDER)
HARMLESS = [text for text in texts(400, most=40) if not any(deed in text for deed in DEEDS)]
FORMS: tuple[Callable[[list[str]], tuple[str, Any]], ...] = (
    lambda given: ("/embed", {"inputs": given[0]}),
    lambda given: ("/embed_hybrid", {"inputs": given, "outputs": ["dense", "sparse", "multivector"]}),
    lambda given: ("/embed_sparse", {"inputs": given}),
    lambda given: ("/embed_multivector", {"inputs": given[:2]}),
    lambda given: ("/v1/embeddings", {"input": given, "dimensions": 4}),
    lambda given: ("/embed_all", {"inputs": given[0]}),
    lambda given: ("/tokenize", {"inputs": given[0]}),
    lambda given: ("/embed", {"inputs": ["", *given]}),
)


def workers_of(running: Process) -> list[int]:
    return sorted(child.pid for child in psutil.Process(running.process.pid).children())


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def counted(url: str, name: str) -> float:
    """Sum over the labels, told by whichever worker is asked."""
    lines = WEB.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}[ {{]", line))


@pytest.fixture(scope="module")
def quick(hybrid: Path) -> Iterator[tuple[Process, str]]:
    with process([*FAKE, str(hybrid), "0", "2"]) as running:
        yield running, running.wait_ready()


def test_answers_are_those_of_one_process(quick, hybrid):
    requests = [FORMS[i % len(FORMS)](HARMLESS[i : i + 1 + i % 3]) for i in range(200)]

    def ask(url: str) -> list[tuple[int, bytes]]:
        def post(request: tuple[str, Any]) -> tuple[int, bytes]:
            answer = WEB.post(url + request[0], json=request[1])
            return answer.status_code, answer.content

        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(post, requests))

    _, url = quick
    before = counted(url, "te_request_success")
    found = ask(url)
    with process([*FAKE, str(hybrid), "0", "0"]) as alone:
        assert found == ask(alone.wait_ready())
    assert {status for status, _ in found} == {200, 400}
    assert (
        counted(url, "te_request_success") - before == sum(status == 200 for status, _ in found) - 25
    )  # /tokenize is not counted


def test_metrics_are_teis_and_the_same_from_every_worker(quick):
    _, url = quick
    for _ in range(4):
        WEB.post(f"{url}/embed", json={"inputs": HARMLESS[0]})
    seen = {WEB.get(f"{url}/metrics").text for _ in range(12)}
    assert len(seen) == 1
    names = re.findall(r"# TYPE (\w+) (\w+)", seen.pop())
    assert len({name for name, _ in names}) == len(names)
    kinds = [kind for _, kind in names]
    assert kinds == sorted(kinds)  # counter, gauge, histogram
    assert counted(url, "te_request_input_length_count") == counted(url, "te_embed_success")


def test_a_failed_pass_is_told_as_ever(quick):
    _, url = quick
    answer = WEB.post(f"{url}/embed", json={"inputs": POISON})
    assert (answer.status_code, answer.json()["error_type"]) == (424, "Backend")
    assert answer.json()["error"].startswith("Backend error: the batch holds the id ")
    assert WEB.get(f"{url}/health").status_code == 200  # a probe decides
    assert WEB.get(f"{url}/info").json()["hybridtei"]["backend"] == "fake"


def test_workers_load_no_engine(quick):
    running, _ = quick
    for pid in workers_of(running):
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert not re.search(r"torch|onnxruntime|openvino", maps)


def test_a_killed_worker_is_replaced_and_counts_do_not_fall(quick):
    running, url = quick
    requests = counted(url, "te_request_count")
    for text in HARMLESS[:20]:
        assert WEB.post(f"{url}/embed", json={"inputs": text}).status_code == 200
    until(lambda: counted(url, "te_request_count") >= requests + 20)  # the last word of a worker is at most a second old
    before, (first, second) = counted(url, "te_request_count"), workers_of(running)
    os.kill(first, signal.SIGKILL)
    until(lambda: any(f"HTTP worker {first} ended with status -9" in line for line in running.lines))
    for text in HARMLESS[:20]:
        assert WEB.post(f"{url}/embed", json={"inputs": text}).status_code == 200
    until(lambda: len(workers_of(running)) == 2 and first not in workers_of(running))
    assert second in workers_of(running)
    until(lambda: counted(url, "te_request_count") == before + 20)
    os.kill(workers_of(running)[0], signal.SIGTERM)  # whoever is sent away is replaced too
    until(lambda: any("ended with status 0" in line for line in running.lines))
    assert WEB.post(f"{url}/embed", json={"inputs": HARMLESS[0]}).status_code == 200
    assert running.errors == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_one_house_for_all_then_who_leaves_then_an_orderly_end(hybrid, tmp_path, number):
    hold = tmp_path / "hold"  # while it is there, passes wait
    hold.touch()
    command = [*FAKE, str(hybrid), str(hold), "2", "max_concurrent_requests=10"]
    with process(command) as running, ThreadPoolExecutor(16) as pool:
        url = running.wait_ready()

        def post(i: int) -> int:
            return WEB.post(f"{url}/embed", json={"inputs": HARMLESS[4 * i : 4 * i + 4]}).status_code

        asked = [pool.submit(post, i) for i in range(12)]
        until(lambda: sum(one.done() for one in asked) == 10)
        assert {one.result() for one in asked if one.done()} == {429}
        hold.unlink()
        assert sorted(one.result() for one in asked) == [200] * 2 + [429] * 10
        hold.touch()
        begun, passes = counted(url, "te_embed_count"), counted(url, "hybridtei_forward_passes_total")
        with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=HANG) as leaving:
            body = json.dumps({"inputs": HARMLESS[80:84]}).encode()
            head = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            leaving.sendall(head % len(body) + body)
            until(lambda: counted(url, "hybridtei_forward_passes_total") > passes)  # the engine has it
        until(lambda: counted(url, "hybridtei_dropped_requests_total") == 1)
        hold.unlink()
        until(lambda: counted(url, "te_queue_size") == 0)
        hold.touch()
        waiting = [pool.submit(post, i) for i in (0, 1)]
        until(lambda: counted(url, "te_embed_count") == begun + 12)
        if number == signal.SIGINT:  # as a terminal does
            for pid in workers_of(running):
                os.kill(pid, number)
        running.process.send_signal(number)
        hold.unlink()
        assert [one.result() for one in waiting] == [200] * 2
        assert running.wait() == 0
        with pytest.raises(httpx.ConnectError):
            WEB.get(f"{url}/health")
        assert running.errors == []


@pytest.mark.parametrize("count", sampled(["0", "1", "2"], ["0"]))
def test_a_dead_engine_ends_all(hybrid, count):
    with process([*FAKE, str(hybrid), "0", count]) as running:
        url, workers = running.wait_ready(), workers_of(running)
        answer = WEB.post(f"{url}/embed", json={"inputs": MURDER})
        assert (answer.status_code, answer.json()["error"]) == (424, "Backend error: the engine stopped: murder")
        assert running.wait() == 1
        assert running.errors[0] == "Error: the engine stopped: murder\n"
        assert not any(psutil.pid_exists(pid) for pid in workers)


@pytest.mark.slow
@pytest.mark.parametrize("count", ["0", "2"])
def test_a_pass_that_does_not_end_does_not_keep_it_alive(hybrid, count):
    with process([*FAKE, str(hybrid), "3600", count, "drain_seconds=0"]) as running, ThreadPoolExecutor(1) as pool:
        url = running.wait_ready()
        stuck = pool.submit(WEB.post, f"{url}/embed", json={"inputs": HARMLESS[0]})
        until(lambda: counted(url, "hybridtei_forward_passes_total") == 1)
        running.terminate()
        assert running.wait() == 0
        assert isinstance(stuck.exception(HANG), httpx.TransportError)


def test_a_worker_that_lost_its_way_to_the_engine_is_replaced(hybrid):
    model = ModelConfig(model_id=str(hybrid))
    engine, server = EngineConfig(), ServerConfig(hostname="127.0.0.1", port=0, http_workers=1)
    spec, registry = find_model(model), Registry()
    backend = FakeBackend(spec)
    service = EngineService(Model(spec, text_reader(spec, engine)), backend, engine, budget_tokens=32, registry=registry)

    async def scene(listening: socket.socket) -> None:
        supervisor = workers.Supervisor(service, server, model, registry, listening, metrics_port=None)
        running = asyncio.create_task(supervisor.run())
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        async def serving() -> workers._Worker:
            while not (supervisor._workers and supervisor._workers[0].serving):
                assert not running.done()
                await asyncio.sleep(0.01)
            return supervisor._workers[0]

        first = await serving()
        async with httpx.AsyncClient(timeout=HANG, trust_env=False) as client:
            assert (await client.post(f"{url}/embed", json={"inputs": HARMLESS[0]})).status_code == 200
            first.engine_server.close()
            await asyncio.wait_for(first.gone.wait(), HANG)
            while await serving() is first:
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(timeout=HANG, trust_env=False) as client:
            assert (await client.post(f"{url}/embed", json={"inputs": HARMLESS[0]})).status_code == 200
        supervisor._on_signal(signal.SIGTERM)
        await running

    with bound("127.0.0.1", 0) as listening:
        asyncio.run(asyncio.wait_for(scene(listening), HANG))


def test_passes_end_while_http_stands_still(hybrid, tmp_path):
    """The engine's process waits for nothing that the process of HTTP does, not even for its interpreter's lock."""
    hold, metrics = tmp_path / "hold", free_port()
    hold.touch()
    with process([*FAKE, str(hybrid), str(hold), "1", f"prometheus_port={metrics}"]) as running, ThreadPoolExecutor(8) as pool:
        url = running.wait_ready()
        waiting = [pool.submit(WEB.post, f"{url}/embed", json={"inputs": text}) for text in HARMLESS[:8]]
        until(lambda: counted(url, "te_queue_size") + counted(url, "te_batch_next_size_sum") == 8)
        http = psutil.Process(*workers_of(running))
        http.suspend()
        hold.unlink()
        until(lambda: counted(f"http://127.0.0.1:{metrics}", "te_batch_next_size_sum") == 8)
        until(lambda: counted(f"http://127.0.0.1:{metrics}", "hybridtei_running_batches") == 0)
        assert not any(future.done() for future in waiting)
        http.resume()
        assert [future.result(HANG).status_code for future in waiting] == [200] * 8


@pytest.mark.parametrize(
    ("ahead", "settings", "has_store", "processes"),
    [
        (1, {}, False, 1),  # a GPU's backend
        (0, {}, False, 0),
        (1, {"http_workers": 0}, False, 0),
        (0, {"http_workers": 3}, False, 3),
        (1, {"grpc_port": 0}, False, 0),
        (1, {}, True, 0),
    ],
)
def test_where_passes_are_launched_from_python_http_has_a_process_of_its_own(ahead, settings, has_store, processes):
    backend = FakeBackend(small.model_spec())
    backend.ahead = ahead
    assert http_processes(ServerConfig(**settings), backend, has_store=has_store) == processes


@pytest.mark.parametrize(("ahead", "fixed", "permits"), [(1, False, 2048), (1, True, 512), (0, False, 512)])
def test_permits_that_nobody_set_fill_the_passes_of_a_gpu(monkeypatch, ahead, fixed, permits):
    """From the loaded model to the service; nothing listens."""
    backend, served = FakeBackend(small.model_spec()), []
    backend.ahead = ahead
    monkeypatch.setattr(start, "load_model", lambda *_: LoadedModel(small.model(), backend, 16384))
    monkeypatch.setattr(run, "run_server", lambda app, _: served.append(app.state.models.default.service))
    start.serve_one(ModelConfig(), EngineConfig(), ServerConfig(port=0, http_workers=0), fixed_permits=fixed)
    (service,) = served
    assert service.admission.permits == service.config.max_concurrent_requests == permits


def test_workers_do_not_outlive_the_engine(hybrid):
    with process([*FAKE, str(hybrid), "0", "2"]) as running:
        url, workers = running.wait_ready(), workers_of(running)
        running.process.kill()
        until(lambda: not any(psutil.pid_exists(pid) for pid in workers))
        with pytest.raises(httpx.ConnectError):
            WEB.get(f"{url}/health")


def test_a_port_that_is_taken_is_refused(quick, hybrid):
    _, url = quick
    port = httpx.URL(url).port
    with process([*FAKE, str(hybrid), "0", "2", f"port={port}"]) as second:
        assert second.wait() == 1
        assert second.errors == [f"Error: cannot listen on 127.0.0.1:{port}: Address already in use\n"]
