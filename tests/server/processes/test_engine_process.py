"""The engine in a process of its own: the same answers, and an end that costs requests in flight
one error."""

import asyncio
import json
import os
import signal
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from multiprocessing import Pipe
from pathlib import Path
from threading import Event, Thread

import httpx
import numpy as np
import psutil
import pytest

from conformance.small.vocabulary import texts
from hybridtei.batch import Head
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.errors import BackendError, LoadError, Unhealthy
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.tasks.embed import Embed
from hybridtei.outputs import HeadOutputs
from hybridtei.server import engine_process
from hybridtei.server.engine_process import IN_BAND, EngineProcess, receive, send
from tests.server.live import HANG, process, until

SERVE = ["-m", "hybridtei", "serve", "--hostname", "127.0.0.1", "--port", "0", "--offline"]
WEB = httpx.Client(timeout=HANG, trust_env=False, headers={"Connection": "close"})
# See `fake_child`
LINES = [
    text
    for text in texts(80, most=40)
    if not any(word in text for word in ("duti", "dura", "dato"))
]
MEGABYTES = 32


def test_a_result_is_copied_once_into_the_memory_that_receives_it():
    here, there = Pipe()
    dense = np.random.default_rng(0).standard_normal((MEGABYTES * 1024, 256)).astype(np.float32)
    sending = Thread(
        target=send, args=(there, [HeadOutputs(dense=dense), HeadOutputs(scores=dense[:2])])
    )
    tracemalloc.start()
    sending.start()
    large, small = receive(here)
    sending.join()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(large.dense, dense)
    assert np.array_equal(small.scores, dense[:2])
    assert dense[:2].nbytes < IN_BAND
    # Nothing at the sender, and once at the receiver, which grows by an eighth at a time
    assert most < 1.3 * dense.nbytes


@asynccontextmanager
async def engine(monkeypatch, folder, idle_s=0):
    monkeypatch.setattr(engine_process, "MODULE", "tests.server.processes.fake_child")
    monkeypatch.setattr(engine_process, "RETRY_SECONDS", 0.0)
    config = EngineConfig()
    running = EngineProcess(config, {"json_output": False, "level": "off"}, idle_s)
    try:
        loaded, remote = running.load(ModelConfig(model_id=str(folder)))
        service = EngineService(
            loaded.model, loaded.backend, config, budget_tokens=loaded.budget_tokens, engine=remote
        )
        await service.start()
        yield running, service
        await service.stop(1)
    finally:
        await asyncio.to_thread(running.close)


def embedded(text):
    return Embed([text], frozenset({Head.DENSE}))


async def again(service):
    """An answer, once the process is there again."""
    while True:
        try:
            return (await service.run(embedded("baka"))).answer
        except Unhealthy:
            await asyncio.sleep(0.01)


async def test_errors_of_the_engine_and_of_its_end(hybrid, monkeypatch):
    async with engine(monkeypatch, hybrid) as (running, service):
        first = (await service.run(embedded("baka"))).answer
        with pytest.raises(BackendError, match="the batch holds the id"):
            await service.run(embedded("duti"))
        # A probe decides
        await service.check_health()
        leaving = asyncio.create_task(service.run(embedded("dato")))
        await asyncio.sleep(0.05)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(BackendError, match="the engine stopped: murder"):
            await service.run(embedded("dura"))
        # Of another process
        assert np.array_equal((await again(service)).dense, first.dense)
        waiting = asyncio.create_task(service.run(embedded("dato")))
        await asyncio.sleep(0.05)
        running._child.process.kill()
        with pytest.raises(
            Unhealthy, match=r"ended \(SIGKILL\) and is started again: send the request again"
        ):
            await waiting
        with pytest.raises(Unhealthy, match="SIGKILL"):
            await service.check_health()
        await again(service)
        await service.check_health()


async def test_messages_larger_than_any_buffer(hybrid, monkeypatch):
    async with engine(monkeypatch, hybrid) as (_, service):
        many = Embed(
            [" ".join(LINES[i : i + 40]) for i in range(20)] * 25, service.model.spec.heads
        )
        large, small = await asyncio.gather(service.run(many), service.run(embedded("baka")))
        # Bytes of its ids; a socket holds less
        assert sum(large.lengths) * 8 > 2**18
        assert large.answer.numbers * 4 > 2**20
        assert np.array_equal(large.answer.dense[:20], large.answer.dense[-20:])
        assert np.array_equal(
            small.answer.dense, (await service.run(embedded("baka"))).answer.dense
        )


async def test_a_process_that_stands_still_is_not_healthy_and_can_be_ended(hybrid, monkeypatch):
    async with engine(monkeypatch, hybrid) as (running, service):
        monkeypatch.setattr(engine_process, "GRACE_SECONDS", 0.2)
        running._child.process.send_signal(signal.SIGSTOP)
        with pytest.raises(Unhealthy, match="does not answer"):
            await service.check_health()


async def resting(running):
    while running.loaded.is_set() or running._child is not None:
        await asyncio.sleep(0.01)


async def test_an_idle_process_ends_and_the_next_requests_wait_for_another(hybrid, monkeypatch):
    async with engine(monkeypatch, hybrid, idle_s=0.2) as (running, service):
        first = (await service.run(embedded("baka"))).answer
        for _ in range(2):
            await resting(running)
            # No probe wakes it
            await service.check_health()
            assert running._child is None
            leaving = asyncio.create_task(service.run(embedded("baka")))
            answers = asyncio.gather(*(service.run(embedded("baka")) for _ in range(8)))
            await asyncio.sleep(0)
            leaving.cancel()
            assert all(np.array_equal(a.answer.dense, first.dense) for a in await answers)
            with pytest.raises(asyncio.CancelledError):
                await leaving
        # A request in work keeps it: each of these texts takes a pass that is longer
        many = Embed(["dato " * 20] * 3, frozenset({Head.DENSE}))
        assert len((await service.run(many)).answer) == 3
        await resting(running)
        # It ends at rest, without another process


