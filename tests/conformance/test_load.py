"""`python -m conformance.load`: every scenario, small, of the real command. Counts, no times."""

import json
import sys

import pytest

from conformance.load.__main__ import SCENARIOS
from tests.ran import ran
from tests.server.live import ROOT

SERVER = f"{sys.executable} -m hybridtei serve --hostname 127.0.0.1 --port {{port}}"


def run(name, *flags):
    """Exit status, and what the last line tells."""
    command = [sys.executable, "-m", "conformance.load", name, *flags]
    done = ran(command)
    assert done.stdout, done.stderr
    assert "cores" in done.stdout.splitlines()[0]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_each_scenario_tells_its_flags():
    listed = ran([sys.executable, "-m", "conformance.load", "--help"], check=True)
    assert set(listed.stdout.split()) >= set(SCENARIOS)
    pages = [
        *ROOT.glob("*.md"),
        *(ROOT / "notebooks").glob("*.md"),
        *(ROOT / "deploy").glob("*.md"),
    ]
    told = " ".join(
        " ".join(
            page.read_text(encoding="utf-8") for page in pages if page.name != "CHANGELOG.md"
        ).split()
    )
    named = {
        part.split()[0].strip("`).,:") for part in told.split("python -m conformance.load ")[1:]
    }
    assert named - {"NAME", "…"} <= set(SCENARIOS)


SHORT = ["--rounds", "1", "--seconds", "0.3", "--clients", "2"]


@pytest.mark.study
@pytest.mark.parametrize(
    ("name", "flags", "rows"),
    [
        ("request_cost", SHORT, ["2 clients / floor", "2 clients / ours", "640 clients / refused"]),
        ("asgi_servers", SHORT, ["2 clients / uvicorn"]),
        ("app_cost", ["--rounds", "1", "--requests", "20"], ["ours"]),
        (
            "http_load",
            ["--server", f"a={SERVER}", "--traffic", "mixed", "--rounds", "1", "--seconds", "1"],
            ["mixed / a"],
        ),
        ("lone", ["--server", f"a={SERVER}", "--sizes", "6", "--turns", "1"], ["/embed 6 / a"]),
        (
            "limit",
            ["--dtypes", "float32", "--rounds", "1", "--texts", "20", "--seconds", "1"],
            [
                f"float32, {row}"
                for row in (
                    "products, GFLOP/s",
                    "uniform, tokens/s",
                    "mixed, tokens/s",
                    "http, tokens/s",
                )
            ],
        ),
        (
            "precisions",
            ["--engine", "ort-float32", "--rounds", "1", "--batches", "1"],
            ["ort-float32"],
        ),
    ],
)
def test_a_scenario_measures(name, flags, rows):
    status, told = run(name, *flags)
    assert status == 0
    assert [*told][: len(rows)] == rows
    assert all(value >= 0 for row in told.values() for value in row.values())


@pytest.mark.study
def test_what_a_collection_takes(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("a hybrid search over a swept wing")
    flags = [str(tmp_path / "texts"), "--folder", str(tmp_path / "there")]
    command = [sys.executable, "-m", "conformance.load", "stored_size", *flags]
    done = ran(command, check=True)
    assert "1 documents" in done.stdout
    assert "dense vectors" in done.stdout


@pytest.mark.study
def test_storms_leave_nothing_and_sigterm_lets_every_request_end():
    flags = ["--clients", "100", "--rounds", "1", "--in-flight", "20", "--most-times", "inf"]
    status, told = run("storms", *flags)
    assert told["broken"] == []
    assert status == 0
    assert len([row for row in told["rows"] if row["kept"]]) == 2 * 3 + 2
    (ended,) = (row["result"] for row in told["rows"] if row["tried"].startswith("SIGTERM"))
    assert ended == "20 answered with 200, 0 otherwise, 0 not at all; exit 0"


@pytest.mark.study
def test_overload_is_answered_with_200_or_429():
    flags = ["--permits", "4", "--words", "6", "--seconds", "2", "--rounds", "1", "--any-times"]
    status, told = run("overload", *flags)
    assert told["broken"] == []
    assert status == 0
    assert "× 429, 0 without an answer" in next(row["result"] for row in told["rows"])


@pytest.mark.study
def test_an_index_has_the_hits_of_the_embedded_engine():
    _, told = run("index", "--texts", "60", "--points", "150", "--queries", "6")
    results = {row["tried"]: row["result"] for row in told["rows"] if row["kept"]}
    assert results["order"].startswith("6 in the order of the embedded Qdrant")
    assert [row["times"] for row in told["rows"]][-1] == "150 points"


@pytest.mark.study
def test_a_promise_that_is_broken_is_told():
    # No client is refused
    flags = [
        "--permits",
        "4",
        "--times",
        "1",
        "--seconds",
        "1",
        "--rounds",
        "1",
    ]
    status, told = run("overload", *flags)
    assert told["broken"] == ["embedded: 4 connections for 4 permits"]
    assert status == 1
