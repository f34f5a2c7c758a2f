"""Joining: an address that nobody answers at is said at once. Processes of Ray's keep to the processors they were given."""

from __future__ import annotations

import pytest

from hybridtei.cores import GRANTED, available_cores
from hybridtei.on_ray.cluster import join


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "127.0.0.1:99999"])
def test_an_address_that_nobody_answers_at(address):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    import ray

    if ray.is_initialized():
        pytest.skip("this process has joined a cluster already")
    with pytest.raises(ConnectionError, match="Ray at"):
        join(address, 1)


def test_granted_processors_bound_what_is_used(monkeypatch, tmp_path):
    unbounded = tmp_path / "none"
    monkeypatch.delenv(GRANTED, raising=False)
    all_of_them = available_cores(unbounded)
    for value, cores in (("1", 1), ("100000", all_of_them), ("", all_of_them), ("many", all_of_them), ("0", 1)):
        monkeypatch.setenv(GRANTED, value)
        assert available_cores(unbounded) == cores
