"""Log lines on standard output: text, or one JSON object a line. Neither can be forged: line breaks of input are escaped.

A thread writes all lines in order: a full pipe without a reader would stop the event loop. What is logged
within a request (TEI logs each) is written at most a tenth of a second later and many lines at once: a write a line would cost
more than the line. Everything else is written at once, and so is whatever waited before it.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import msgspec
import orjson

from hybridtei.config import fields_of
from hybridtei.observability.tracing import CURRENT, Span

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # what could end a line or steer a terminal

OFF = logging.CRITICAL + 1
LEVELS = {
    **{"trace": logging.DEBUG, "debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR},
    **{
        "off": OFF,
        "0": OFF,
        "1": logging.ERROR,
        "2": logging.WARNING,
        "3": logging.INFO,
        "4": logging.DEBUG,
        "5": logging.DEBUG,
    },
}
NAMES = {logging.WARNING: "WARN", logging.CRITICAL: "ERROR"}  # TEI's, where they differ
# A filter: level, target, target=level; a target may have [span{field=value}], which is not looked at.
DIRECTIVE = re.compile(r"(?P<target>[A-Za-z_][\w:.\-]*)?(?:\[[^\]]*\])?(?:=(?P<level>\w+))?")
TARGETS = {
    "text_embeddings_router": "hybridtei",
    "text_embeddings_core": "hybridtei.engine",
    "text_embeddings_backend": "hybridtei.backends",
}
NOISY = ("httpx", "httpcore", "urllib3", "filelock", "uvicorn.error", "opentelemetry")

GATHER_SECONDS = 0.1
LINES_WAITING, CHARACTERS_WAITING = 20_000, 8_000_000  # beyond, lines are left out and counted
FLUSH_SECONDS = 1.0


class TextFormatter(logging.Formatter):
    """`timestamp LEVEL spans: target: file:line: message`, as TEI's."""

    def format(self, record: logging.LogRecord) -> str:
        span = CURRENT.get()
        spans = "" if span is None else f"{':'.join(map(_written, span.from_outermost()))}: "
        message = _escaped(record.getMessage())
        line = f"{_stamp(record)} {_level(record):>5} {spans}{record.name}: {record.filename}:{record.lineno}: {message}"
        if record.exc_info is None:
            return line
        trace = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"    {_escaped(part)}" for part in trace)])  # set in, so that none looks like a line


class JsonFormatter(logging.Formatter):
    """One JSON object a line with TEI's keys; with `spans`, lines of requests hold `span` and `spans`. A record's `facts`,
    which are what its message says, stand beside it."""

    def __init__(self, *, spans: bool = True) -> None:
        super().__init__()
        self._spans = spans

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "timestamp": _stamp(record),
            "level": _level(record),
            "message": record.getMessage(),
            "target": record.name,
            "filename": record.filename,
            "line_number": record.lineno,
        }
        if hasattr(record, "facts"):
            entry["facts"] = record.facts
        span = CURRENT.get() if self._spans else None
        if span is not None:
            chain = [{**one.fields(), "name": one.name} for one in span.from_outermost()]
            entry |= {"span": chain[-1], "spans": chain}
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode()


class GatheringHandler(logging.Handler):
    """Gives lines to a thread of its own, which alone writes them to standard output: logging never waits for a reader.

    A fatal line is waited for, and so is all that was logged when the process ends, but for FLUSH_SECONDS at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stdout
        self._descriptor = _descriptor(self._stream)
        self._lines: deque[str] = deque()  # its ends are safe between threads
        # Each count grows in one thread only: here, and there the same of what is done with.
        self._given = self._given_characters = self._left_out = 0
        self._written = self._written_characters = self._left_out_told = 0
        self._is_stuck = False  # a flush waited in vain, and nothing has been written since
        self._some, self._urgent, self._progress = threading.Event(), threading.Event(), threading.Condition()
        threading.Thread(target=self._write_on, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        is_fatal = record.levelno >= logging.CRITICAL
        if self._is_full() and (self._is_stuck or not is_fatal):
            self._left_out += 1
            return
        line = self.format(record)
        self._lines.append(line)
        self._given += 1
        self._given_characters += len(line)
        if CURRENT.get() is None or is_fatal:
            self._urgent.set()
        if not self._some.is_set():
            self._some.set()
        if is_fatal and not self._is_stuck:
            self.flush()

    def flush(self) -> None:
        """Wait until every line logged so far is written, for at most FLUSH_SECONDS."""
        given = self._given
        self._urgent.set()
        self._some.set()
        with self._progress:
            self._is_stuck = not self._progress.wait_for(lambda: self._written >= given, FLUSH_SECONDS)

    def _is_full(self) -> bool:
        waiting = self._given_characters - self._written_characters
        return len(self._lines) >= LINES_WAITING or waiting >= CHARACTERS_WAITING

    def _write_on(self) -> None:
        while True:
            self._some.wait()
            self._urgent.wait(GATHER_SECONDS)
            self._some.clear()  # before looking: what comes after sets it again
            self._urgent.clear()
            for piece in _pieces(self._taken()):
                with suppress(OSError, ValueError):  # its reader has gone, or it is closed: there is nowhere to tell
                    self._write(piece)
                self._is_stuck = False
            with self._progress:
                self._progress.notify_all()

    def _taken(self) -> Iterator[str]:
        """Yield waiting lines, and a note of how many were left out. A line counts as written once the next is asked for."""
        for _ in range(len(self._lines)):
            line = self._lines.popleft()
            yield line
            self._written += 1
            self._written_characters += len(line)
        missing = self._left_out - self._left_out_told
        if missing:
            self._left_out_told += missing
            yield self.format(_left_out(missing))

    def _write(self, piece: str) -> None:
        """Write past the stream's own buffer: a thread blocked inside it would abort the end of the process."""
        if self._descriptor is None:
            self._stream.write(piece)
            self._stream.flush()
            return
        left = memoryview(piece.encode(self._stream.encoding, "backslashreplace"))
        while left:
            try:
                left = left[os.write(self._descriptor, left) :]
            except BlockingIOError:  # another process that shares the pipe made it so
                select.select([], [self._descriptor], [])


