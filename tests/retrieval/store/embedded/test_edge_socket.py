"""The socket of the embedded engine's process: who may join, and what a client cannot do to the
others."""

import asyncio
import itertools
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hybridtei.errors import StoreError, StoreUnavailable
from hybridtei.retrieval.store import embedded, embedded_process
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.embedded_process import (
    is_own,
    listening_at,
    release,
    socket_path,
    take,
)
from hybridtei.system import machine
from hybridtei.system.frames import HEADER, frame, unframe
from tests.retrieval.store.embedded.test_edge_owner import (
    CHANGED,
    HANG,
    changed,
    ended,
    opened,
    pid_of,
    points,
)
from tests.retrieval.store.stores import plan

JOINED = """
import asyncio, sys
from hybridtei.retrieval.store.embedded import EmbeddedStore
async def main():
    store = EmbeddedStore(sys.argv[1])
    print(await store.count("c"), store.pid)
    await store.close()
asyncio.run(main())
"""


def connected(folder):
    """A client of our own, behind the greeting."""
    place = listening_at(folder)
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(place))
    assert received(client)[0] == release()
    return client


def asked(client, call, *arguments):
    client.sendall(frame([call, arguments]))
    return received(client)


def received(client):
    (length,) = HEADER.unpack(client.recv(HEADER.size, socket.MSG_WAITALL))
    return unframe(client.recv(length, socket.MSG_WAITALL))


async def test_a_socket_that_was_deleted_is_made_again(tmp_path):
    """As cleaners of temporary folders do: other commands still reach the process."""
    store = await opened(tmp_path)
    place = listening_at(tmp_path)
    place.unlink()
    other = EmbeddedStore(str(tmp_path), timeout_s=HANG)
    assert await other.collections() == await store.collections()
    assert other.pid == store.pid
    await other.close()
    await ended(store)
    assert not place.exists()


async def test_the_socket_is_this_users_alone_and_gone_with_its_process(tmp_path):
    store = await opened(tmp_path)
    place = listening_at(tmp_path)
    assert (stat.S_IMODE(place.stat().st_mode), stat.S_IMODE(place.parent.stat().st_mode)) == (
        0o600,
        0o700,
    )
    assert listening_at(tmp_path / ".." / tmp_path.name) == place
    await ended(store)
    assert not place.exists()


async def test_commands_that_start_at_once_share_one_process(tmp_path):
    await ended(await opened(tmp_path))
    command = machine.python_command("-c", JOINED, str(tmp_path))
    started = [
        subprocess.Popen(
            command,
            env=machine.child_environment(),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for _ in range(6)
    ]
    told = {(await asyncio.to_thread(one.communicate, None, HANG))[0] for one in started}
    assert len(told) == 1, told
    assert told.pop().startswith("0 ")


async def test_an_owner_that_is_ready_when_a_slow_start_has_failed_is_joined(tmp_path, monkeypatch):
    """On a busy machine the failed start took longer than an owner may take to start."""
    store = await opened(tmp_path)
    times = itertools.count(step=2 * embedded.TAKEN_S)
    late = EmbeddedStore(str(tmp_path), timeout_s=HANG, clock=lambda: float(next(times)))
    places = iter([None])
    monkeypatch.setattr(embedded, "listening_at", lambda folder: next(places, listening_at(folder)))
    assert await late.count("c") == 0
    assert late.pid == store.pid
    await late.close()
    await store.close()


async def test_a_process_has_no_output_or_keys_of_its_starter(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDTEI_API_KEY", "secret")
    store = await opened(tmp_path)
    pid = pid_of(store)
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.getsid(pid) != os.getsid(0)
    assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)} == {os.devnull}
    await store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
async def test_another_user_is_not_served(tmp_path):
    store = await opened(tmp_path)
    ours, theirs = socket.socketpair()
    assert is_own(ours)
    ours.close(), theirs.close()
    place = listening_at(tmp_path)
    place.chmod(0o666)
    script = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({place.name!r}); print(s.recv(9))"
    seen = await asyncio.to_thread(
        subprocess.run,
        [
            sys.executable,
            "-c",
            f"import os; os.chdir({str(place.parent)!r}); os.setuid(65534); {script}",
        ],
        capture_output=True,
        text=True,
    )
    assert seen.stdout in ("", "b''\n")
    assert await store.count("c") == 0
    await store.close()


