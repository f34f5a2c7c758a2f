"""What a command prints: no passwords of URLs; texts, titles and names of documents may hold
commands to a terminal (OSC 52 sets the clipboard)."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import Any, TextIO

HIDDEN = "[hidden]"
USER_OF_URL = re.compile(r"(?<=://)[^\s/\"'@]+@")
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"

# C0 but tab and line feed, DEL and C1. A progress bar starts what it writes with a carriage return.
CONTROLS = re.compile(r"(?!\A\r)[\x00-\x08\x0b-\x1f\x7f-\x9f]")
CONTROLS_OR_BOLD = re.compile(f"({re.escape(BOLD)}|{re.escape(PLAIN)})|{CONTROLS.pattern}")


def without_passwords(text: str) -> str:
    """The text, with `[hidden]` for user and password of each URL."""
    return USER_OF_URL.sub(f"{HIDDEN}@", text)


class TerminalStream:
    """A text stream that writes control characters as `\\u001b`; a terminal also gets the two
    sequences for bold text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pattern = CONTROLS_OR_BOLD if stream.isatty() else CONTROLS

    def write(self, text: str) -> int:
        return self._stream.write(self._pattern.sub(_escaped, text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _escaped(match: re.Match[str]) -> str:
    text = match[0]
    if len(text) > 1:
        return text
    return f"\\u{ord(text):04x}"


def safe_streams() -> ExitStack:
    """Return a context in which standard output and standard error write no control characters."""
    stack = ExitStack()
    stack.enter_context(redirect_stdout(TerminalStream(sys.stdout)))
    stack.enter_context(redirect_stderr(TerminalStream(sys.stderr)))
    return stack
