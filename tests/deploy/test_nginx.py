"""nginx before a real server, configured so but for addresses and certificate: what it passes on,
what it keeps."""

import os
import shutil
import socket
import ssl
import subprocess
import time
from contextlib import contextmanager

import httpx
import pytest

from hybridtei.config import ServerConfig
from tests.deploy.command_line import DEPLOY
from tests.ran import ran
from tests.server.live import HANG, VALID, serving, valid_answer

TEXT = (DEPLOY / "nginx/hybridtei.conf").read_text()
WHOLE = """
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/hybridtei.conf;
}}
"""


@contextmanager
def nginx(folder, server_port):
    """A client of nginx on a free port, once nginx passes requests on."""
    command = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    openssl = shutil.which("openssl")
    if command is None or openssl is None:
        pytest.skip("nginx or openssl is not installed")
    key, certificate = folder / "key", folder / "certificate"
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run(
        [*make, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=HANG
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    changes = {
        "listen 443": f"listen 127.0.0.1:{port}",
        "127.0.0.1:3000": f"127.0.0.1:{server_port}",
        "/etc/nginx/tls/hybridtei.pem": str(certificate),
        "/etc/nginx/tls/hybridtei.key": str(key),
    }
    text = TEXT
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "hybridtei.conf").write_text(text)
    (folder / "nginx.conf").write_text(
        WHOLE.format(folder=folder, user="user root;" if os.getuid() == 0 else "")
    )
    run = [
        command,
        "-p",
        str(folder),
        "-c",
        str(folder / "nginx.conf"),
        "-e",
        str(folder / "error.log"),
    ]
    tested = ran([*run, "-t"])
    assert tested.returncode == 0, tested.stderr
    process = subprocess.Popen(run)
    try:
        trust = ssl.create_default_context(cafile=str(certificate))
        trust.check_hostname = False
        transport = httpx.HTTPTransport(verify=trust, retries=5)
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", transport=transport, timeout=HANG, trust_env=False
        ) as client:
            end = time.monotonic() + HANG
            while not reachable(client):
                assert time.monotonic() < end, (folder / "error.log").read_text()
            yield client
    finally:
        process.terminate()
        process.wait(HANG)


def test_limits_are_the_servers():
    assert f"client_max_body_size {ServerConfig().payload_limit};" in TEXT


def test_requests_pass_and_what_is_the_operators_does_not(tmp_path):
    with serving(server={"api_key": "a-key"}) as server, nginx(tmp_path, server.port) as client:
        key = {"authorization": "Bearer a-key"}
        assert client.post("/embed_hybrid", json=VALID, headers=key).json() == valid_answer()
        assert client.post("/embed_hybrid", json=VALID).status_code == 401
        for path in ("/metrics", "/m/small/metrics", "/models/load", "/models/unload"):
            assert client.get(path, headers=key).status_code == 404
            assert client.post(path, json={}, headers=key).status_code == 404
        assert client.get("/info", headers=key).json()["model_id"] == "small"
        assert client.post("/embed", content=b" " * 2_000_001, headers=key).status_code == 413
        assert server.get("/metrics").status_code == 200


def test_a_slow_client_keeps_no_connection_of_the_server(tmp_path):
    body = b'{"inputs":"one two"}'
    head = b"POST /embed HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: 20\r\n\r\n"
    with serving() as server, nginx(tmp_path, server.port) as client:
        trust = ssl.create_default_context(cafile=str(tmp_path / "certificate"))
        trust.check_hostname = False
        with (
            socket.create_connection(("127.0.0.1", client.base_url.port), timeout=HANG) as plain,
            trust.wrap_socket(plain) as slow,
        ):
            slow.sendall(head + body[:10])
            assert client.get("/health").status_code == 200
            assert not [one for one in server.connections if one._in_body]
            slow.sendall(body[10:])
            assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def reachable(client):
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
