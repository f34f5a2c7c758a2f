"""How much physical memory the process of the tests holds."""

import gc
from contextlib import contextmanager
from mmap import PAGESIZE
from pathlib import Path


def resident():
    """Bytes. Raises OSError on systems other than Linux."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGESIZE


@contextmanager
def leaving(limit):
    """The block leaves at most `limit` bytes, without a garbage collection: the next may come after
    thousands of requests."""
    gc.collect()
    gc.disable()
    try:
        before = resident()
        yield
        assert resident() - before < limit
    finally:
        gc.enable()
