"""`heap`: freed memory goes back to the operating system, soon after it grew, and is not asked for over and over in vain."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from itertools import pairwise
from mmap import PAGESIZE

import numpy as np
import pytest

from hybridtei.system import memory as heap
from hybridtei.system.memory import LONGEST_PAUSE, STEP_BYTES, Keeper, Upkeep

MB = 1_000_000
GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")
needs_glibc = pytest.mark.skipif(not GLIBC, reason="there is no malloc_trim here")


class Process:
    """Memory in use, and memory that is free but kept, which trimming gives back."""

    def __init__(self, used: int) -> None:
        self.used, self.kept, self.trims = used, 0, 0

    def held(self) -> int:
        return self.used + self.kept

    def trim(self) -> None:
        self.kept = 0
        self.trims += 1

    def upkeep(self) -> Upkeep:
        return Upkeep(self.held, self.trim)


def test_what_grew_is_given_back_at_the_next_look():
    process = Process(100 * MB)
    upkeep = process.upkeep()
    for _ in range(5):
        process.kept += STEP_BYTES + 1
        assert upkeep.look()
        assert process.held() == 100 * MB


def test_a_process_that_does_not_grow_is_left_alone():
    process = Process(100 * MB)
    upkeep = process.upkeep()
    for kept in (0, MB, STEP_BYTES, 5 * MB, STEP_BYTES) * 20:
        process.kept = kept
        assert not upkeep.look()
    assert process.trims == 0


def test_what_a_running_request_holds_is_given_back_after_it():
    process = Process(100 * MB)
    upkeep = process.upkeep()
    process.used += 200 * MB  # while the request runs
    assert upkeep.look()
    process.used, process.kept = 100 * MB, 200 * MB  # answered: freed, and kept by the allocator
    looks = [upkeep.look() for _ in range(3)]
    assert any(looks)
    assert process.held() == 100 * MB


def test_memory_that_is_needed_is_asked_for_ever_more_seldom_and_then_no_more():
    process = Process(100 * MB)
    upkeep = process.upkeep()
    process.used += 500 * MB  # another model, say
    looks = [upkeep.look() for _ in range(20 * LONGEST_PAUSE)]
    trims = [place for place, trimmed in enumerate(looks) if trimmed]
    gaps = [later - earlier for earlier, later in pairwise(trims)]
    assert gaps == sorted(gaps)
    assert max(gaps) <= LONGEST_PAUSE + 1
    assert len(trims) <= 8
    assert not any(looks[len(looks) // 2 :])


def test_after_growth_was_accepted_new_growth_is_given_back_still():
    process = Process(100 * MB)
    upkeep = process.upkeep()
    process.used += 500 * MB
    for _ in range(20 * LONGEST_PAUSE):
        upkeep.look()
    process.kept += STEP_BYTES + 1
    assert upkeep.look()
    assert process.held() == 600 * MB


def test_a_model_that_is_unloaded_lowers_what_is_needed():
    process = Process(600 * MB)
    upkeep = process.upkeep()
    process.used = 100 * MB
    assert not upkeep.look()
    process.kept += STEP_BYTES + 1
    assert upkeep.look()


THREADS = """
import ctypes, threading
from hybridtei.system import memory as heap
{limit}
lib = ctypes.CDLL(None)
lib.malloc.restype = ctypes.c_void_p
lib.open_memstream.restype = ctypes.c_void_p
together = threading.Barrier(20)
def ask():
    lib.malloc(5000)
    together.wait()
threads = [threading.Thread(target=ask) for _ in range(20)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
text, size = ctypes.c_char_p(), ctypes.c_size_t()
file = ctypes.c_void_p(lib.open_memstream(ctypes.byref(text), ctypes.byref(size)))
lib.malloc_info(0, file)
lib.fclose(file)
print(text.value.count(b"<heap "))
"""


def arenas_of(limit: str, environment: dict[str, str]) -> int:
    """How many heaps twenty threads have that ask for memory at once, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if name != heap.ARENAS}
    command = [sys.executable, "-c", THREADS.format(limit=limit)]
    return int(subprocess.run(command, env={**clean, **environment}, capture_output=True, check=True, timeout=120).stdout)


