"""Log lines on standard output: text, or one JSON object a line. Line breaks of inputs are escaped: no input can forge a line.

A thread writes all lines in order, a tenth of a second after they are logged, since a full pipe would block the event loop.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from typing import Any

import msgspec
import orjson

from hybridtei.config import fields_of
from hybridtei.system.tracing import CURRENT, HandlerSpan

CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u2028\u2029]"
)  # characters that end a line or control a terminal

OFF = logging.CRITICAL + 1
LEVELS = {"off": OFF, "error": logging.ERROR, "warn": logging.WARNING, "info": logging.INFO}
LEVELS |= {"debug": logging.DEBUG, "trace": logging.DEBUG}
LEVELS |= {str(number): level for number, level in enumerate(LEVELS.values())}
NAMES = {logging.WARNING: "WARN", logging.CRITICAL: "ERROR"}  # TEI's names of levels
# A filter: level, target, target=level. A target's [span{field=value}] is ignored.
DIRECTIVE = re.compile(r"(?P<target>[A-Za-z_][\w:.\-]*)?(?:\[[^\]]*\])?(?:=(?P<level>\w+))?")
TARGETS = {
    "text_embeddings_router": "hybridtei",
    "text_embeddings_core": "hybridtei.inference.engine",
    "text_embeddings_backend": "hybridtei.inference.backends",
}
NOISY = ("httpx", "httpcore", "urllib3", "filelock", "uvicorn.error", "opentelemetry")

GATHER_SECONDS = 0.1
LINES_WAITING = 8_000  # further lines are dropped and counted
FLUSH_SECONDS = 1.0
SELDOM_SECONDS = 60.0


class TextFormatter(logging.Formatter):
    """`timestamp LEVEL spans: target: file:line: message`, as in TEI."""

    def format(self, record: logging.LogRecord) -> str:
        span = CURRENT.get()
        spans = "" if span is None else f"{':'.join(map(_written, span.from_outermost()))}: "
        message = _escaped(record.getMessage())
        line = f"{_stamp(record)} {_level(record):>5} {spans}{record.name}: {record.filename}:{record.lineno}: {message}"
        trace = self.formatException(record.exc_info).split("\n") if record.exc_info else []
        return "\n".join(
            [line, *(f"    {_escaped(part)}" for part in trace)]
        )  # indented: no log line


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with TEI's keys. `spans`: lines of requests have `span` and `spans`. A record's `facts` hold the
    message's values for programs."""

    def __init__(self, *, spans: bool = True) -> None:
        super().__init__()
        self._spans = spans

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "timestamp": _stamp(record),
            "level": _level(record),
            "message": record.getMessage().encode("utf-8", "backslashreplace").decode(),
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
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode()


class SeldomFilter(logging.Filter):
    """Passes one line of OpenTelemetry's a minute, without its traceback: while a collector is away,
    every export fails."""

    def __init__(self) -> None:
        super().__init__()
        self._passed = -SELDOM_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry"):
            return True
        if record.created - self._passed < SELDOM_SECONDS:
            return False
        self._passed = record.created
        if record.exc_info and record.exc_info[1] is not None:
            record.msg, record.args = f"{record.getMessage()}: {record.exc_info[1]!r}", ()
        record.exc_info = None
        return True


class LineHandler(QueueHandler):
    """Passes lines to the only thread that writes, so logging never waits for a reader. The caller's thread formats the line,
    since its span and arguments belong to that thread.

    The queue's `put` is reentrant, since a destructor may log during a `put`.
    """

    def __init__(self) -> None:
        self._lines: SimpleQueue[Any] = SimpleQueue()
        super().__init__(self._lines)
        self._left_out = 0
        LineListener(self._lines).start()

    def prepare(self, record: logging.LogRecord) -> str:
        return f"{self.format(record)}\n"

    def enqueue(self, record: Any) -> None:
        """Queue a line, or count it as dropped if LINES_WAITING wait already."""
        if self._lines.qsize() >= LINES_WAITING:
            self._left_out += 1
            return
        self._tell_left_out()
        self._lines.put(record)

    def flush(self) -> None:
        """Wait at most FLUSH_SECONDS until every line logged so far is written."""
        self._tell_left_out()
        written = threading.Event()
        self._lines.put(written)
        written.wait(FLUSH_SECONDS)

    def _tell_left_out(self) -> None:
        if self._left_out:
            message = "%d lines were left out here: standard output is too slow"
            record = logging.LogRecord(
                __name__, logging.WARNING, __file__, 0, message, (self._left_out,), None
            )
            self._left_out = 0
            self._lines.put(self.prepare(record))


