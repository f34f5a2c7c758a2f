"""The server as a process: signals, draining, a port that is taken."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from hybridtei.config import ServerConfig
from hybridtei.server.http.connection import ConnectionLimits, bound
from hybridtei.server.run import DrainingServer, settings_of
from hybridtei.system.metrics import Registry
from tests.sampled import sampled
from tests.server.live import HANG, ROOT, process

FAKE = ["-m", "tests.server.processes.fake_server"]
BODY = {"inputs": ["one two three"] * 4}


def metric(url, name):
    text = httpx.get(f"{url}/metrics").text
    return next(
        (float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name)), 0
    )


@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_a_signal_lets_open_requests_finish_and_the_status_is_0(number):
    with process([*FAKE, "0.2"]) as running, ThreadPoolExecutor(8) as pool:
        url = running.wait_ready()
        assert httpx.get(f"{url}/health").status_code == 200
        waiting = [
            pool.submit(httpx.post, f"{url}/embed", json=BODY, timeout=HANG) for _ in range(8)
        ]
        while metric(url, "te_embed_count") < 8 * 4:
            pass
        running.process.send_signal(number)
        assert [future.result().status_code for future in waiting] == [200] * 8
        assert running.wait() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert running.errors == []


POST = b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 17\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: x\r\n"
STALLED = {
    "before a head": b"",
    "in a head": GET,
    "in a header": GET + b"a: b",
    "in a body": POST + b"{",
    "in a second head": GET + b"\r\n" + GET,
    "in a second body": GET + b"\r\n" + POST + b"{",
    "in a pipelined body": POST + b'{"inputs": "one"}' + POST + b"{",
    "in a broken chunk": POST.replace(b"content-length: 17", b"transfer-encoding: chunked")
    + b"3\r\n{",
}


def said_with_stalled(drain, *places):
    """What a server says until it has ended, while a client stalls at each of these places."""
    with process([*FAKE, "0", drain]) as running, ExitStack() as stack:
        url = running.wait_ready()
        for sent in places:
            stalled = stack.enter_context(
                socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=HANG)
            )
            stalled.sendall(sent)
        assert httpx.get(f"{url}/health").status_code == 200
        running.terminate()
        assert running.wait() == 0
        return [*running.lines, *running.errors]


@pytest.mark.parametrize("drain", sampled(["0", "0.5"], ["0"]))
def test_stalled_clients_do_not_keep_it_alive(drain):
    assert "Traceback" not in "".join(said_with_stalled(drain, *STALLED.values()))


def test_two_stalled_clients_do_not_take_the_whole_drain():
    assert "the drain is over" not in "".join(said_with_stalled("2", GET, POST + b"{"))


def test_a_drain_delay_lets_proxies_turn_away_while_requests_are_answered():
    with process([*FAKE, "0", "30", "600"]) as running:
        url = running.wait_ready()
        assert httpx.get(f"{url}/health").status_code == 200
        running.process.send_signal(signal.SIGINT)
        while (health := httpx.get(f"{url}/health")).status_code == 200:
            pass
        assert (health.status_code, health.json()["error_type"]) == (503, "Unhealthy")
        # By a new connection, too
        assert httpx.post(f"{url}/embed", json=BODY).status_code == 200
        # A second Ctrl-C ends the wait
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == 0


UNSHARE = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child"]
SERVE = ["-m", "hybridtei", "serve", "--hostname", "127.0.0.1", "--port", "0"]


@pytest.fixture(scope="module")
def namespaces():
    try:
        subprocess.run([*UNSHARE, "true"], capture_output=True, timeout=HANG, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs unshare and the right to make process namespaces: {error}")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    "line", ["", "loading minilm-hybrid", "outputs "], ids=["main", "loading", "loaded"]
)
def test_process_1_ends_at_a_signal_that_comes_before_ready(line):
    """Where the server is process 1, as in a container, the kernel drops a signal without a
    handler. `line`: what the log says when the signal comes; "": nothing yet, but `main` has
    begun."""
    with process(
        ["-c", f"import os, sys; os.execvp('unshare', [*{UNSHARE}, sys.executable, *{SERVE}])"]
    ) as running:
        while not any(line in said for said in running.lines):
            assert running.process.poll() is None, running.errors
            if not line and any(children(first) for first in children(running.process.pid)):
                break
            time.sleep(0.001)
        (first,) = children(running.process.pid)
        os.kill(first, signal.SIGTERM)
        assert running.wait() in (0, 128 + signal.SIGTERM)
        assert line.startswith("outputs") or not any("Ready" in said for said in running.lines)


@pytest.mark.usefixtures("namespaces")
def test_process_1_ends_with_the_status_of_the_server_and_reaps_what_ends():
    orphan = "import os; os.fork() or (os.fork() or os._exit(0)); os._exit(7)"
    code = f"from hybridtei.system.machine import leave_process_one; leave_process_one(); {orphan}"
    done = subprocess.run(
        [*UNSHARE, sys.executable, "-c", code], cwd=ROOT, timeout=HANG, check=False
    )
    assert done.returncode == 7


def test_a_signal_while_it_starts_ends_it_before_it_is_ready(caplog):
    async def app(scope, receive, send):
        assert (await receive())["type"] == "lifespan.startup"
        signal.raise_signal(signal.SIGTERM)
        await send({"type": "lifespan.startup.complete"})
        assert (await receive())["type"] == "lifespan.shutdown"
        await send({"type": "lifespan.shutdown.complete"})

    config = ServerConfig(hostname="127.0.0.1", port=0)
    with caplog.at_level("INFO"):
        server = DrainingServer(
            settings_of(app, config, ConnectionLimits(config, Registry())), drain_seconds=0
        )
        server.run()
    assert server.started
    assert "Ready" not in caplog.messages


async def test_a_signal_while_the_engine_is_looked_at_is_not_lost():
    """Python runs a signal's handler between any two steps of a line."""
    config = ServerConfig(hostname="127.0.0.1", port=0)
    settings = settings_of(None, config, ConnectionLimits(config, Registry()))
    server = DrainingServer(
        settings, drain_seconds=0, dead=lambda: server.handle_exit(signal.SIGTERM, None)
    )
    server.look()
    assert server.should_exit


@pytest.mark.parametrize("shared", [False, True])
def test_any_address_of_ipv6_is_any_of_ipv4_too(shared):
    """Clusters of both kinds set HOSTNAME=::."""
    with bound("::", 0, shared=shared) as listening:
        listening.listen()
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, listening.getsockname()[1]), HANG).close()