@needs_glibc
def test_threads_share_as_many_heaps_as_there_are_cores():
    assert arenas_of("heap.limit_heaps()", {}) <= heap.arenas()
    assert arenas_of("", heap.with_limited_heaps({})) <= heap.arenas()


@needs_glibc
def test_who_has_said_how_many_heaps_there_are_is_obeyed():
    assert arenas_of("heap.limit_heaps()", {heap.ARENAS: "9"}) == 9
    assert heap.with_limited_heaps({heap.ARENAS: "9", heap.MAPPED: "9"}) == {heap.ARENAS: "9", heap.MAPPED: "9"}


@needs_glibc
def test_freed_memory_goes_back_to_the_operating_system():
    """Blocks below the size that glibc maps by itself, of which the last stays: nothing of the heap's top can be given back."""
    allocate, free = ctypes.CDLL(None).malloc, ctypes.CDLL(None).free
    allocate.restype, free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    blocks = []
    for _ in range(200):
        blocks.append(allocate(BLOCK))
        ctypes.memset(blocks[-1], 1, BLOCK)
    used = sum(map(pages_held, blocks))
    for block in blocks[:-1]:
        free(block)
    heap.trim()
    kept = sum(map(pages_held, blocks[:-1]))
    free(blocks[-1])
    assert used >= 200 * (BLOCK // PAGESIZE - 1)
    assert kept < used / 10  # where other threads have taken some of it again


BLOCK = 60_000


def pages_held(block: int) -> int:
    """How many of the pages that lie in a block as a whole are in physical memory."""
    first, end = -(-block // PAGESIZE), (block + BLOCK) // PAGESIZE
    told = (ctypes.c_ubyte * (end - first))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(first * PAGESIZE), (end - first) * PAGESIZE, told) == 0
    return sum(page & 1 for page in told)


def keepers() -> int:
    """Threads that look after memory, those of servers that other tests run included."""
    return [thread.name for thread in threading.enumerate()].count("heap")


@needs_glibc
def test_holders_free_what_they_keep_and_one_that_fails_stops_no_other() -> None:
    class Counting:
        calls = 0

        def __init__(self, error: Exception | None = None) -> None:
            self.error = error

        def free_unused(self) -> None:
            self.calls += 1
            if self.error is not None:
                raise self.error

    holders = [Counting(RuntimeError("unloaded")), Counting(), Counting()]
    for holder in holders:
        heap.register(holder)
    heap.trim()
    assert [holder.calls for holder in holders] == [1, 1, 1]
    del holder, holders[0]
    heap.trim()
    assert [holder.calls for holder in holders] == [2, 2]


def test_a_keeper_looks_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch):
    looked = threading.Event()
    monkeypatch.setattr(Upkeep, "look", lambda _self: bool(looked.set()))
    keeper, others = Keeper(seconds=0.001), keepers()
    keeper.start()
    assert looked.wait(120)
    assert keepers() == others + 1
    keeper.stop()
    assert keepers() == others


def test_a_keeper_that_never_started_may_be_stopped():
    keeper, others = Keeper(), keepers()
    keeper.stop()
    assert keepers() == others


def test_where_nobody_tells_what_is_held_no_thread_runs(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setattr(heap, "HELD", tmp_path / "statm")
    keeper, others = Keeper(), keepers()
    keeper.start()
    assert keepers() == others
    keeper.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
def test_a_discarded_array_takes_no_pages_and_its_neighbours_stay() -> None:
    numbers = np.ones(1_000_000, np.float32)
    heap.discard(numbers[100_000:900_000])
    pages = PAGESIZE // numbers.itemsize
    assert numbers[:100_000].all()
    assert numbers[900_000:].all()
    assert np.count_nonzero(numbers[100_000:900_000]) < 2 * pages
    heap.discard(numbers[:3])
    assert numbers[:3].all()
