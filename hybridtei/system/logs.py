"""Log lines on standard output: text, or one JSON object a line. Line breaks of inputs are escaped:
no input can forge a line.

A thread writes all lines in order, a tenth of a second after they are logged, since a full pipe
would block the event loop.
"""

from __future__ import annotations

import logging
import os
import re
import select
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
from hybridtei.system.terminal import HIDDEN, without_passwords
from hybridtei.system.tracing import CURRENT, HandlerSpan

# Characters that end a line or control a terminal
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")

OFF = logging.CRITICAL + 1
LEVELS = {"off": OFF, "error": logging.ERROR, "warn": logging.WARNING, "info": logging.INFO}
LEVELS |= {"debug": logging.DEBUG, "trace": logging.DEBUG}
LEVELS |= {str(number): level for number, level in enumerate(LEVELS.values())}
# TEI's names of levels
NAMES = {logging.WARNING: "WARN", logging.CRITICAL: "ERROR"}
# A filter: level, target, target=level. A target's [span{field=value}] is ignored.
DIRECTIVE = re.compile(r"(?P<target>[A-Za-z_][\w:.\-]*)?(?:\[[^\]]*\])?(?:=(?P<level>\w+))?")
TARGETS = {
    "text_embeddings_router": "hybridtei",
    "text_embeddings_core": "hybridtei.inference.engine",
    "text_embeddings_backend": "hybridtei.inference.backends",
}
NOISY = ("httpx", "httpcore", "urllib3", "filelock", "uvicorn.error", "opentelemetry")

GATHER_SECONDS = 0.1
# Further lines are dropped.
LINES_WAITING = 8_000
FLUSH_SECONDS = 1.0
STANDARD_OUTPUT = 1
# The exporter of traces logs one failure a batch while its collector is away.
REPETITIVE = "opentelemetry"
REPETITIVE_SECONDS = 60.0


class TextFormatter(logging.Formatter):
    """`timestamp LEVEL spans: target: file:line: message`, as in TEI."""

    def format(self, record: logging.LogRecord) -> str:
        span, spans = CURRENT.get(), ""
        if span is not None:
            spans = f"{':'.join(map(_span_text, span.from_outermost()))}: "
        message = _escaped(record.getMessage())
        lines = [
            f"{_stamp(record)} {_level(record):>5} {spans}{record.name}: "
            f"{record.filename}:{record.lineno}: {message}"
        ]
        if record.exc_info and record.exc_info[0]:
            # Indented, so that no line of a trace looks like a log line
            trace = self.formatException(record.exc_info).split("\n")
            lines += [f"    {_escaped(line)}" for line in trace]
        return "\n".join(lines)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with TEI's keys. `spans`: lines of requests have `span` and `spans`.
    A record's `facts` hold the message's values for programs."""

    def __init__(self, *, spans: bool = True) -> None:
        super().__init__()
        self._spans = spans

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "timestamp": _stamp(record),
            "level": _level(record),
            "message": _valid(record.getMessage()),
            "target": record.name,
            "filename": record.filename,
            "line_number": record.lineno,
        }
        if hasattr(record, "facts"):
            entry["facts"] = record.facts
        span = CURRENT.get() if self._spans else None
        if span is not None:
            spans = [{**each.fields(), "name": each.name} for each in span.from_outermost()]
            entry |= {"span": spans[-1], "spans": spans}
        if record.exc_info and record.exc_info[0]:
            entry["exception"] = _valid(self.formatException(record.exc_info))
        return orjson.dumps(entry).decode()


class LineHandler(QueueHandler):
    """Queues lines, so logging never waits for a reader. It formats a line at once, since spans
    belong to the caller's context.

    The queue's `put` is reentrant, since a destructor may log during a `put`.
    """

    queue: SimpleQueue[Any]

    def __init__(self) -> None:
        super().__init__(SimpleQueue())
        LineListener(self.queue).start()

    def prepare(self, record: logging.LogRecord) -> str:
        return f"{self.format(record)}\n"

    def enqueue(self, record: Any) -> None:
        if self.queue.qsize() < LINES_WAITING:
            self.queue.put(record)

    def flush(self) -> None:
        """Wait at most FLUSH_SECONDS until every line logged so far is written."""
        written = threading.Event()
        self.queue.put(written)
        written.wait(FLUSH_SECONDS)


class LineListener(QueueListener):
    """Writes the lines of GATHER_SECONDS to standard output together, since a write a line costs
    more than the line.

    It bypasses `sys.stdout`: at the end of the process, a thread blocked inside its buffer makes
    Python abort.
    """

    queue: SimpleQueue[Any]

    def handle(self, record: Any) -> None:
        """Write all lines that wait, in pieces of whole lines that a pipe takes at once: otherwise
        processes that share it would mix lines. Set each event that `flush` queued."""
        time.sleep(GATHER_SECONDS)
        piece = b""
        while True:
            is_event = isinstance(record, threading.Event)
            line = b"" if is_event else record.encode(errors="backslashreplace")
            if is_event or len(piece) + len(line) > select.PIPE_BUF:
                _write(piece)
                piece = b""
            if is_event:
                record.set()
            piece += line
            if self.queue.empty():
                break
            record = self.dequeue(block=True)
        _write(piece)


def _write(piece: bytes) -> None:
    # If the reader has ended, the error cannot be reported
    with suppress(OSError):
        while piece:
            try:
                piece = piece[os.write(STANDARD_OUTPUT, piece) :]
            except BlockingIOError:
                # Another process made the shared pipe non-blocking
                select.select([], [STANDARD_OUTPUT], [])


class Repetitions:
    """A filter that passes one line a minute of the exporter of traces, and every line of other
    loggers."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(REPETITIVE):
            return True
        if record.created < self._next_s:
            return False
        self._next_s = record.created + REPETITIVE_SECONDS
        return True