async def test_a_process_that_cannot_start_again_fails_the_waiting_requests(
    hybrid, copied, monkeypatch
):
    folder = copied(hybrid)
    async with engine(monkeypatch, folder, idle_s=0.1) as (running, service):
        await service.run(embedded("baka"))
        await resting(running)
        config = folder / "config.json"
        content = config.read_bytes()
        config.write_bytes(b"{")
        with pytest.raises(Unhealthy, match="send the request again"):
            await service.run(embedded("baka"))
        with pytest.raises(Unhealthy):
            await service.check_health()
        config.write_bytes(content)
        assert (await again(service)).dense is not None


def test_a_model_that_does_not_load_is_told_as_ever(tmp_path):
    running = EngineProcess(EngineConfig(), {"json_output": False, "level": "off"})
    for _ in range(2):
        with pytest.raises(LoadError, match="no such folder"):
            running.load(ModelConfig(model_id=str(tmp_path / "nowhere")))
    running.close()


FORMS = (
    lambda given: ("/embed", {"inputs": given[0]}),
    lambda given: (
        "/embed_hybrid",
        {"inputs": given, "outputs": ["dense", "sparse", "multivector"]},
    ),
    lambda given: ("/embed_sparse", {"inputs": given}),
    lambda given: ("/embed_all", {"inputs": given[0]}),
    lambda given: ("/tokenize", {"inputs": given[0]}),
    lambda given: ("/embed", {"inputs": ["", *given]}),
)


@pytest.fixture(scope="module")
def server(hybrid):
    with process([*SERVE, "--model-id", str(hybrid), "--engine-process", "true"]) as running:
        yield running, running.wait_ready()


def child_of(running):
    return next(
        (child for child in psutil.Process(running.process.pid).children() if child.is_running()),
        None,
    )


def counted(url, name):
    lines = WEB.get(f"{url}/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith((f"{name} ", f"{name}{{"))
    )


def test_answers_are_those_of_one_process(server, hybrid):
    _, url = server
    requests = [FORMS[i % len(FORMS)](LINES[i : i + 1 + i % 3]) for i in range(24)]

    def ask(url):
        answers = [WEB.post(url + path, json=body) for path, body in requests]
        return [(answer.status_code, answer.json()) for answer in answers]

    found = ask(url)
    with process([*SERVE, "--model-id", str(hybrid)]) as alone:
        other = alone.wait_ready()
        assert found == ask(other)
        names = [
            {line for line in WEB.get(f"{one}/metrics").text.splitlines() if line.startswith("#")}
            for one in (url, other)
        ]
        assert names[0] == names[1]
    assert {status for status, _ in found} == {200, 400}
    until(lambda: counted(url, "hybridtei_forward_passes_total") > 0)


def test_no_runtime_is_loaded_beside_http(server):
    running, _ = server
    maps = Path(f"/proc/{running.process.pid}/maps").read_text()
    assert "onnxruntime_pybind" not in maps


def test_killed_under_load_it_costs_one_error_and_no_descriptor(server):
    running, url = server
    parent, done = psutil.Process(running.process.pid), Event()
    seen = Counter()

    def ask(number):
        with httpx.Client(timeout=HANG, trust_env=False) as client:
            while not done.is_set():
                path, body = FORMS[number % 4](LINES[number : number + 3])
                answer = client.post(url + path, json=body)
                seen[answer.status_code, answer.text if answer.status_code != 200 else ""] += 1

    before, requests = parent.num_fds(), counted(url, "te_embed_count")
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        for _ in range(2):
            until(lambda: WEB.get(f"{url}/health").status_code == 200)
            answered = seen[200, ""]
            until(lambda answered=answered: seen[200, ""] > answered)
            child = child_of(running)
            child.kill()
            until(lambda: WEB.get(f"{url}/health").status_code == 503)
        until(lambda: WEB.get(f"{url}/health").status_code == 200)
        done.set()
        for one in asking:
            # Each request was answered
            one.result(HANG)
    statuses = {status for status, _ in seen}
    assert statuses == {200, 503}
    refused = {text for status, text in seen if status == 503}
    ended = "the engine's process ended (SIGKILL) and is started again: send the request again"
    assert refused == {
        json.dumps({"error": ended, "error_type": "Unhealthy"}, separators=(",", ":"))
    }
    assert counted(url, "te_embed_count") > requests
    # The connections of the clients close a moment later
    until(lambda: parent.num_fds() <= before + 1)
    assert len(psutil.Process(running.process.pid).children()) == 1
    assert running.errors == []


def test_it_does_not_outlive_the_server_and_obeys_no_signal_of_its_own(hybrid):
    for number in (signal.SIGTERM, signal.SIGKILL):
        with process([*SERVE, "--model-id", str(hybrid), "--engine-process", "true"]) as running:
            running.wait_ready()
            child = child_of(running)
            # A terminal and systemd tell every process
            for ignored in (
                signal.SIGINT,
                signal.SIGTERM,
                signal.SIGHUP,
            ):
                os.kill(child.pid, ignored)
            running.process.send_signal(number)
            assert running.wait() == (0 if number is signal.SIGTERM else -signal.SIGKILL)
            until(
                lambda child=child: (
                    not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE
                )
            )
