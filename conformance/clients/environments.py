"""A virtual environment for each group of compatible clients, made once, and again when its list
changes.

`requirements/GROUP.txt` is installed first, then `requirements/GROUP.no-deps.txt`, if there is one,
without what it asks for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
# Has the digest of the installed list; written last, so an incomplete environment lacks it
MARK = "made-of"
INSTALL_SECONDS = 900


class InstallError(Exception):
    """An environment that could not be made."""


def environment(group: str, folder: Path) -> Path:
    """The interpreter of the group's environment below `folder`. Raises InstallError."""
    home = folder / group
    python = home / "bin" / "python"
    lists = [
        path
        for path in (REQUIREMENTS / f"{group}.txt", REQUIREMENTS / f"{group}.no-deps.txt")
        if path.exists()
    ]
    wanted = digest(lists)
    mark = home / MARK
    if python.exists() and mark.exists() and mark.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, with_pip=True)
    for path in lists:
        bare = ["--no-deps"] if path.name.endswith(".no-deps.txt") else []
        _run(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                *bare,
                "-r",
                str(path),
            ]
        )
    mark.write_text(wanted)
    return python


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