class LineListener(QueueListener):
    """Writes the lines of GATHER_SECONDS to standard output by one write, since a write a line costs more than the line.

    It bypasses the stream's buffer: at the end of the process, a thread blocked inside the buffer makes Python abort.
    """

    def __init__(self, lines: SimpleQueue[Any]) -> None:
        super().__init__(lines)
        self._lines = lines
        self._stream = sys.stdout
        self._encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._descriptor: int | None = None
        with suppress(AttributeError, OSError, ValueError):
            self._descriptor = self._stream.fileno()
        self._piece = b""

    def dequeue(self, block: bool) -> Any:
        """Return the next line. If the queue was empty, first let more lines gather."""
        is_first = self._lines.empty()
        line = self._lines.get(block)
        if is_first:
            time.sleep(GATHER_SECONDS)
        return line

    def handle(self, record: Any) -> None:
        """Collect a line and write all collected ones when the queue is empty. Set an event once all earlier lines are written.

        Each write has whole lines, at most as many as a pipe takes at once: otherwise processes that share it would mix lines.
        """
        line = (
            b""
            if isinstance(record, threading.Event)
            else record.encode(self._encoding, "backslashreplace")
        )
        if len(self._piece) + len(line) > select.PIPE_BUF:
            self._write()
        self._piece += line
        if not line or self._lines.empty():
            self._write()
        if not line:
            record.set()

    def _write(self) -> None:
        left, self._piece = memoryview(self._piece), b""
        with suppress(
            OSError, ValueError
        ):  # the reader has ended or the stream is closed: the error cannot be reported
            if self._descriptor is None:
                self._stream.write(str(left, self._encoding))
                self._stream.flush()
                return
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:  # another process made the shared pipe non-blocking
                    select.select([], [self._descriptor], [])


def configure(*, json_output: bool, level: str, spans: bool = True) -> None:
    """Send all log records to standard output from now on. `level`: a filter in TEI's format; `spans`: write them in JSON."""
    base, targets = read_filter(level)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    handler = LineHandler()
    handler.addFilter(SeldomFilter())
    handler.setFormatter(JsonFormatter(spans=spans) if json_output else TextFormatter())
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = (
        False  # not shown, and slow
    )
    logging.basicConfig(handlers=[handler], level=base, force=True)
    for name, threshold in (dict.fromkeys(NOISY, max(base, logging.WARNING)) | targets).items():
        logging.getLogger(name).setLevel(threshold)


def read_filter(text: str) -> tuple[int, dict[str, int]]:
    """`warn,text_embeddings_router=debug` -> (default level, level of each named part). Unreadable parts mean info.

    As in TEI, unnamed parts are silent if no directive is for all parts. Names are modules (`hybridtei.inference.engine`) or
    TEI's.
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
        elif found["level"] is None and not name.startswith(
            "hybridtei"
        ):  # a misspelt level, not the name of a part
            return logging.INFO, {}
        else:
            targets[name] = threshold
    return (base, targets) if directives else (logging.INFO, {})


def _part(target: str) -> str:
    head, _, rest = target.replace("::", ".").partition(".")
    return ".".join(filter(None, (TARGETS.get(head, head), rest)))


def _written(span: HandlerSpan) -> str:
    fields = " ".join([f'{name}="{value}"' for name, value in span.fields().items()])
    return f"{span.name}{{{fields}}}" if fields else span.name


def _escaped(text: str) -> str:
    return CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _level(record: logging.LogRecord) -> str:
    return NAMES.get(record.levelno, record.levelname)


def _stamp(record: logging.LogRecord) -> str:
    seconds, microseconds = divmod(int(record.created * 1e6), 1_000_000)
    return f"{_second(seconds)}.{microseconds:06}Z"


@lru_cache(maxsize=4)  # takes a third of `isoformat`'s time
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


HIDDEN = "[hidden]"
LETTERS_MOST, LETTERS_LEAST = 3, 5  # characters shown at each end; shorter values show none


def masked(text: str) -> str:
    """Replace letters and digits by stars, except a third of them, at most three, at each end."""
    letters = [place for place, character in enumerate(text) if character.isalnum()]
    ends = min(len(letters) // 3, LETTERS_MOST) if len(letters) >= LETTERS_LEAST else 0
    hidden = {*letters[ends : len(letters) - ends]}
    return "".join("*" if place in hidden else character for place, character in enumerate(text))


def described(settings: Sequence[msgspec.Struct], **beside: Any) -> str:
    """`Args { model_id: "BAA*/***", revision: None, … }`. `beside`: further values, or replacements."""
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
