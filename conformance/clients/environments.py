"""An environment for each group of compatible clients, made once, and again when its list changes.

    python conformance/clients/environments.py [GROUP …]

`requirements/GROUP.txt` is installed first, then `requirements/GROUP.no-deps.txt`, if there is one,
without what it asks for. The group `node` has JavaScript clients: npm installs
`requirements/node/package-lock.json`. Standard library only.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
FOLDER = CACHE / "hybridtei" / "conformance-clients"
NODE = "node"
# The groups whose clients are not in the extra `dev`; `tests/conformance/test_clients.py` runs them
SEPARATE = (
    "langchain",
    "llama_index",
    "haystack",
    "litellm",
    "llm",
    "voyage_0_3",
    "voyage_0_4",
    NODE,
)
# Has the digest of the installed list; written last, so an incomplete environment lacks it
MARK = "made-of"
INSTALL_SECONDS = 900


class InstallError(Exception):
    """An environment that could not be made."""


def ready(group: str, folder: Path = FOLDER) -> Path | None:
    """The group's environment below `folder`, if it is complete and as its lists say."""
    mark = folder / group / MARK
    if mark.exists() and mark.read_text() == digest(_lists(group)):
        return folder / group
    return None


def environment(group: str, folder: Path = FOLDER) -> Path:
    """The group's environment below `folder`, which is made if need be. Raises InstallError."""
    home = ready(group, folder)
    if home is not None:
        return home
    home = folder / group
    shutil.rmtree(home, ignore_errors=True)
    if group == NODE:
        _install_packages(home)
    else:
        _install_lists(group, home)
    (home / MARK).write_text(digest(_lists(group)))
    return home


def _lists(group: str) -> list[Path]:
    if group == NODE:
        return [REQUIREMENTS / NODE / name for name in ("package.json", "package-lock.json")]
    lists = (REQUIREMENTS / f"{group}.txt", REQUIREMENTS / f"{group}.no-deps.txt")
    return [path for path in lists if path.exists()]


def _install_lists(group: str, home: Path) -> None:
    venv.create(home, with_pip=True)
    install = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    for path in _lists(group):
        bare = ["--no-deps"] if path.name.endswith(".no-deps.txt") else []
        _run([*install, "--disable-pip-version-check", *bare, "-r", str(path)])


def _install_packages(home: Path) -> None:
    if shutil.which("npm") is None:
        raise InstallError("npm is not installed")
    home.mkdir(parents=True)
    for path in _lists(NODE):
        shutil.copy(path, home)
    _run(["npm", "ci", "--prefix", str(home), "--ignore-scripts", "--no-audit", "--no-fund"])


def command(script: str, group: str | None, home: Path | None) -> list[str]:
    """The command that runs a script of `calls/`. `home`: the group's environment; None: this one.
    Raises InstallError if there is no Node."""
    if group != NODE:
        python = sys.executable if home is None else home / "bin" / "python"
        return [str(python), str(HERE / "calls" / f"{script}.py")]
    assert home is not None
    # Node looks for packages beside a script
    for path in (HERE / "harness.mjs", HERE / "calls" / f"{script}.mjs"):
        shutil.copy(path, home)
    return [_node(), str(home / f"{script}.mjs")]


def _node() -> str:
    """Playwright's Node, which is newer than most systems', or the system's."""
    playwright = find_spec("playwright")
    if playwright is not None and playwright.origin is not None:
        return str(Path(playwright.origin).parent / "driver" / "node")
    node = shutil.which("node")
    if node is None:
        raise InstallError("node is not installed")
    return node


def digest(lists: list[Path]) -> str:
    """The digest of the lists and of the Python release."""
    whole = b"\0".join([sys.version.encode(), *(path.read_bytes() for path in lists)])
    return hashlib.sha256(whole).hexdigest()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"not installed within {INSTALL_SECONDS} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise InstallError("; ".join(errors[-2:]) or done.stderr[-300:])


def main(groups: Sequence[str]) -> int:
    """Make the environments of the groups, two at a time. Exit status: 1 if one could not be
    made."""

    def make(group: str) -> bool:
        begin = time.monotonic()
        try:
            environment(group)
        except InstallError as error:
            print(f"{group}: {error}", flush=True)
            return False
        print(f"{group}: {time.monotonic() - begin:.0f} s", flush=True)
        return True

    with ThreadPoolExecutor(2) as pool:
        return 0 if all(list(pool.map(make, groups))) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or SEPARATE))