async def test_another_release_is_named_beside_this_one(tmp_path):
    newer = CHANGED.replace("{}", "process.release = lambda: 'hybridtei 9 with qdrant-edge-py 8'")
    command = machine.python_command("-c", newer, str(tmp_path))
    started = subprocess.run(
        command,
        env=machine.child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    assert started.stdout == b'["ready", null]\n'
    other = EmbeddedStore(str(tmp_path))
    with pytest.raises(
        StoreError, match=r"in use by hybridtei 9 with qdrant-edge-py 8, and this is hybridtei 0"
    ):
        await other.create("c", plan())
    await other.close()


async def test_half_a_request_holds_up_nobody_and_its_client_is_disconnected(
    tmp_path,
):
    store = changed(tmp_path, "process.STALLED_TICKS, process.TICK_S = 4, 0.05")
    await store.create("c", plan())
    client = connected(tmp_path)
    client.sendall(HEADER.pack(1000) + b"half")
    await store.upsert("c", points(0, 10))
    assert await store.count("c") == 10
    assert await asyncio.to_thread(client.recv, 1) == b""
    for nonsense in (HEADER.pack(2**31), HEADER.pack(3) + b"abc", frame(["count"]), frame(7)):
        client = connected(tmp_path)
        client.sendall(nonsense)
        assert await asyncio.to_thread(client.recv, 1) == b""
    assert asked(connected(tmp_path), "close") == ["error", "no such call: close"]
    assert await store.count("c") == 10
    await store.close()


async def test_a_call_that_does_not_end_ends_the_process_and_the_next_is_answered(
    tmp_path,
):
    slow = "process.DEADLINE_S = 5.0; folder.Folder.count = lambda *_: __import__('time').sleep(99)"
    store = changed(tmp_path, slow)
    await store.create("c", plan())
    with pytest.raises(StoreUnavailable, match="has ended; the next call starts it again"):
        await store.count("c")
    other = EmbeddedStore(str(tmp_path))
    assert await other.count("c") == 0
    await store.close()
    await other.close()


async def test_a_full_disk_is_named(tmp_path):
    await ended(await opened(tmp_path))
    store = changed(tmp_path, "folder.MIN_FREE_BYTES = 2**62")
    for writing in (lambda: store.create("d", plan()), lambda: store.upsert("c", points(0, 1))):
        with pytest.raises(StoreError, match=rf"{tmp_path}: the disk is full: \d+ bytes are free"):
            await writing()
    assert await store.count("c") == 0
    await store.close()


async def test_reading_where_no_collection_is_makes_nothing(tmp_path):
    store = EmbeddedStore(str(tmp_path / "store"))
    assert (await store.collections(), await store.aliases()) == ([], {})
    assert await store.describe("c") is None
    with pytest.raises(StoreError, match=f"no collection 'c' in {tmp_path}/store"):
        await store.count("c")
    await store.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_owner(tmp_path):
    with take(tmp_path), pytest.raises(StoreError, match="another process has this folder"):
        take(tmp_path)


def test_a_folder_on_a_network_is_refused(tmp_path, monkeypatch):
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"36 35 {os.major(device)}:{os.minor(device)} / /mnt rw - nfs4 host:/share rw\n"
    )
    monkeypatch.setattr(embedded_process, "MOUNTS", mounts)
    with pytest.raises(StoreError, match=r"on a network file system \(nfs4\)"):
        take(tmp_path)


def test_a_long_path_of_the_temporary_folder_is_not_used(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(embedded_process.tempfile, "gettempdir", lambda: str(long))
    assert socket_path(tmp_path).parent == Path(f"/tmp/hybridtei-{os.geteuid()}")
    own = tmp_path / "run"
    own.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    if len(str(own)) < 60:
        assert socket_path(tmp_path).parent == own / "hybridtei"


async def test_a_folder_that_another_user_made_first_stops_nobody(tmp_path, monkeypatch):
    """The folder is open to others, as a stranger's may be. A process of the store is found by its
    lock file."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(embedded_process.os, "geteuid", lambda: 4_000_000_000)
    squatted = Path("/tmp/hybridtei-4000000000")
    squatted.mkdir(mode=0o777)
    try:
        place = socket_path(tmp_path)
    finally:
        squatted.rmdir()
    assert place.parent.parent == Path("/tmp")
    assert place.parent != squatted
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    place.parent.rmdir()


def test_the_socket_of_another_folder_in_a_lock_file_is_not_asked(tmp_path):
    (tmp_path / ".lock").write_text("/run/docker.sock")
    assert listening_at(tmp_path) is None


async def test_a_refusal_of_the_folder_is_told_after_one_start(tmp_path):
    words = [("refused", "no space for a socket")]

    class Refused(EmbeddedStore):
        def _start(self):
            return words.pop()

    with pytest.raises(StoreError, match="no space for a socket"):
        await Refused(str(tmp_path)).create("c", plan())
