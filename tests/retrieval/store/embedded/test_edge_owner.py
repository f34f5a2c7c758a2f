"""The owner of the embedded engine, as a real process: killed, asked by many at once, opened twice,
and ruined on purpose."""

import asyncio
import os
import signal

import psutil
import pytest

from hybridtei.errors import StoreAtCapacity, StoreError, StoreUnavailable
from hybridtei.retrieval.store import embedded as module
from hybridtei.retrieval.store.base import VectorParams
from hybridtei.retrieval.store.embedded import EmbeddedStore
from hybridtei.retrieval.store.points import check_points, to_points
from hybridtei.retrieval.store.query import of_ids
from hybridtei.system.frames import frame
from tests.retrieval.store.stores import embeddings, leg, plan

HANG = 60
CHANGED = (
    "import sys, hybridtei.system.frames as frames, hybridtei.retrieval.store.embedded_folder as folder\n"
    "import hybridtei.retrieval.store.embedded_process as process, qdrant_edge as edge\n"
    "{}\n"
    "sys.exit(process.main(sys.argv[1]))\n"
)


def changed(path, change):
    """A store whose process has other constants."""

    class Changed(EmbeddedStore):
        command = ("-c", CHANGED.replace("{}", change))

    return Changed(str(path), timeout_s=HANG)


def points(begin, end):
    return to_points(embeddings(end - begin, seed=begin), list(range(begin, end)))


def pid_of(store):
    # os.kill(0) would stop this process's own group
    assert store.pid is not None
    return store.pid


async def opened(folder):
    store = EmbeddedStore(str(folder), timeout_s=HANG)
    await store.create("c", plan())
    return store


async def test_everything_acknowledged_survives_a_killed_owner(tmp_path):
    """Killed while a batch of five is under way, which may be stored or not: its answer is lost
    either way."""
    store = await opened(tmp_path)
    for begin in range(0, 300, 20):
        await store.upsert("c", points(begin, begin + 20))
    writing = asyncio.create_task(store.upsert("c", points(300, 305), plan()))
    while not store._waiting:
        await asyncio.sleep(0)
    await killed(store)
    answered = not isinstance(await outcome(writing), StoreUnavailable)
    records, _ = await store.scroll("c", limit=10**6, with_payload=False)
    found = {record.id for record in records}
    begun = set(range(300, 305))
    assert found - begun == set(range(300))
    # Whole, or not at all
    assert found & begun in ((begun,) if answered else (begun, set()))
    await store.upsert("c", points(0, 20))
    assert len(await store.query("c", leg(embeddings(1)))) == 10
    await store.close()


async def test_what_is_deleted_or_changed_stays_so_after_a_kill(tmp_path):
    """Thirty kills between the acknowledgement and the next read."""
    store = await opened(tmp_path)
    await store.upsert("c", points(0, 60))
    for identity in range(30):
        await store.delete("c", [identity])
        await store.set_payload("c", [identity + 30], {"round": identity})
        await killed(store)
        records, _ = await store.scroll("c", limit=100)
        assert {record.id for record in records} == set(range(identity + 1, 60))
        rounds = {record.id: record.payload.get("round") for record in records}
        assert rounds[identity + 30] == identity
    await store.close()


async def killed(store):
    """Returns once that is noticed: a call before would go to the dead one, a call after starts
    another."""
    os.kill(pid_of(store), signal.SIGKILL)
    while store._is_joined:
        await asyncio.sleep(0.001)


async def ended(store):
    """Close the store; return once its process, which would wait for another client, is gone."""
    process = psutil.Process(pid_of(store))
    await store.close()
    process.terminate()
    await asyncio.to_thread(process.wait, HANG)


async def outcome(task):
    try:
        await task
    except StoreUnavailable as error:
        return error
    return None


async def test_closing_waits_for_what_was_asked_and_the_store_is_found_again_as_it_was(
    tmp_path,
):
    store = await opened(tmp_path)
    await store.upsert("c", points(0, 50))
    asked = leg(embeddings(1), filter=of_ids(range(50)))
    before = await store.query("c", asked)
    writing = asyncio.create_task(store.upsert("c", points(50, 150), plan()))
    while not store._waiting:
        await asyncio.sleep(0)
    await store.close()
    await writing
    with pytest.raises(StoreError, match="closed"):
        await store.count("c")
    again = EmbeddedStore(str(tmp_path))
    assert (await again.collections(), await again.count("c")) == (["c"], 150)
    assert [point.id for point in await again.query("c", asked)] == [point.id for point in before]
    await again.close()


