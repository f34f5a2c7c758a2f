"""Log lines: one a record, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei import logs

TEI_KEYS = ["timestamp", "level", "message", "target", "filename", "line_number"]


def record(message: str, *arguments: object, exc_info=None) -> logging.LogRecord:
    return logging.LogRecord("hybridtei.test", logging.INFO, "/x/somewhere.py", 12, message, arguments, exc_info)


@given(st.text())
def test_json_is_one_line_with_teis_keys(text):
    line = logs.JsonFormatter().format(record("said %s", text))
    assert "\n" not in line
    assert "\r" not in line
    entry = json.loads(line)
    assert list(entry) == TEI_KEYS
    assert entry["message"] == f"said {text}"
    assert (entry["level"], entry["target"], entry["filename"], entry["line_number"]) == (
        "INFO",
        "hybridtei.test",
        "somewhere.py",
        12,
    )


@given(st.text())
def test_text_is_one_line(text):
    line = logs.TextFormatter().format(record("said %s", text))
    assert line.splitlines() == [line]
    assert "\x1b" not in line
    assert " INFO hybridtei.test: somewhere.py:12: said " in line


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()])
def test_a_forged_line_stays_inside_its_own(formatter):
    forged = "x\n2026-01-01T00:00:00.000000Z     INFO hybridtei: cli.py:1: all is well\r\nagain"
    assert len(formatter.format(record(forged)).splitlines()) == 1


def test_a_trace_is_part_of_the_json():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = logs.JsonFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert len(line.splitlines()) == 1
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, put back afterwards."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    levels = {name: logging.getLogger(name).level for name in ("httpx", "httpcore", "urllib3", "filelock", "uvicorn.error")}
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)
    for name, before in levels.items():
        logging.getLogger(name).setLevel(before)


@pytest.mark.parametrize(
    ("level", "threshold"),
    [
        ("info", logging.INFO),
        ("warn", logging.WARNING),
        ("ERROR", logging.ERROR),
        ("debug", logging.DEBUG),
        ("trace", logging.DEBUG),
        ("warn,text_embeddings_router=debug", logging.WARNING),
        ("nonsense", logging.INFO),
        ("", logging.INFO),
    ],
)
def test_levels_as_tei_takes_them(root, monkeypatch, level, threshold):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    logs.configure(json_output=True, level=level)
    assert root.level == threshold
    logging.getLogger("hybridtei.x").error("hello")
    logging.getLogger("httpx").info("a request")
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["message"] == "hello"
