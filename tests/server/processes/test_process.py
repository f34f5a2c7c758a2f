"""A server's process: how many permits it starts with, an engine that dies, a pass that does not
end, a port that is shared."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from conformance.small.fake_backend import FakeBackend
from hybridtei.config import EngineConfig, ModelConfig, ServerConfig
from hybridtei.inference.load import LoadedModel
from hybridtei.server import run, start
from tests.inference.engine import small
from tests.server.grpc.live import free_port
from tests.server.live import HANG, process, until

# See `fake_process`
MURDER = "dura"
FAKE = ["-m", "tests.server.processes.fake_process"]
WEB = httpx.Client(timeout=HANG, trust_env=False, headers={"Connection": "close"})


def test_a_dead_engine_ends_the_server(hybrid):
    with process([*FAKE, str(hybrid), "0"]) as running:
        url = running.wait_ready()
        answer = WEB.post(f"{url}/embed", json={"inputs": MURDER})
        assert (answer.status_code, answer.json()["error"]) == (
            424,
            "Backend error: the engine stopped: murder",
        )
        assert running.wait() == 1
        assert running.errors[0] == "Error: the engine stopped: murder\n"


@pytest.mark.slow
def test_a_pass_that_does_not_end_does_not_keep_it_alive(hybrid):
    with (
        process([*FAKE, str(hybrid), "3600", "drain_seconds=0"]) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        url = running.wait_ready()
        stuck = pool.submit(WEB.post, f"{url}/embed", json={"inputs": "baka"})
        until(lambda: "hybridtei_forward_passes_total 1" in WEB.get(f"{url}/metrics").text)
        running.terminate()
        assert running.wait() == 0
        assert isinstance(stuck.exception(HANG), httpx.TransportError)


@pytest.mark.parametrize(
    ("ahead", "fixed", "permits"), [(1, False, 2048), (1, True, 512), (0, False, 512)]
)
def test_permits_that_nobody_set_fill_the_passes_of_a_gpu(monkeypatch, ahead, fixed, permits):
    """From the loaded model to the service; nothing listens."""
    backend, served = FakeBackend(small.model_spec()), []
    backend.ahead = ahead
    monkeypatch.setattr(start, "load_model", lambda *_: LoadedModel(small.model(), backend, 16384))
    monkeypatch.setattr(
        run, "run_server", lambda app, *_: served.append(app.state.models.default.service)
    )
    start.serve([ModelConfig()], EngineConfig(), ServerConfig(port=0), fixed_permits=fixed)
    (service,) = served
    assert service.admission.limit == service.config.max_concurrent_requests == permits


def test_a_port_is_shared_by_servers_that_agree_to_it(hybrid):
    """And by no other."""
    port = free_port()
    shared, alone = (
        [*FAKE, str(hybrid), "0", f"port={port}", "reuse_port=1"],
        [*FAKE, str(hybrid), "0", f"port={port}"],
    )
    with process(shared) as one, process(shared) as other:
        urls = {one.wait_ready(), other.wait_ready()}
        assert len(urls) == 1
        for running in (one, other):
            found = psutil.Process(running.process.pid).net_connections("tcp")
            assert (port, "LISTEN") in {
                (connection.laddr.port, connection.status) for connection in found
            }
        (url,) = urls
        assert {WEB.get(f"{url}/health").status_code for _ in range(20)} == {200}
        with process(alone) as third:
            assert third.wait() == 1
            assert third.errors == [
                f"Error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another "
                "port\n"
            ]
        one.terminate()
        assert one.wait() == 0
        # The other goes on
        assert {WEB.get(f"{url}/health").status_code for _ in range(20)} == {200}