def configure(*, json_output: bool, level: str, spans: bool = True) -> None:
    """Send all log records to standard output from now on. `level`: a filter in TEI's format;
    `spans`: write them in JSON."""
    base, targets = read_filter(level)
    handler = LineHandler()
    handler.addFilter(Repetitions())
    handler.setFormatter(JsonFormatter(spans=spans) if json_output else TextFormatter())
    # Python would look these up for each line, which does not show them
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.basicConfig(handlers=[handler], level=base, force=True)
    for name, threshold in (dict.fromkeys(NOISY, max(base, logging.WARNING)) | targets).items():
        logging.getLogger(name).setLevel(threshold)


def read_filter(text: str) -> tuple[int, dict[str, int]]:
    """`warn,text_embeddings_router=debug` -> (default level, level of each named part). Unreadable
    parts mean info.

    As in TEI, unnamed parts are silent if no directive is for all parts. Names are modules
    (`hybridtei.inference.engine`) or TEI's.
    """
    base = OFF
    targets = {}
    directives = [part.strip() for part in text.split(",") if part.strip()]
    for directive in directives:
        if directive.lower() in LEVELS:
            base = LEVELS[directive.lower()]
            continue
        match = DIRECTIVE.fullmatch(directive)
        if match is None or (match["level"] or "trace").lower() not in LEVELS:
            return logging.INFO, {}
        threshold = LEVELS[(match["level"] or "trace").lower()]
        name = _part(match["target"] or "")
        if not name:
            base = threshold
        elif match["level"] is None and not name.startswith("hybridtei"):
            # A misspelt level, not the name of a part
            return logging.INFO, {}
        else:
            targets[name] = threshold
    if not directives:
        return logging.INFO, {}
    return base, targets


def _part(target: str) -> str:
    head, _, rest = target.replace("::", ".").partition(".")
    return ".".join(filter(None, (TARGETS.get(head, head), rest)))


def _span_text(span: HandlerSpan) -> str:
    fields = " ".join([f'{name}="{value}"' for name, value in span.fields().items()])
    return f"{span.name}{{{fields}}}" if fields else span.name


def _valid(text: str) -> str:
    """Lone surrogates, as in names of files, become escapes."""
    return without_passwords(text).encode(errors="backslashreplace").decode()


def _escaped(text: str) -> str:
    shown = without_passwords(text)
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), shown)


def _level(record: logging.LogRecord) -> str:
    return NAMES.get(record.levelno, record.levelname)


def _stamp(record: logging.LogRecord) -> str:
    seconds, microseconds = divmod(int(record.created * 1e6), 1_000_000)
    return f"{_second(seconds)}.{microseconds:06}Z"


# Takes a third of `isoformat`'s time
@lru_cache(maxsize=4)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


SECRETS_OF_URL = re.compile(r"^.*(?=@)|(?<=\?).*")
# Characters shown at each end; values below LETTERS_LEAST show none
LETTERS_MOST = 3
LETTERS_LEAST = 5


def masked(text: str) -> str:
    """Replace letters and digits by stars, except a third of them, at most three, at each end."""
    letters = [place for place, character in enumerate(text) if character.isalnum()]
    ends = min(len(letters) // 3, LETTERS_MOST) if len(letters) >= LETTERS_LEAST else 0
    hidden = {*letters[ends : len(letters) - ends]}
    return "".join("*" if place in hidden else character for place, character in enumerate(text))


def described(settings: Sequence[msgspec.Struct], **others: Any) -> str:
    """`Args { model_id: "BAA*/***", revision: None, … }`. `others`: further values, or
    replacements."""
    parts = {}
    for config in settings:
        for field, _, meta in fields_of(type(config)):
            value = others.pop(field.name, getattr(config, field.name))
            parts[field.name] = _shown(value, (meta.extra or {}).get("shown"))
    parts |= {name: _shown(value, None) for name, value in others.items() if value is not None}
    return f"Args {{ {', '.join(f'{name}: {value}' for name, value in parts.items())} }}"


def _shown(value: Any, how: str | None) -> str:
    if isinstance(value, str):
        text = value
        if how == "never":
            text = HIDDEN
        elif how == "partly":
            text = masked(value)
        elif how == "url":
            text = SECRETS_OF_URL.sub(HIDDEN, value)
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_shown(item, how) for item in value)}]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
