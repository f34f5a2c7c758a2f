"""Named keys out of a file: who they let in, what is told of them, and what a file may hold."""

import logging
import signal
from pathlib import Path

import httpx
import pytest

from hybridtei.errors import LoadError
from hybridtei.server.http.security import FLAG_NAME, Keyring, is_sendable, read_keys
from hybridtei.system.tracing import CURRENT
from tests.server.http.raw import CLOSE, GET, WHOLE, connected, heard, statuses
from tests.server.live import JSON, process, serving, until

KEYS = "# of the search team\nsearch:s3cret-1\n\nbatch.jobs:s3:cret-2\n"
BODY = {"inputs": "one"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


def bearing(key):
    return {**JSON, "authorization": f"Bearer {key}"}


def name_of(key):
    return key and key.name


def test_each_key_opens_under_its_name_and_no_other_does(file):
    keys = Keyring("plain", file)
    assert not keys.is_open
    assert {
        key: name_of(keys.find(key.encode())) for key in ("s3cret-1", "s3:cret-2", "plain")
    } == {
        "s3cret-1": "search",
        "s3:cret-2": "batch.jobs",
        "plain": FLAG_NAME,
    }
    for wrong in (b"", b"s3cret-", b"s3cret-11", b"search", b"search:s3cret-1", b"S3CRET-1"):
        assert keys.find(wrong) is None
    for header in (
        b"",
        b"s3cret-1",
        b"bearer s3cret-1",
        b"Bearer  s3cret-1",
        b"Bearer s3cret-1 ",
        b"Basic s3cret-1",
    ):
        assert keys.find_in_header(header) is None
    assert name_of(keys.find_in_header(b"Bearer s3cret-1")) == "search"


def test_no_key_is_open():
    assert Keyring().is_open
    assert not Keyring("x").is_open


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds 0 keys"),
        ("# nothing\n", "holds 0 keys"),
        ("hush", "line 1: should be `NAME:KEY`"),
        ("\nan name:hush", "line 2: should be"),
        ('a"b:hush', "line 1: should be"),
        ("a:", "line 1: no header"),
        ("a: hush", "line 1: no header"),
        ("a:hushé", "line 1: no header"),
        ("a:hush\na:hush2", "line 2: a second key named a"),
        (f"{FLAG_NAME}:hush", "line 1: a second key named api-key"),
        ("a:hush\n" + "\n".join(f"b{i}:hush" for i in range(1000)), "holds 1001 keys"),
        ("#" * 1_000_001, "larger than"),
    ],
)
def test_a_file_that_is_no_list_of_keys_is_refused_by_its_line_without_its_words(
    tmp_path, content, told
):
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(LoadError, match=told) as refused:
        read_keys(path)
    assert str(path) in str(refused.value)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("content", [b"\xff\xfe", None])
def test_a_file_that_cannot_be_read(tmp_path, content):
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(LoadError, match="cannot be read"):
        read_keys(tmp_path / "keys")


def test_a_file_without_an_end_is_refused():
    with pytest.raises(LoadError, match="/dev/zero: larger than 1000000 bytes"):
        read_keys(Path("/dev/zero"))


def test_what_a_header_can_carry():
    assert is_sendable("a:b~")
    assert not any(is_sendable(key) for key in ("", " a", "a ", "a\tb", "é", "a\n"))


def test_names_are_counted_and_logged_and_keys_are_not(file, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(server={"api_key_file": str(file), "api_key": "plain"}) as running:
        assert running.post("/embed", BODY).status_code == 401
        assert running.post("/embed", BODY, headers=bearing("s3cret-1")).status_code == 200
        assert (
            running.post(
                "/models/unload", {"model": "small"}, headers=bearing("s3:cret-2")
            ).status_code
            == 422
        )
        assert running.get("/info", headers=bearing("plain")).status_code == 200
        hook = {"inputs": [{"data": "one", "model": "small"}]}
        assert running.post("/qdrant/inference", {**hook, "token": "wrong"}).status_code == 401
        assert running.post("/qdrant/inference", {**hook, "token": "s3:cret-2"}).status_code == 200
        text = running.get("/metrics").text
        for name, requests in {"search": 1, "batch.jobs": 2, FLAG_NAME: 1}.items():
            assert f'hybridtei_key_requests_total{{key="{name}"}} {requests}' in text
        ours = [
            record.getMessage()
            for record in caplog.records
            if record.name.startswith(("hybridtei", "uvicorn", "litestar"))
        ]
        told = text + "".join(ours)
        assert not any(key in told for key in ("s3cret", "cret-2", "Bearer s", "Bearer p"))


def test_a_pipelined_request_is_not_logged_under_the_key_of_the_one_before(file):
    callers = []

    class Callers(logging.Handler):
        def emit(self, record):
            span = CURRENT.get()
            callers.append(span and span.caller)

    log = logging.getLogger("hybridtei.system.tracing")
    handler, level = Callers(), log.level
    with (
        serving(server={"api_key_file": str(file), "api_key": "plain"}) as running,
        connected(running) as client,
    ):
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            keys = (b"s3cret-1", b"plain", b"s3:cret-2")
            client.sendall(
                b"".join(WHOLE.replace(b"host: x", b"authorization: Bearer " + key) for key in keys)
                + GET
                + CLOSE
            )
            assert statuses(heard(client)) == [200] * 4
        finally:
            log.removeHandler(handler)
            log.setLevel(level)
    assert callers == ["search", None, "batch.jobs"]


def test_the_log_names_the_key(file):
    server = ["-m", "tests.server.processes.fake_server", "0"]
    with process([*server], {"API_KEY_FILE": str(file)}) as running:
        url = running.wait_ready()
        assert httpx.post(f"{url}/embed", json=BODY).status_code == 401
        assert httpx.post(f"{url}/embed", json=BODY, headers=bearing("s3cret-1")).status_code == 200
        file.write_text("later:another\n")
        running.process.send_signal(signal.SIGHUP)
        until(lambda: any("read the keys again: later" in line for line in running.lines))
        assert httpx.post(f"{url}/embed", json=BODY, headers=bearing("s3cret-1")).status_code == 401
        assert httpx.post(f"{url}/embed", json=BODY, headers=bearing("another")).status_code == 200
        file.write_text("later roles=search:another\n")
        running.process.send_signal(signal.SIGHUP)
        until(lambda: sum("read the keys again: later" in line for line in running.lines) == 2)
        assert httpx.post(f"{url}/embed", json=BODY, headers=bearing("another")).status_code == 403
        file.write_text("broken")
        running.process.send_signal(signal.SIGHUP)
        until(lambda: any("the old keys stay in use" in line for line in running.lines))
        assert httpx.post(f"{url}/embed", json=BODY, headers=bearing("another")).status_code == 403
        # There is no store
        assert httpx.post(f"{url}/search", json=BODY, headers=bearing("another")).status_code == 404
        running.terminate()
        assert running.wait() == 0
        assert any('embed{key="search"' in line for line in running.lines)
        assert not any(
            "s3cret" in line or "another" in line for line in [*running.lines, *running.errors]
        )
