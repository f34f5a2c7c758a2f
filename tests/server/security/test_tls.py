"""HTTP and gRPC over TLS, with a certificate that this test makes for itself."""

import shutil
import signal
import socket
import ssl
import subprocess
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest

from hybridtei.config import ServerConfig
from hybridtei.errors import LoadError
from hybridtei.server.http.security import certificate_of
from tests.server.grpc.live import free_port, start
from tests.server.http.test_metrics_port import metrics_url
from tests.server.live import HANG, JSON, process, serving, until

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="no openssl to make a certificate with"
)
BODY = {"inputs": "one two"}


def make(folder, *more):
    """A certificate for this machine, and its key."""
    folder.mkdir()
    paths = {"certfile": str(folder / "cert.pem"), "keyfile": str(folder / "key.pem")}
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    out = ["-keyout", paths["keyfile"], "-out", paths["certfile"]]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *(more or ["-nodes"])]
    subprocess.run(
        ["openssl", "req", "-x509", *kind, *subject, *out, "-days", "2"],
        check=True,
        capture_output=True,
    )
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make(tmp_path_factory.mktemp("tls") / "a")


def trusting(files):
    return ssl.create_default_context(cafile=files["certfile"])


def test_http_over_tls_and_nothing_else(files):
    settings = {"METRICS_PORT": "0", **{k.upper(): v for k, v in files.items()}}
    with process(["-m", "tests.server.processes.fake_server", "0"], settings) as running:
        url = running.wait_ready().replace("http:", "https:")
        assert httpx.get(f"{metrics_url(running)}/metrics").status_code == 200
        with httpx.Client(base_url=url, verify=trusting(files), trust_env=False) as client:
            for _ in range(3):
                assert client.post("/embed", json=BODY).status_code == 200
            refused = client.post("/embed", content=b"x" * 3_000_000, headers=JSON)
            assert refused.status_code == 413
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(url.replace("https:", "http:") + "/health", trust_env=False)
        with pytest.raises(httpx.ConnectError):
            # Nobody vouches for the certificate
            httpx.get(f"{url}/health", trust_env=False)
        running.terminate()
        assert running.wait() == 0
        assert "Traceback" not in "".join([*running.lines, *running.errors])


def test_grpc_over_tls(files):
    port = free_port()
    with serving_tls(files, port), open(files["certfile"], "rb") as chain:
        credentials = grpc.ssl_channel_credentials(chain.read())
        with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
            answer, _ = start(channel, "Embed", {"inputs": "one two"})
            assert len(answer.embeddings) > 0
        with grpc.insecure_channel(f"localhost:{port}") as channel, pytest.raises(grpc.RpcError):
            start(channel, "Embed", {"inputs": "one two"}, timeout=5)


def serving_tls(files, port):
    return serving(
        server={"hostname": "127.0.0.1", "grpc_port": port, **files}, verify=trusting(files)
    )


def test_a_reload_between_the_two_writes_keeps_the_old_pair_and_the_next_one_takes_the_new(
    tmp_path,
):
    files, old, new = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "c")
    port = free_port()
    environment = {**{name.upper(): path for name, path in files.items()}, "GRPC_PORT": str(port)}
    with process(["-m", "tests.server.processes.fake_server", "0"], environment) as running:
        url = running.wait_ready().replace("http:", "https:")

        def reload(expected):
            seen = sum(expected in line for line in running.lines)
            running.process.send_signal(signal.SIGHUP)
            until(lambda: sum(expected in line for line in running.lines) > seen)

        def check(trusted):
            assert (
                httpx.get(f"{url}/health", verify=trusting(trusted), trust_env=False).status_code
                == 200
            )
            credentials = grpc.ssl_channel_credentials(Path(trusted["certfile"]).read_bytes())
            with grpc.secure_channel(f"localhost:{port}", credentials) as channel:
                assert start(channel, "Embed", {"inputs": "one"}, timeout=10)[0].embeddings

        for name in files:
            shutil.copy(files[name], old[name])
        check(old)
        Path(files["certfile"]).write_bytes(Path(new["certfile"]).read_bytes())
        reload("the old certificate stays in use: --certfile")
        check(old)
        Path(files["keyfile"]).write_bytes(Path(new["keyfile"]).read_bytes())
        reload("read the certificate again")
        check(new)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", verify=trusting(old), trust_env=False)
        running.terminate()
        assert running.wait() == 0


def test_what_is_no_certificate_is_refused_by_name(files, tmp_path):
    assert certificate_of(ServerConfig()) is None
    assert certificate_of(ServerConfig(**files)) is not None
    other = make(tmp_path / "b")
    locked = make(tmp_path / "c", "-passout", "pass:hush")
    (tmp_path / "junk").write_text("junk")
    for wrong in (
        {**files, "keyfile": other["keyfile"]},
        {**files, "keyfile": str(tmp_path / "junk")},
        {**files, "certfile": str(tmp_path / "nothing")},
        locked,
    ):
        with pytest.raises(LoadError, match="--certfile") as refused:
            certificate_of(ServerConfig(**wrong))
        assert wrong["keyfile"] in str(refused.value)
    for name in files:
        with pytest.raises(LoadError, match="/dev/zero: larger than 1000000 bytes"):
            certificate_of(ServerConfig(**{**files, name: "/dev/zero"}))


def test_connections_that_never_finish_their_handshake_are_bounded_and_keep_nobody_out(files):
    with (
        serving(server={"max_connections": 3, **files}, verify=trusting(files)) as running,
        ExitStack() as stack,
    ):
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            for _ in range(8)
        ]
        # All but the three that came last
        for client in silent[:5]:
            client.settimeout(HANG)
            assert client.recv(1) == b""
        fresh = httpx.post(
            f"{running.url}/embed", json=BODY, verify=trusting(files), trust_env=False, timeout=HANG
        )
        assert fresh.status_code == 200
        until(
            lambda: (
                'hybridtei_refusals_total{limit="max_connections"}' in running.get("/metrics").text
            )
        )


def test_a_handshake_has_its_time(files, monkeypatch):
    monkeypatch.setattr("hybridtei.server.http.security.HANDSHAKE_SECONDS", 0.1, raising=False)
    with (
        serving(server=files, verify=trusting(files)) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=HANG) as client,
    ):
        assert client.recv(1) == b""
        assert running.post("/embed", BODY).status_code == 200
