"""Where the process of an embedded engine listens, who may talk to it, and which of its kind alone has a folder.

A folder has one process, whose socket any command of the same user may join. The socket lies in a private folder, named by the
store folder's device and inode, so that every path of the folder leads to it. `flock` on a file in the folder decides who owns
it, and that file tells where the owner listens: the system unlocks it when that process ends, however it ends.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hybridtei.system.machine import private_folder

LOCK = ".lock"
LAYOUT = "layout.json"  # in the folder of each collection
MAX_SOCKET_PATH = 100  # bytes; Linux takes 107, macOS 103
MOUNTS = Path("/proc/self/mountinfo")
NETWORK_TYPES = frozenset({"afs", "ceph", "cifs", "fuse.sshfs", "glusterfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"})


class FolderError(Exception):
    """An error whose message goes to the caller."""


class FolderTaken(FolderError):
    """Another process holds the folder's lock."""


def socket_path(folder: Path) -> Path:
    """Return where the process of a store folder is to listen. Raises FolderError if no private folder can be used."""
    own, refused = os.environ.get("XDG_RUNTIME_DIR"), ""
    homes = [Path(path, f"hybridtei-{os.geteuid()}") for path in dict.fromkeys((tempfile.gettempdir(), "/tmp"))]
    for home in (*([Path(own, "hybridtei")] if own else []), *homes):
        if len(os.fsencode(home / _name(folder))) <= MAX_SOCKET_PATH:
            try:
                return private_folder(home) / _name(folder)
            except OSError as error:
                refused = f": {error}"
    raise FolderError(f"no folder for the socket of the embedded Qdrant engine{refused}: set XDG_RUNTIME_DIR to a private one")


def listening_at(folder: Path) -> Path | None:
    """Return the socket that the folder's process has written into the lock file, alive or not; None if there is none.

    Processes of one user may have other temporary folders, so the path is not computed again. A stranger's lock file could name
    any socket: the name must be the folder's own, and `is_own` checks who listens.
    """
    try:
        path = Path((folder / LOCK).read_text(encoding="utf-8"))
        return path if path.name == _name(folder) else None
    except (OSError, ValueError):
        return None


def _name(folder: Path) -> str:
    found = folder.stat()
    return hashlib.sha256(f"{found.st_dev}:{found.st_ino}".encode()).hexdigest()[:16] + ".sock"


def release() -> str:
    """What both ends of the socket must agree on."""
    from hybridtei import __version__

    return f"hybridtei {__version__} with qdrant-edge-py {version('qdrant-edge-py')}"


def is_own(connection: Any) -> bool:
    """Whether the other end of a socket belongs to this user, as far as the system tells."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = struct.Struct("3i")
    _, user, _ = credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return int(user) == os.geteuid()


def take(folder: Path) -> Any:
    """Return an open file whose lock no other process can take. Raises FolderTaken, or FolderError naming the reason."""
    import fcntl

    kind = _network_type(folder)
    if kind is not None:
        raise FolderError(
            f"{folder}: on a network file system ({kind}), whose locks and mapped files the embedded Qdrant engine cannot rely "
            "on: choose a folder on a disk of this machine, or run a Qdrant server"
        )
    try:
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise FolderError(f"{folder}: cannot be used as the folder of the embedded Qdrant engine: {error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise FolderTaken(
            f"{folder}: another process has this folder of the embedded Qdrant engine open, and does not answer to this user "
            "here: another user, container or machine, or hybridtei 0.1; stop it, choose another folder, or run a Qdrant server"
        ) from error
    return file


def _network_type(folder: Path) -> str | None:
    """The type of a network file system that holds the folder; None on others, and where the system does not tell."""
    device = folder.stat().st_dev
    key = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return None
    kinds = {fields[fields.index("-") + 1] for fields in mounts if "-" in fields and fields[2] == key}
    return min(kinds & NETWORK_TYPES, default=None)
