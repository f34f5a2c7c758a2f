"""How much physical memory the process of the tests holds."""

from mmap import PAGESIZE
from pathlib import Path


def resident():
    """Bytes. Raises OSError on systems other than Linux."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGESIZE
