"""Render a checkpoint's chat template, in a process of its own: a template is a program of a
stranger.

`{{ 9 ** 9999999 }}` is one call into C that holds the interpreter's lock, and two nested loops
never end, so the process is bounded in time and memory. It runs this file alone, which imports
jinja2 and nothing of hybridtei.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

MAX_SECONDS = 10
MAX_BYTES = 1 << 30
MAX_CHARACTERS = 100_000
# The exit status where the package is missing
NO_JINJA = 3


class TemplateFailure(Exception):
    """A template that cannot be rendered within the bounds. `is_missing`: jinja2 is not
    installed."""

    def __init__(self, reason: str, *, is_missing: bool = False) -> None:
        super().__init__(reason)
        self.is_missing = is_missing


def render(source: str, values: Mapping[str, Any]) -> str:
    """Return the text. Raises TemplateFailure."""
    command = [sys.executable, "-I", "-X", "utf8", __file__]
    task = {"source": source, "values": values, "seconds": MAX_SECONDS}
    try:
        process = subprocess.run(
            command,
            input=json.dumps(task).encode(),
            capture_output=True,
            timeout=MAX_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TemplateFailure(f"it takes longer than {MAX_SECONDS} s") from None
    if process.returncode == NO_JINJA:
        raise TemplateFailure("jinja2 is not installed", is_missing=True)
    if process.returncode < 0:
        raise TemplateFailure(f"it takes more than {MAX_SECONDS} s of the processor")
    if process.returncode:
        lines = process.stderr.decode(errors="replace").strip().splitlines()
        raise TemplateFailure(lines[-1] if lines else f"exit status {process.returncode}")
    return process.stdout.decode()


def _bound_this_process(seconds: int) -> None:
    try:
        import resource
    except ImportError:
        # Windows: the parent's time limit is the only bound
        return
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))


def _main() -> int:
    task = json.load(sys.stdin)
    _bound_this_process(task["seconds"])
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        return NO_JINJA

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
        autoescape=False,
    )
    environment.globals["raise_exception"] = raise_exception
    try:
        text = environment.from_string(task["source"]).render(task["values"])
    except Exception as error:
        # A template can raise any exception
        sys.stderr.write(f"{type(error).__name__}: {str(error)[:1000]}\n")
        return 1
    sys.stdout.write(text[:MAX_CHARACTERS])
    return 0


if __name__ == "__main__":
    sys.exit(_main())