def _descriptor(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return None


def _pieces(lines: Iterable[str]) -> Iterator[str]:
    """Join whole lines, as many as a pipe takes at once: otherwise processes that share it would mix their lines."""
    piece: list[str] = []
    size = 0
    for line in lines:
        length = len(line.encode(errors="replace")) + 1
        if piece and size + length > select.PIPE_BUF:
            yield "".join(piece)
            piece, size = [], 0
        piece.append(f"{line}\n")
        size += length
    if piece:
        yield "".join(piece)


def _left_out(count: int) -> logging.LogRecord:
    message = "%d lines were left out here: standard output takes them too slowly"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (count,), None)


def configure(*, json_output: bool, level: str, spans: bool = True) -> None:
    """Send everything to standard output from now on. `level`: a filter as TEI takes it; `spans`: in JSON too."""
    base, targets = read_filter(level)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = GatheringHandler()
    handler.setFormatter(JsonFormatter(spans=spans) if json_output else TextFormatter())
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # not shown, and each takes time
    logging.basicConfig(handlers=[handler], level=base, force=True)
    for name in NOISY:
        logging.getLogger(name).setLevel(max(base, logging.WARNING))
    for name, threshold in targets.items():
        logging.getLogger(name).setLevel(threshold)


def read_filter(text: str) -> tuple[int, dict[str, int]]:
    """`warn,text_embeddings_router=debug` -> (level of all else, level of each named part); info for what cannot be read.

    As in TEI, parts that no directive names are silent where none is for all. Names are ours (`hybridtei.engine`) or TEI's.
    """
    base, targets = OFF, {}
    directives = [part.strip() for part in text.split(",") if part.strip()]
    for directive in directives:
        if directive.lower() in LEVELS:
            base = LEVELS[directive.lower()]
            continue
        found = DIRECTIVE.fullmatch(directive)
        if found is None or (found["level"] or "trace").lower() not in LEVELS:
            return logging.INFO, {}
        threshold, name = LEVELS[(found["level"] or "trace").lower()], _part(found["target"] or "")
        if not name:
            base = threshold
        elif found["level"] is None and not name.startswith("hybridtei"):  # a level misspelt, rather than a part
            return logging.INFO, {}
        else:
            targets[name] = threshold
    return (base, targets) if directives else (logging.INFO, {})


def _part(target: str) -> str:
    head, _, rest = target.replace("::", ".").partition(".")
    return ".".join(filter(None, (TARGETS.get(head, head), rest)))


def _written(span: Span) -> str:
    fields = " ".join([f'{name}="{value}"' for name, value in span.fields().items()])
    return f"{span.name}{{{fields}}}" if fields else span.name


def _escaped(text: str) -> str:
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _level(record: logging.LogRecord) -> str:
    return NAMES.get(record.levelno, record.levelname)


def _stamp(record: logging.LogRecord) -> str:
    seconds, microseconds = divmod(int(record.created * 1e6), 1_000_000)
    return f"{_second(seconds)}.{microseconds:06}Z"


@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


HIDDEN = "[hidden]"
LETTERS_MOST, LETTERS_LEAST = 3, 5  # shown at either end; below so many letters none is


def masked(text: str) -> str:
    """Replace letters and digits by stars, but for a third of them, at most three, at either end."""
    letters = sum(character.isalnum() for character in text)
    ends = min(letters // 3, LETTERS_MOST) if letters >= LETTERS_LEAST else 0
    shown, place = [], 0
    for character in text:
        if character.isalnum():
            place += 1
        hides = character.isalnum() and ends < place <= letters - ends
        shown.append("*" if hides else character)
    return "".join(shown)


def described(settings: Sequence[msgspec.Struct], **beside: Any) -> str:
    """`Args { model_id: "BAA*/***", revision: None, … }`; `beside`: values to show besides, or instead."""
    parts = {}
    for one in settings:
        for field, _, meta in fields_of(type(one)):
            value = beside.pop(field.name, getattr(one, field.name))
            parts[field.name] = _shown(value, (meta.extra or {}).get("shown"))
    parts |= {name: _shown(value, None) for name, value in beside.items() if value is not None}
    return f"Args {{ {', '.join(f'{name}: {value}' for name, value in parts.items())} }}"


def _shown(value: Any, how: str | None) -> str:
    if isinstance(value, str):
        text = HIDDEN if how == "never" else masked(value) if how == "partly" else value
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_shown(item, how) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
