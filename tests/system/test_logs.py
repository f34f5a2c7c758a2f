"""Log lines: one a record, whatever is in it."""

import io
import json
import logging
import select
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.outputs import Timings
from hybridtei.system import logs
from hybridtei.system.tracing import CURRENT, HandlerSpan


def flush() -> None:
    logging.getLogger().handlers[0].flush()


TEI_KEYS = ["timestamp", "level", "message", "target", "filename", "line_number"]


def record(message: str, *arguments: object, exc_info=None) -> logging.LogRecord:
    return logging.LogRecord(
        "hybridtei.test", logging.INFO, "/x/somewhere.py", 12, message, arguments, exc_info
    )


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


def test_a_trace_is_part_of_the_json():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = logs.JsonFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert len(line.splitlines()) == 1
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


@pytest.mark.parametrize(
    ("level", "threshold"),
    [
        ("warn", logging.WARNING),
        ("debug", logging.DEBUG),
        ("warn,text_embeddings_router=debug", logging.WARNING),
        (" Info , hyper=off", logging.INFO),
        ("text_embeddings_router=debug", logs.OFF),
        ("2", logging.WARNING),
        ("debug,=nonsense", logging.INFO),
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
    flush()
    (line,) = out.getvalue().splitlines()
    assert json.loads(line)["message"] == "hello"


@pytest.mark.parametrize(
    ("text", "targets"),
    [
        ("info", {}),
        ("warn,text_embeddings_router=debug", {"hybridtei": logging.DEBUG}),
        (
            "text_embeddings_core::infer=error,hyper=off",
            {"hybridtei.inference.engine.infer": logging.ERROR, "hyper": logs.OFF},
        ),
        ("info,hybridtei.inference.engine", {"hybridtei.inference.engine": logging.DEBUG}),
        (
            "info,hybridtei::inference::engine[span{a=1}]=warn",
            {"hybridtei.inference.engine": logging.WARNING},
        ),
    ],
)
def test_filters_name_parts(text, targets):
    assert logs.read_filter(text)[1] == targets


@given(st.text())
def test_any_filter_is_read(text):
    base, targets = logs.read_filter(text)
    assert isinstance(base, int)
    assert all(isinstance(level, int) for level in targets.values())


@pytest.fixture
def computed() -> Iterator[HandlerSpan]:
    """A span within another, as the current one."""
    span = HandlerSpan("embed", HandlerSpan("vertex_compatibility"))
    span.timings, span.total_ns = Timings(72_010, 2_000, 3_000_000), 5_123_000
    token = CURRENT.set(span)
    yield span
    CURRENT.reset(token)


TIMES = {
    "total_time": "5.123ms",
    "tokenization_time": "72.01µs",
    "queue_time": "2µs",
    "inference_time": "3ms",
}


def test_text_shows_spans_as_tei(computed):
    line = logs.TextFormatter().format(record("Success"))
    times = " ".join(f'{name}="{value}"' for name, value in TIMES.items())
    spans = f"vertex_compatibility:embed{{{times}}}"
    assert line.partition("Z")[2] == f"  INFO {spans}: hybridtei.test: somewhere.py:12: Success"


def test_json_shows_spans_unless_told_not_to(computed):
    entry = json.loads(logs.JsonFormatter().format(record("Success")))
    assert list(entry) == [*TEI_KEYS, "span", "spans"]
    assert entry["span"] == {**TIMES, "name": "embed"}
    assert entry["spans"] == [{"name": "vertex_compatibility"}, {**TIMES, "name": "embed"}]
    assert list(json.loads(logs.JsonFormatter(spans=False).format(record("Success")))) == TEI_KEYS


def test_levels_are_called_as_in_tei():
    for level, name in (
        (logging.WARNING, " WARN "),
        (logging.CRITICAL, "ERROR "),
        (logging.INFO, " INFO "),
    ):
        one = record("x")
        one.levelno, one.levelname = level, logging.getLevelName(level)
        assert f"Z {name}hybridtei.test" in logs.TextFormatter().format(one)


def test_a_trace_in_text_holds_no_line_that_looks_like_one():
    try:
        raise ValueError("two\n2026-01-01T00:00:00.000000Z  INFO forged: line\x1b")
    except ValueError:
        line = logs.TextFormatter().format(record("failed", exc_info=sys.exc_info()))
    assert "\x1b" not in line
    assert all(part.startswith("    ") for part in line.splitlines()[1:])


def messages_in(out: io.StringIO) -> list[str]:
    return [json.loads(line)["message"] for line in out.getvalue().splitlines()]


def test_lines_are_written_in_their_order_without_a_flush(root, monkeypatch):
    class Out(io.StringIO):
        def flush(self) -> None:
            if "last" in self.getvalue():
                written.set()

    written = threading.Event()
    monkeypatch.setattr(sys, "stdout", out := Out())
    logs.configure(json_output=True, level="info")
    for message in (*"01234", "last"):
        logging.getLogger("hybridtei.x").info(message)
    assert written.wait(60)
    assert messages_in(out) == [*"01234", "last"]


def test_lines_beyond_the_bound_are_left_out_and_counted(root, monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := Stuck())
    monkeypatch.setattr(logs, "LINES_WAITING", 3)
    logs.configure(json_output=True, level="info")
    logging.getLogger("hybridtei.x").info("taken")
    assert out.asked.wait(60)
    for number in range(10):
        logging.getLogger("hybridtei.x").info("%d", number)
    out.read.set()
    flush()
    assert messages_in(out) == [
        "taken",
        *"012",
        "7 lines were left out here: standard output is too slow",
    ]


class Stuck(io.StringIO):
    """It is not read until `read` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.read = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.asked.set()
        assert self.read.wait(60)
        return super().write(text)


def test_an_unread_output_stops_no_logger_and_loses_only_what_is_counted(root, monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := Stuck())
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(logs, "LINES_WAITING", 20)
    logs.configure(json_output=True, level="info")
    logging.getLogger("hybridtei.x").info("0")
    assert out.asked.wait(60)
    logged = threading.Event()

    def log() -> None:
        for number in range(1, 100):
            logging.getLogger("hybridtei.x").info("%d", number)
        flush()
        logged.set()

    threading.Thread(target=log, daemon=True).start()
    assert logged.wait(20), "logging waits for a reader"
    out.read.set()
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 60)
    flush()
    logging.getLogger("hybridtei.x").info("read again")
    flush()
    *numbers, note, last = messages_in(out)
    assert numbers == [str(number) for number in range(len(numbers))]
    assert note.startswith(f"{100 - len(numbers)} lines were left out")
    assert last == "read again"


def test_a_closed_output_ends_nothing(root, monkeypatch):
    out, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)  # where logging tells that it failed
    logs.configure(json_output=False, level="info")
    logging.getLogger("hybridtei.x").error("heard")
    flush()
    assert "heard" in out.getvalue()
    out.close()
    logging.getLogger("hybridtei.x").error("unheard")
    flush()
    assert errors.getvalue() == ""


@given(st.lists(st.text(st.characters(exclude_characters="\n"), max_size=3000), max_size=12))
def test_pieces_are_whole_lines_that_a_pipe_takes_at_once(texts):
    class Out(io.StringIO):
        def write(self, piece: str) -> int:
            pieces.append(piece)
            return len(piece)

    pieces: list[str] = []
    lines = [f"{text}\n" for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Out())
        waiting: SimpleQueue[Any] = SimpleQueue()
        listener = logs.LineListener(waiting)
    for line in lines:
        waiting.put(line)
    for _ in lines:
        listener.handle(waiting.get())
    assert "".join(pieces).encode() == "".join(lines).encode(errors="backslashreplace")
    for piece in filter(None, pieces):
        assert piece.endswith("\n")
        assert piece.count("\n") == 1 or len(piece.encode()) <= select.PIPE_BUF


@pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()])
def test_no_trace_where_a_library_says_so(formatter: logging.Formatter) -> None:
    line = formatter.format(record("failed to export %s", "spans", exc_info=False))
    assert "failed to export spans" in line
    assert "\n" not in line


def test_json_of_half_a_surrogate_pair_is_json() -> None:
    entry = json.loads(logs.JsonFormatter().format(record("cut \ud83d")))
    assert entry["message"] == "cut \\ud83d"


def test_a_collector_that_is_away_is_one_line_a_minute() -> None:
    seldom = logs.SeldomFilter()

    def line(name: str, second: float, exc_info: Any = None) -> str | None:
        entry = record("failed to export %s", "spans", exc_info=exc_info)
        entry.name, entry.created = name, second
        return logs.TextFormatter().format(entry) if seldom.filter(entry) else None

    error = ValueError("refused")
    first = line("opentelemetry.exporter", 100.0, (ValueError, error, None))
    assert first is not None
    assert first.endswith("failed to export spans: ValueError('refused')")
    assert line("opentelemetry.sdk", 159.0) is None
    assert line("hybridtei.server", 159.0) is not None
    assert line("opentelemetry.sdk", 161.0) is not None
