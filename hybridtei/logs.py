"""Log lines on standard output: text, or one JSON object a line. Neither can be forged: line breaks of input are escaped."""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime

import orjson

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # what could end a line or steer a terminal

# TEI's filters may name parts of its own code after a comma; the first word counts here.
LEVELS = {"trace": logging.DEBUG, "debug": logging.DEBUG, "info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class TextFormatter(logging.Formatter):
    """`timestamp LEVEL target: file:line: message`."""

    def format(self, record: logging.LogRecord) -> str:
        message = CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), record.getMessage())
        line = f"{_stamp(record)} {record.levelname:>8} {record.name}: {record.filename}:{record.lineno}: {message}"
        return line if record.exc_info is None else f"{line}\n{self.formatException(record.exc_info)}"


class JsonFormatter(logging.Formatter):
    """TEI's keys."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "timestamp": _stamp(record),
            "level": record.levelname,
            "message": record.getMessage(),
            "target": record.name,
            "filename": record.filename,
            "line_number": record.lineno,
        }
        if record.exc_info is not None:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode()


def configure(*, json_output: bool, level: str) -> None:
    """Send everything to standard output from now on. An unknown level means info, as with TEI."""
    threshold = LEVELS.get(level.partition(",")[0].strip().lower(), logging.INFO)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(handlers=[handler], level=threshold, force=True)
    for noisy in ("httpx", "httpcore", "urllib3", "filelock", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(max(threshold, logging.WARNING))


def _stamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
