"""Reads lines of `strace -f -y`: DNS look-ups, connections, and files that were made outside some
folders."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

CALLS = (
    "connect,sendto,sendmsg,sendmmsg,open,openat,creat,mkdir,mkdirat,mknod,mknodat,link,linkat,symlink,symlinkat,"
    "rename,renameat,renameat2"
)
# With -t too
CALL = re.compile(r"^\d+ +(?:[\d:.]+ +)?(\w+)\((.*)")
QUOTED = re.compile(r'(?:<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
ADDRESS = re.compile(r'sin6?_port=htons\((\d+)\).*?(?:inet_addr\("|inet_pton\(AF_INET6, ")([^"]+)"')
UNIX = re.compile(r'sun_path=@?"([^"]*)"')
RESOLVER_FILES = frozenset({"/etc/resolv.conf", "/etc/hosts", "/etc/host.conf"})
# Asked for users too, so that it proves no look-up
NAME_CACHE = "/nscd/socket"
DEVICES = ("/dev/", "/proc/", "/sys/", "/memfd:")
DNS_PORT = 53


class Finding(NamedTuple):
    """`what`: "look-up", "connection" or "file"; `where`: an address, or a path."""

    what: str
    where: str


def findings(
    lines: Iterable[str], folders: Sequence[Path], working_folder: Path
) -> Iterator[Finding]:
    """Yield the unexpected calls. `folders`: files and sockets may be made below these, and folders
    above them."""
    for line in lines:
        if (found := CALL.match(line)) is None:
            continue
        call, rest = found.groups()
        if call == "connect" or call.startswith("send"):
            yield from _addresses(rest, folders)
        elif call in ("open", "openat"):
            yield from _opened(rest, folders, working_folder)
        else:
            made = _paths(rest, working_folder)[-1:]
            above = call.startswith("mkdir") and any(
                folder.is_relative_to(path) for path in made for folder in folders
            )
            yield from () if above else _outside(made, folders)


def _addresses(rest: str, folders: Sequence[Path]) -> Iterator[Finding]:
    for port, host in ADDRESS.findall(rest):
        yield Finding("look-up" if int(port) == DNS_PORT else "connection", f"{host}:{port}")
    for path in UNIX.findall(rest):
        if not path.endswith(NAME_CACHE) and not any(
            Path(path).is_relative_to(folder) for folder in folders
        ):
            yield Finding("connection", path)


def _opened(rest: str, folders: Sequence[Path], working_folder: Path) -> Iterator[Finding]:
    paths = _paths(rest, working_folder)[:1]
    if paths and paths[0] in RESOLVER_FILES:
        yield Finding("look-up", paths[0])
    elif "O_CREAT" in rest or "O_TMPFILE" in rest:
        yield from _outside(paths, folders)


def _outside(paths: Sequence[str], folders: Sequence[Path]) -> Iterator[Finding]:
    for path in paths:
        if not path.startswith(DEVICES) and not any(
            Path(path).is_relative_to(folder) for folder in folders
        ):
            yield Finding("file", path)


def _paths(rest: str, working_folder: Path) -> list[str]:
    """Return the paths among a call's arguments: relative ones joined to the folder that `-y`
    names, or the working one."""
    return [
        os.path.normpath(os.path.join(working_folder, folder, path))
        for folder, path in QUOTED.findall(rest)
    ]
