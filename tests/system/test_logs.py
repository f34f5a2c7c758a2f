"""Log lines: one a record, whatever is in it."""

import contextlib
import io
import json
import logging
import os
import select
import sys
from queue import SimpleQueue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.outputs import Timings
from hybridtei.system import logs
from hybridtei.system.tracing import CURRENT, HandlerSpan

LOGGER = logging.getLogger("hybridtei.x")


def flush():
    logging.getLogger().handlers[0].flush()


def raised(error):
    """The facts of an error that a `try` has caught."""
    try:
        raise error
    except type(error):
        return sys.exc_info()


TEI_KEYS = ["timestamp", "level", "message", "target", "filename", "line_number"]


def record(message, *arguments, exc_info=None):
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
    assert [*entry.values()][1:] == ["INFO", f"said {text}", "hybridtei.test", "somewhere.py", 12]


@given(st.text())
def test_text_is_one_line(text):
    line = logs.TextFormatter().format(record("said %s", text))
    assert line.splitlines() == [line]
    assert "\x1b" not in line
    assert " INFO hybridtei.test: somewhere.py:12: said " in line


def test_a_trace_is_part_of_the_json():
    line = logs.JsonFormatter().format(record("failed", exc_info=raised(ValueError("two\nlines"))))
    assert len(line.splitlines()) == 1
    assert "ValueError: two\nlines" in json.loads(line)["exception"]


@pytest.mark.parametrize(
    ("level", "threshold"),
    [
        ("warn", logging.WARNING),
        ("warn,text_embeddings_router=debug", logging.WARNING),
        (" Info , hyper=off", logging.INFO),
        ("text_embeddings_router=debug", logs.OFF),
        ("2", logging.WARNING),
        ("debug,=nonsense", logging.INFO),
        ("", logging.INFO),
    ],
)
def test_levels_as_tei_takes_them(root, output, level, threshold):
    logs.configure(json_output=True, level=level)
    assert root.level == threshold
    LOGGER.error("hello")
    logging.getLogger("httpx").info("a request")
    flush()
    (line,) = output.text().splitlines()
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
def computed():
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
    error = ValueError("two\n2026-01-01T00:00:00.000000Z  INFO forged: line\x1b")
    line = logs.TextFormatter().format(record("failed", exc_info=raised(error)))
    assert "\x1b" not in line
    assert all(part.startswith("    ") for part in line.splitlines()[1:])


both = pytest.mark.parametrize("formatter", [logs.TextFormatter(), logs.JsonFormatter()])


@both
@pytest.mark.parametrize("nothing", [None, False, (None, None, None)])
def test_no_exception_is_no_trace(formatter, nothing):
    """As where a library says that it wants none."""
    line = formatter.format(record("x", exc_info=nothing))
    assert "exception" not in line
    assert "\n" not in line


def test_a_collector_that_is_away_is_one_line_a_minute(root, output):
    logs.configure(json_output=True, level="info")
    for module in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk"):
        for _ in range(3):
            logging.getLogger(module).error("Failed to export", exc_info=False)
            LOGGER.error("every line")
    flush()
    messages = messages_in(output.text())
    assert (messages.count("Failed to export"), messages.count("every line")) == (1, 6)
    repetitions = logs.Repetitions()
    line = logging.makeLogRecord({"name": "opentelemetry.sdk"})
    passed = []
    for line.created in range(0, 200, 7):
        passed += [line.created] * repetitions.filter(line)
    assert passed == [0, 63, 126, 189]


def messages_in(text):
    return [json.loads(line)["message"] for line in text.splitlines()]


class Pipe:
    """A pipe in place of standard output. It is read by `text` only."""

    def __init__(self):
        self.reading, self.writing = os.pipe()

    def text(self):
        """What is in the pipe now."""
        os.set_blocking(self.reading, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(self.reading, 1 << 20).decode()
        return ""

    def fill(self):
        """Fill the pipe, as a reader that has stopped leaves it."""
        os.set_blocking(self.writing, False)
        for size in (65536, 4096, 1):
            with contextlib.suppress(BlockingIOError):
                while True:
                    os.write(self.writing, b"\n" * size)
        os.set_blocking(self.writing, True)

    def read_until(self, text):
        """Read until `text` has come."""
        data = b""
        os.set_blocking(self.reading, True)
        while text not in data:
            data += os.read(self.reading, 1 << 20)
        return data.decode()


@pytest.fixture
def output(monkeypatch):
    pipe = Pipe()
    monkeypatch.setattr(logs, "STANDARD_OUTPUT", pipe.writing)
    yield pipe
    flush()
    os.close(pipe.reading)
    with contextlib.suppress(OSError):
        os.close(pipe.writing)


def test_lines_are_written_in_their_order_without_a_flush(root, output):
    logs.configure(json_output=True, level="info")
    for message in (*"01234", "last"):
        LOGGER.info(message)
    assert messages_in(output.read_until(b"last")) == [*"01234", "last"]


@pytest.mark.parametrize("blocks", [True, False])
def test_an_unread_output_stops_no_logger_and_loses_lines_beyond_the_bound(
    root, output, monkeypatch, blocks
):
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(logs, "LINES_WAITING", 20)
    output.fill()
    os.set_blocking(output.writing, blocks)
    logs.configure(json_output=True, level="info")
    for number in range(100):
        LOGGER.info("%d", number)
    flush()
    output.text()
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 60)
    flush()
    LOGGER.info("read again")
    *messages, last = messages_in(output.read_until(b"read again").lstrip())
    numbers = [int(message) for message in messages]
    assert numbers[:20] == [*range(20)]
    # The writer may have taken lines while others were logged
    assert numbers == sorted(set(numbers))
    assert last == "read again"


def test_a_closed_output_ends_nothing(root, output, monkeypatch):
    errors = io.StringIO()
    # Where logging tells that it failed
    monkeypatch.setattr(sys, "stderr", errors)
    logs.configure(json_output=False, level="info")
    LOGGER.error("heard")
    flush()
    assert "heard" in output.text()
    os.close(output.writing)
    LOGGER.error("unheard")
    flush()
    assert errors.getvalue() == ""


@given(st.lists(st.text(st.characters(exclude_characters="\n"), max_size=3000), max_size=12))
def test_pieces_are_whole_lines_that_a_pipe_takes_at_once(texts):
    pieces = []
    lines = [f"{text}\n" for text in texts]
    waiting = SimpleQueue()
    for line in lines:
        waiting.put(line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_write", pieces.append)
        patch.setattr(logs, "GATHER_SECONDS", 0)
        if lines:
            logs.LineListener(waiting).handle(waiting.get())
    assert b"".join(pieces) == "".join(lines).encode(errors="backslashreplace")
    for piece in filter(None, pieces):
        assert piece.endswith(b"\n")
        assert piece.count(b"\n") == 1 or len(piece) <= select.PIPE_BUF


@both
def test_no_line_shows_a_password_of_a_url(formatter):
    error = raised(OSError("http://user:secret@host/ is away"))
    line = formatter.format(record("http://user:secret@host: %s", error[1], exc_info=error))
    assert "secret" not in line
    assert line.count("http://[hidden]@host") >= 3


def test_json_of_half_a_surrogate_pair_is_json():
    entry = json.loads(logs.JsonFormatter().format(record("cut \ud83d")))
    assert entry["message"] == "cut \\ud83d"


def test_a_trace_with_a_lone_surrogate_is_json():
    line = logs.JsonFormatter().format(record("failed", exc_info=raised(OSError("\udcff.txt"))))
    assert "\\udcff.txt" in json.loads(line)["exception"]
