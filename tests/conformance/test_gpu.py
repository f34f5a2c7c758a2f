"""The GPU's bench, on a machine without one: it says so, and its script works with tiny models on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "conformance" / "load" / "gpu.py"
OF_THE_SERVER = ("msgspec", "litestar", "orjson", "uvicorn")


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({} if path is None else {"PYTHONPATH": str(path)})}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_claims_nothing() -> None:
    done = run()
    assert done.returncode == 1
    assert "torch finds no CUDA device here: nothing was measured" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_every_cell_is_filled_without_any_package_of_the_server(tmp_path: Path) -> None:
    for name in OF_THE_SERVER:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    done = run("--cpu-smoke", "--seconds", "0.05", "--http-workers", "", path=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["smoke"] is True
    assert [row for row in found["rows"] if "failed" in row] == []
    assert {row["model"] for row in found["rows"]} == {"tiny BERT", "tiny Qwen3"}
    assert {row["tokens"] for row in found["rows"]} == {"5", "50", "512", "mixed"}
    assert {row["dtype"] for row in found["rows"]} == {"float32", "fp8"}
    assert {row["kernel"] for row in found["rows"]} == {"SDPA per sequence", "SDPA on padded groups"}
    for name in ("tiny BERT", "tiny Qwen3"):
        ways = [row["way"] for row in found["rows"] if row["model"] == name and row["dtype"] == "float32"]
        assert [*dict.fromkeys(ways)] == ["plain", "graphs", "compiled"]
    for row in found["rows"]:
        assert min(row["tokens_per_s"], row["texts_per_s"], row["small_tokens_per_s"], row["lone_ms"], row["share"]) > 0


def test_what_the_server_lacks_is_named(tmp_path: Path) -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import gpu_http
    finally:
        sys.path.remove(str(SCRIPT.parent))
    assert gpu_http.lacking() == []
    assert "litestar" in gpu_http.NEEDED


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    done = run("--cpu-smoke", "--wheels", str(tmp_path))
    assert done.returncode == 1
    assert "no wheel is there" in done.stderr


def test_an_unknown_way_is_refused() -> None:
    done = run("--cpu-smoke", "--ways", "sideways")
    assert done.returncode == 2
    assert "--ways: none of plain, graphs, compiled" in done.stderr