async def test_a_second_process_joins(tmp_path):
    store, second = await opened(tmp_path), EmbeddedStore(str(tmp_path))
    assert await second.collections() == ["c"]
    assert pid_of(second) == pid_of(store)
    await second.upsert("c", points(0, 5))
    await second.close()
    assert await store.count("c") == 5
    await store.close()


async def test_many_ask_at_once_and_each_gets_its_own_answer(tmp_path):
    store = await opened(tmp_path)
    await store.upsert("c", points(0, 60))
    stored = embeddings(60, seed=0)
    asked = [store.query("c", leg(stored, limit=1, row=i)) for i in range(60)]
    writes = [store.upsert("c", points(begin, begin + 20)) for begin in range(100, 200, 20)]
    answers = await asyncio.gather(*asked, *writes)
    assert [answer[0].id for answer in answers[:60]] == list(range(60))
    assert await store.count("c") == 160
    await store.close()


async def test_an_owner_outlives_its_starter_and_ends_after_the_last_client(tmp_path):
    store = changed(tmp_path, "process.LINGER_S = 0.1")
    await store.create("c", plan())
    process, second = psutil.Process(pid_of(store)), EmbeddedStore(str(tmp_path))
    assert await second.count("c") == 0
    # A Ctrl-C is for a command, not for its engine
    process.send_signal(signal.SIGINT)
    await store.close()
    await second.upsert("c", points(0, 10))
    await second.close()
    await asyncio.to_thread(process.wait, HANG)
    again = EmbeddedStore(str(tmp_path))
    assert await again.count("c") == 10
    await again.close()


@pytest.mark.parametrize("end", ["cancelled", "timed out"])
async def test_a_call_whose_caller_is_gone_is_never_executed(tmp_path, end):
    store = await opened(tmp_path)
    os.kill(pid_of(store), signal.SIGSTOP)
    store._timeout_s = HANG if end == "cancelled" else 0.5
    writing = [
        asyncio.create_task(store.upsert("c", points(begin, begin + 10), plan()))
        for begin in range(0, 200, 10)
    ]
    while len(store._waiting) < len(writing):
        await asyncio.sleep(0)
    if end == "cancelled":
        for write in writing:
            write.cancel()
    ended = await asyncio.gather(*writing, return_exceptions=True)
    assert {type(one) for one in ended} == {
        asyncio.CancelledError if end == "cancelled" else StoreUnavailable
    }
    assert end == "cancelled" or "has not answered for 0.5 s" in str(ended[0])
    os.kill(pid_of(store), signal.SIGCONT)
    store._timeout_s = HANG
    # Only the one that the process had already been sent
    assert await store.count("c") <= 10
    await store.upsert("c", points(0, 200))
    assert await store.count("c") == 200
    await store.close()


async def test_an_owner_that_greets_nobody_is_said_to_build_an_index(tmp_path, monkeypatch):
    store = await opened(tmp_path)
    os.kill(pid_of(store), signal.SIGSTOP)
    monkeypatch.setattr(module, "START_S", 0.1)
    with pytest.raises(
        StoreUnavailable,
        match=r"has not answered for 0.1 s: it may be building an index; try later$",
    ):
        await EmbeddedStore(str(tmp_path)).count("c")
    os.kill(pid_of(store), signal.SIGCONT)
    await store.close()


async def test_more_calls_than_may_wait_are_refused_at_once(tmp_path):
    store = await opened(tmp_path)
    os.kill(pid_of(store), signal.SIGSTOP)
    waiting = [asyncio.create_task(store.count("c")) for _ in range(1000)]
    while len(store._waiting) < len(waiting):
        await asyncio.sleep(0)
    store._timeout_s = 0.05
    with pytest.raises(
        StoreUnavailable,
        match=r"1000 calls wait for the embedded Qdrant engine.*\(qdrant-timeout\)",
    ):
        await store.count("c")
    os.kill(pid_of(store), signal.SIGCONT)
    assert await asyncio.gather(*waiting) == [0] * len(waiting)
    await store.close()


