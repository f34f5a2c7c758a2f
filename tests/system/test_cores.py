"""The container's quota counts, where there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridtei.system.cpu import available_cores

HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", HERE),
        ("50000 100000", 1),
        ("100000 100000", 1),
        ("99900000 100000", HERE),
        ("nonsense", HERE),
        ("0 0", HERE),
    ],
)
def test_the_least_of_mask_and_quota(tmp_path: Path, quota: str, cores: int) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota + "\n")
    assert available_cores(file) == cores


def test_no_quota_file(tmp_path: Path) -> None:
    assert available_cores(tmp_path / "none") == HERE
