"""The GPU's program, on a machine without one: it says so; it works with tiny models on the CPU,
and loses no row."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.ran import ran

ROOT = Path(__file__).parents[2]
OF_THE_SERVER = ("msgspec", "litestar", "orjson", "uvicorn")


def run(*arguments, path=""):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": path} if path else {})}
    command = [sys.executable, "-m", "conformance.load.gpu", *arguments]
    return ran(command, timeout=900, env=environment)


def smoke(out, *arguments, path=""):
    done = run("--cpu-smoke", "--seconds", "0.02", "--out", str(out), *arguments, path=path)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()], done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_claims_nothing():
    done = run()
    assert done.returncode == 1
    assert "torch finds no CUDA device here: nothing was measured" in done.stderr
    assert done.stdout == ""


@pytest.mark.study
def test_each_way_is_measured_and_one_that_raises_loses_no_other(tmp_path):
    """Without any package of the server."""
    for name in OF_THE_SERVER:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    rows, shown = smoke(tmp_path / "out", path=f"{tmp_path}{os.pathsep}{ROOT}")
    assert len(shown.splitlines()) == 2 + len(rows)
    assert [row["way"] for row in rows[:1]] == ["tests"]
    failed = {row["way"] for row in rows if "failed" in row}
    assert {"server", "flash attention"} <= failed <= {"tests", "server", "flash attention"}
    assert "no msgspec here" in (tmp_path / "out" / "tiny-BERT.server.stderr").read_text()
    assert (
        "_flash_attention_forward"
        in (tmp_path / "out" / "tiny-BERT.flash-attention.stderr").read_text()
    )
    nearness = [row for row in rows if row["way"] == "nearness"]
    assert len(nearness) == 8
    assert {row["deviation"] > 0 for row in nearness if row["dtype"] == "bfloat16"} == {True}
    ways = {row["way"] for row in rows if row["model"] == "tiny BERT" and "lone ms" in row}
    assert ways == {"plain", "SDPA on padded groups"}
    assert {row["tokens"] for row in rows if row["way"] == "plain"} == {"50", "512"}
    assert min(row["launches"] for row in rows if row["way"] == "plain") > 20
    assert min(row["cosine"] for row in rows if row["way"] == "transformers") > 0.9999
    assert min(row["cosine"] for row in rows if row["way"] == "fp8") > 0.9
    assert min(row["tokens/s"] for row in rows if "tokens/s" in row) > 0