async def test_no_more_calls_wait_than_can_be_answered_in_time(tmp_path):
    now_s = 0.0
    store = EmbeddedStore(str(tmp_path), timeout_s=HANG, clock=lambda: now_s)
    await store.create("c", plan())
    await store.collections()
    pid = pid_of(store)
    os.kill(pid, signal.SIGSTOP)
    slow = asyncio.create_task(store.collections())
    while not store._turn.locked():
        await asyncio.sleep(0)
    # Now it is sent
    await asyncio.sleep(0)
    now_s += 100.0
    os.kill(pid, signal.SIGCONT)
    # Their mean is 10 s now
    assert await slow == ["c"]
    os.kill(pid, signal.SIGSTOP)
    waiting = []
    # 0, 10, …, 60 s of work wait before each
    for _ in range(7):
        waiting.append(asyncio.create_task(store.collections()))
        await asyncio.sleep(0)
    with pytest.raises(StoreAtCapacity, match=r"7 calls wait.*, about [0-9.]+ s of work"):
        await store.collections()
    # Whoever has time may wait
    waiting.append(asyncio.create_task(store._call("collections", is_bounded=False)))
    os.kill(pid, signal.SIGCONT)
    assert await asyncio.gather(*waiting) == [["c"]] * 8
    await store.close()


async def test_an_answer_that_is_too_large_is_an_error_and_ends_nothing(tmp_path):
    """With bounds that are a few thousand times smaller."""
    store = changed(tmp_path, "frames.MAX_FRAME, folder.MAX_ANSWER_BYTES = 100_000, 50_000")
    await store.create("c", plan())
    for begin in range(0, 600, 20):
        await store.upsert("c", points(begin, begin + 20))
    pid = pid_of(store)
    for ask in (
        lambda: store.retrieve("c", list(range(600)), with_vectors=True),
        lambda: store.scroll("c", limit=600, with_vectors=True),
    ):
        with pytest.raises(
            StoreError,
            match=r"600 points are too large: .* allowed are 50000; ask for fewer at once",
        ):
            await ask()
    assert await store.count("c") == 600
    assert pid_of(store) == pid
    await store.close()


async def test_a_panic_closes_a_collection_to_writing_and_no_other(tmp_path):
    """What no checked point can do is done here behind the checks' back."""
    poison = "folder.point_of = lambda p: edge.Point(id=p[0], vector={'sparse': edge.SparseVector([1, 2], [1.0])}, payload={})"
    store = await opened(tmp_path)
    await store.create("d", plan())
    for name in ("c", "d"):
        await store.upsert(name, points(0, 10))
    await ended(store)

    poisoned = changed(tmp_path, poison)
    for _ in range(2):
        with pytest.raises(
            StoreError, match=f"'c' in {tmp_path} is read-only.*delete and refill it"
        ):
            await poisoned.upsert("c", points(10, 11))
    assert await poisoned.count("c") >= 10
    assert len(await poisoned.query("c", leg(embeddings(1)))) == 10
    await ended(poisoned)

    again = EmbeddedStore(str(tmp_path))
    with pytest.raises(
        StoreError,
        match=r"'c' in .* is damaged and cannot be opened: restore its folder, or drop it",
    ):
        await again.count("c")
    await again.upsert("d", points(10, 20))
    assert await again.count("d") == 20
    await again.drop("c")
    await again.create("c", plan())
    await again.upsert("c", points(0, 5))
    assert await again.count("c") == 5
    await again.close()


async def test_a_half_made_collection_leaves_nothing(tmp_path):
    store = EmbeddedStore(str(tmp_path))
    bad = type(plan())({"dense": VectorParams(size=0, distance="Cosine")}, {})
    with pytest.raises(StoreError, match=r"dimension cannot be 0"):
        await store.create("c", bad)
    assert await store.collections() == []
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    await store.close()


async def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    store = EmbeddedStore(str(file / "folder"))
    assert await store.collections() == []
    with pytest.raises(StoreError, match=f"{file}/folder: cannot be used"):
        await store.create("c", plan())
    await store.close()


def test_points_travel_as_the_bytes_of_their_arrays():
    (point,) = check_points(points(0, 1), plan())
    body = frame(point)
    assert point.vector["dense"].tobytes() in body
    assert point.vector["multivector"].tobytes() in body
    assert point.vector["sparse"]["values"].tobytes() in body
