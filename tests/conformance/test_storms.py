"""`conformance/load`: storms, overload, TEI's own traffic and a soak, each small, of the real command. Counts, no times."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.live import ROOT

pytestmark = pytest.mark.slow
LOAD = ROOT / "conformance" / "load"
HANG = 300


def run(script: str, *flags: str) -> tuple[int, dict]:
    """Exit status, and what the last line tells."""
    command = [sys.executable, str(LOAD / script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_storms_leave_nothing_and_sigterm_lets_everybody_end():
    pytest.importorskip("grpc_reflection")
    flags = ["--clients", "100", "--rounds", "1", "--slow", "10", "--in-flight", "20"]
    status, told = run("storms.py", *flags, "--most-times", "inf", "--grpc")
    assert told["broken"] == []
    assert status == 0
    kept = [row["tried"] for row in told["rows"] if row["kept"]]
    assert len(kept) == 2 * 4 + 3
    (ended,) = (row["result"] for row in told["rows"] if row["tried"].startswith("SIGTERM"))
    assert "20 answered with 200, 0 otherwise, 0 not at all" in ended
    assert "exit 0" in ended


def test_overload_is_answered_with_200_or_429():
    flags = ["--permits", "4", "--patient", "2", "--words", "6", "--seconds", "2", "--rounds", "1", "--any-times"]
    status, told = run("overload.py", *flags)
    assert told["broken"] == []
    assert status == 0
    assert "× 429, 0 without an answer" in next(row["result"] for row in told["rows"])


def test_a_promise_that_is_broken_is_told():
    flags = ["--permits", "4", "--times", "1", "--patient", "0", "--seconds", "1", "--rounds", "1"]  # nobody is refused
    status, told = run("overload.py", *flags)
    assert told["broken"] == ["embedded: 4 + 0 connections for 4 permits"]
    assert status == 1


def test_teis_own_traffic():
    pytest.importorskip("grpc_reflection")
    status, told = run("k6_shape.py", "--seconds", "2", "--share", "0.2", "--messages", "40", "--what", "http,grpc,stream")
    assert told["broken"] == []
    assert status == 0
    assert [row["kept"] for row in told["rows"]] == [True] * 3


def test_a_short_soak(tmp_path: Path):
    flags = ["--minutes", "0.15", "--load-every", "1", "--clients", "2", "--droppers", "1", "--slow", "2"]
    bounds = ["--most-growth-mb", "inf", "--most-growth", "inf"]  # it has hardly warmed up
    status, told = run("soak.py", "--out", str(tmp_path), *flags, *bounds)
    assert told["broken"] == []
    assert status == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"soak.csv"}
    assert (tmp_path / "soak.csv").read_text().startswith("seconds,rss_mb,handles,threads,queue,p50_ms,p99_ms\n")
