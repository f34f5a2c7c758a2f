"""The setting that names GPUs."""

from __future__ import annotations

import pytest

from hybridtei.errors import LoadError
from hybridtei.system.cpu import cuda_devices


@pytest.mark.parametrize(
    ("setting", "count", "devices"),
    [
        (None, 4, ["cuda:0"]),
        ("all", 2, ["cuda:0", "cuda:1"]),
        ("1", 2, ["cuda:1"]),
        ("0, 2", 3, ["cuda:0", "cuda:2"]),
        ("0,0", 1, ["cuda:0", "cuda:0"]),
    ],
)
def test_one_name_a_replica(setting: str | None, count: int, devices: list[str]) -> None:
    assert cuda_devices(setting, count) == devices


@pytest.mark.parametrize("setting", ["", "2", "-1", "0,", "cuda:0", "0;1", "²", "1.0"])
def test_what_names_no_device_is_refused_with_what_may_be_named(setting: str) -> None:
    with pytest.raises(LoadError, match=r"`cuda-devices` is .*numbers from 0 to 1, or be 'all'"):
        cuda_devices(setting, 2)


def test_replicas_without_end_are_refused() -> None:
    with pytest.raises(LoadError, match="65 replicas, more than 64"):
        cuda_devices(",".join("0" * 65), 1)
