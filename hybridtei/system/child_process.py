"""Starts Python processes of this package so that they find no modules in the working folder.

`python -m` and `python -c` search the working folder before the standard library, and an empty or relative entry
of `PYTHONPATH` means that folder too. A user who runs `hybridtei ingest .` may have strangers' files there, `msgspec.py` among
them.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

HOME = str(Path(__file__).parents[2])  # where this package lies
NEUTRAL = "/"  # a working folder for processes that are given absolute paths only


def command(*words: str) -> list[str]:
    """Python with these words, such as `-m`, a module, its arguments; `environment()` belongs to it."""
    return [sys.executable, "-P", *words]


def environment() -> dict[str, str]:
    """Return this process's environment with a `PYTHONPATH` of `search_path()`."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}


def search_path() -> list[str]:
    """Return this process's `sys.path` for a child: absolute folders, and the working folder only where an absolute entry of
    `PYTHONPATH` names it, or this package lies in it."""
    named = {HOME, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    folders = [path for path in sys.path if os.path.isabs(path) and (path in named or not _is_working_folder(path))]
    return list(dict.fromkeys(folders if HOME in folders else [*folders, HOME]))


def _is_working_folder(path: str) -> bool:
    try:
        return os.path.samefile(path, ".")
    except OSError:  # no such folder
        return False


OFF = {
    "ORT_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",  # hf_xet reads it too
    "RAY_USAGE_STATS_ENABLED": "0",
}


def turn_off() -> None:
    """Set each variable that the user has not set; warn where ONNX Runtime was imported before and may report already."""
    if "onnxruntime" in sys.modules and "ORT_DISABLE_TELEMETRY" not in os.environ:
        warnings.warn(
            "onnxruntime was imported before hybridtei, so hybridtei cannot turn off the usage reports that it sends to its "
            "maker: import hybridtei first, or set ORT_DISABLE_TELEMETRY=1 in the environment",
            RuntimeWarning,
            stacklevel=3,
        )
    for name, value in OFF.items():
        os.environ.setdefault(name, value)
