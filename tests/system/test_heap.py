"""Few heaps, and memory that goes back to the operating system when it is asked for."""

import ctypes
import os
import subprocess
import sys
from mmap import PAGESIZE

import pytest

from hybridtei.system import memory as heap

GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")
needs_glibc = pytest.mark.skipif(not GLIBC, reason="there is no malloc_trim here")


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


def arenas_of(limit, environment):
    """How many heaps twenty threads have that ask for memory at once, in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if name != heap.ARENAS}
    command = [sys.executable, "-c", THREADS.format(limit=limit)]
    return int(
        subprocess.run(
            command, env={**clean, **environment}, capture_output=True, check=True, timeout=120
        ).stdout
    )


@needs_glibc
def test_threads_share_as_many_heaps_as_there_are_cores():
    assert arenas_of("heap.limit_heaps()", {}) <= heap.arenas()


@needs_glibc
def test_who_has_said_how_many_heaps_there_are_is_obeyed():
    assert arenas_of("heap.limit_heaps()", {heap.ARENAS: "9"}) == 9


@needs_glibc
def test_freed_memory_goes_back_to_the_operating_system():
    """Blocks below the size that glibc maps by itself, of which the last stays: nothing of the
    heap's top can be given back."""
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
    # Where other threads have taken some of it again
    assert kept < used / 10


BLOCK = 60_000


def pages_held(block):
    """How many of the pages that lie in a block as a whole are in physical memory."""
    first, end = -(-block // PAGESIZE), (block + BLOCK) // PAGESIZE
    told = (ctypes.c_ubyte * (end - first))()
    assert (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(first * PAGESIZE), (end - first) * PAGESIZE, told)
        == 0
    )
    return sum(page & 1 for page in told)
