"""The GPU's bench, on a machine without one: it says so; its script works with tiny models on the CPU, and loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "conformance" / "load" / "gpu.py"
OF_THE_SERVER = ("msgspec", "litestar", "orjson", "uvicorn")


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)


def smoke(out: Path, *arguments: str, path: Path | None = None) -> list[dict[str, Any]]:
    done = run("--cpu-smoke", "--pass-seconds", "0.02", "--out", str(out), *arguments, path=path)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_claims_nothing() -> None:
    done = run()
    assert done.returncode == 1
    assert "torch finds no CUDA device here: nothing was measured" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_a_way_that_raises_and_one_that_dies_lose_no_other_cell(tmp_path: Path) -> None:
    """In process, without any package of the server."""
    for name in OF_THE_SERVER:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    out = tmp_path / "out"
    rows = smoke(out, "--stage", "parity,models,large", "--breaks", "raises,dies", path=tmp_path)
    found = {(row["stage"], row["model"], row["way"]): row["failed"] for row in rows if "failed" in row}
    assert found == {
        ("models", "tiny BERT", "raises"): "RuntimeError: this way raises",
        ("models", "tiny BERT", "dies"): "killed by signal 9: ",
    }
    assert {row["way"] for row in rows if row.get("tokens") == "before"} == {"raises", "dies"}
    assert "this way raises" in (out / "models.tiny-BERT.raises.stderr").read_text()
    parity = [row for row in rows if row["stage"] == "parity" and row["way"] != "probe"]
    assert len(parity) == 8
    assert all(row["deviation"] <= row["tolerance"] for row in parity)
    ways = {row["way"] for row in rows if row["model"] == "tiny BERT" and "tokens_per_s" in row}
    assert ways == {"plain", "graphs", "compiled", "graphs+compiled", "fp8+compiled", "peer", "SDPA on padded groups"}
    assert {row["way"] for row in rows if row["model"] == "tiny M3"} == {"plain", "outputs"}
    assert {row["tokens"] for row in rows if row["way"] == "plain"} == {"5", "50", "512", "mixed"}
    assert min(row["cosine"] for row in rows if row["way"] == "peer") > 0.9999
    assert min(row["cosine"] for row in rows if row["way"] == "fp8" and "cosine" in row) > 0.9
    for row in rows:
        assert min([value for name, value in row.items() if name.endswith("_per_s")], default=1) > 0


@pytest.mark.slow
def test_a_way_that_hangs_ends_and_a_server_is_measured(tmp_path: Path) -> None:
    """Children that hang, and those that a card has."""
    rows = smoke(tmp_path, "--stage", "models", "--breaks", "hangs", "--ways", "hangs", "--cell-seconds", "3")
    assert rows[-1]["failed"] == "took more than 3 s"
    rows = smoke(tmp_path, "--stage", "models", "--breaks", "raises,dies", "--ways", "raises,dies", "--anew")
    assert [row["failed"] for row in rows[-4:] if "failed" in row] == ["RuntimeError: this way raises", "killed by signal 9: "]
    rows = smoke(tmp_path, "--stage", "http", "--http-workers", "0")
    assert [row["tokens"] for row in rows if row["stage"] == "http"] == ["queries, a text each", "passages, 32 texts each"]
    assert (tmp_path / "http.tiny-BERT.0-HTTP-processes.stderr").exists()


@pytest.mark.slow
def test_cells_that_have_no_time_left_say_so(tmp_path: Path) -> None:
    rows = smoke(tmp_path, "--stage", "parity,models", "--minutes", "0")
    assert {row["failed"] for row in rows} == {"no time was left"}


def test_what_the_server_lacks_is_named() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import gpu_http
        import gpu_wheels
    finally:
        sys.path.remove(str(SCRIPT.parent))
    assert gpu_http.lacking() == []
    assert {name.replace("_", "-") for name in gpu_http.NEEDED} <= {*gpu_wheels.NEEDED}


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    done = run("--cpu-smoke", "--wheels", str(tmp_path))
    assert done.returncode == 1
    assert "no wheel is there" in done.stderr


def test_unknown_ways_and_stages_are_refused() -> None:
    done = run("--cpu-smoke", "--ways", "sideways")
    assert done.returncode == 2
    assert "--models, --ways: no cell has these" in done.stderr
    done = run("--cpu-smoke", "--stage", "fifth")
    assert done.returncode == 2
    assert "--stage: fifth is none of parity, models, large, http" in done.stderr
