"""The cache folder of this user: exported graphs, measured curves, the embedded model's checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from hybridtei.errors import LoadError


def cache_folder(kind: str) -> Path:
    """HYBRIDTEI_CACHE itself, or the folder of that kind below the user's cache folder. Raises LoadError without a home."""
    own, caches = os.environ.get("HYBRIDTEI_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    try:
        return (Path(caches) if caches else Path.home() / ".cache") / "hybridtei" / kind
    except RuntimeError as error:  # a container's user without HOME and without an entry in /etc/passwd
        raise LoadError("this user has no home folder to keep a cache in: set HYBRIDTEI_CACHE to a folder") from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` at the end: whole or not at all, whoever else writes the same meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid4().hex}.part")
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()
