"""A folder of the embedded engine whose files a stranger made, or which is deleted or restored
while processes have it open."""

import asyncio
import os
import shutil

import psutil
import pytest

from hybridtei.errors import StoreError, UnsafeFile
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.embedded_process import listening_at
from tests.retrieval.store.embedded.test_edge_owner import (
    HANG,
    changed,
    ended,
    opened,
    pid_of,
    points,
)
from tests.retrieval.store.stores import plan


def as_link(path, victim):
    path.symlink_to(victim)


def as_hard_link(path, victim):
    path.hardlink_to(victim)


def as_pipe(path, victim):
    os.mkfifo(path)


@pytest.mark.parametrize("make", [as_link, as_hard_link, as_pipe])
async def test_a_lock_file_that_leads_elsewhere_is_not_opened(tmp_path, make):
    """A cloned repository with a `qdrant/.lock`, and a collection so that commands start the
    engine."""
    victim, folder = tmp_path / "victim", tmp_path / "qdrant"
    victim.write_text("the only copy\n")
    (folder / "notes").mkdir(parents=True)
    (folder / "notes/layout.json").write_text("{}")
    make(folder / ".lock", victim)
    store = EmbeddedStore(str(folder), timeout_s=HANG)
    for call in (
        store.collections,
        lambda: store.create("c", plan()),
        lambda: store.count("notes"),
    ):
        with pytest.raises(UnsafeFile, match=r"\.lock (is|has)"):
            await call()
    await store.close()
    assert victim.read_text() == "the only copy\n"
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "notes"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
@pytest.mark.parametrize("part", [".", ".lock", "c", "c/shard"])
async def test_a_folder_of_another_user_is_refused(tmp_path, part):
    await ended(await opened(tmp_path))
    os.chown(tmp_path / part, 65534, 65534)
    store = EmbeddedStore(str(tmp_path), timeout_s=HANG)
    with pytest.raises(UnsafeFile, match=r"belongs to another user \(65534\)"):
        await store.upsert("c", points(0, 1))
    await store.close()


async def test_an_unsafe_collection_is_refused_and_the_others_are_served(tmp_path):
    store = await opened(tmp_path)
    await store.create("d", plan())
    await ended(store)
    (tmp_path / "victim").mkdir()
    shutil.rmtree(tmp_path / "c/shard")
    (tmp_path / "c/shard").symlink_to(tmp_path / "victim")
    store = EmbeddedStore(str(tmp_path), timeout_s=HANG)
    with pytest.raises(UnsafeFile, match="c/shard is a link"):
        await store.upsert("c", points(0, 1))
    await store.upsert("d", points(0, 1))
    assert list((tmp_path / "victim").iterdir()) == []
    await store.close()


def deleted(folder, copy):
    shutil.rmtree(folder)


def emptied(folder, copy):
    """As `rm -rf folder/*`, which leaves the lock file."""
    for path in folder.glob("[!.]*"):
        shutil.rmtree(path)


def restored(folder, copy):
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)


def collection_restored(folder, copy):
    shutil.rmtree(folder / "c")
    shutil.copytree(copy / "c", folder / "c")


CHANGES = [deleted, emptied, restored, collection_restored]


@pytest.mark.parametrize("change", CHANGES)
async def test_nothing_is_acknowledged_by_the_process_of_a_replaced_folder(tmp_path, change):
    """A server with an open store, beside which the folder is deleted or restored, and filled again
    by a command."""
    folder, copy = tmp_path / "store", tmp_path / "copy"
    store = await opened(folder)
    await store.upsert("c", points(0, 10))
    await ended(store)
    shutil.copytree(folder, copy)

    server = EmbeddedStore(str(folder), timeout_s=HANG)
    await server.upsert("c", points(10, 20))
    assert await server.count("c") == 20
    process = psutil.Process(pid_of(server))
    change(folder, copy)
    is_gone = change in (deleted, emptied)
    command = EmbeddedStore(str(folder), timeout_s=HANG)
    if is_gone:
        with pytest.raises(StoreError, match="there is no collection 'c'"):
            await server.count("c")
        await command.create("c", plan())
    await command.upsert("c", points(100, 105))
    assert await server.count("c") == (5 if is_gone else 15)
    await server.upsert("c", points(200, 205))
    assert await command.count("c") == (10 if is_gone else 20)
    assert pid_of(server) == pid_of(command)
    await asyncio.to_thread(process.wait, HANG)
    await command.close()
    await ended(server)

    again = EmbeddedStore(str(folder), timeout_s=HANG)
    assert await again.count("c") == (10 if is_gone else 20)
    await ended(again)


async def test_the_process_of_a_deleted_folder_ends_and_removes_its_own_socket(
    tmp_path,
):
    folder = tmp_path / "store"
    store = await opened(folder)
    socket = listening_at(folder)
    assert socket is not None
    process = psutil.Process(pid_of(store))
    shutil.rmtree(folder)
    await asyncio.to_thread(process.wait, HANG)
    assert not socket.exists()
    assert await store.collections() == []
    await store.close()
    assert not folder.exists()


async def test_a_replay_may_take_longer_than_a_call(tmp_path):
    """The alarm would end each process that opens the collection, and the next one would begin
    again."""
    slow = (
        "process.DEADLINE_S = 1.0\n"
        "class Slow:\n"
        "    create = edge.EdgeShard.create\n"
        "    def load(path, load=edge.EdgeShard.load): __import__('time').sleep(3.0); return load(path)\n"
        "edge.EdgeShard = Slow"
    )
    store = await opened(tmp_path)
    await store.upsert("c", points(0, 10))
    await ended(store)
    again = changed(tmp_path, slow)
    assert await again.count("c") == 10
    await again.close()


async def test_writes_are_flushed_under_steady_traffic(tmp_path):
    """The process writes a file at each flush. Without a pause between calls it has no idle
    tick."""
    noted = (
        "process.TICK_S, folder.FLUSH_S = 1.0, 0.5\n"
        "def flush(self, *rest, flush=folder.Folder._flush):\n"
        "    open('/proc/self/fd/%d' % note, 'w').write('flushed'); return flush(self, *rest)\n"
        "import os; note = os.open({!r}, os.O_WRONLY | os.O_CREAT)\n"
        "folder.Folder._flush = flush"
    ).format(str(tmp_path / "note"))
    store = changed(tmp_path / "store", noted)
    await store.create("c", plan())
    for turn in range(3_000):
        await store.upsert("c", points(turn % 10, turn % 10 + 1))
        if (tmp_path / "note").read_text():
            break
    assert (tmp_path / "note").read_text() == "flushed"
    await store.close()
