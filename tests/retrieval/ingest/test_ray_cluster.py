"""Joining: an address that nobody answers at is said at once. Processes of Ray's keep to the
processors they were given."""

import ast
import os
import sys

import pytest

from hybridtei.retrieval.ray import join
from hybridtei.system.machine import GRANTED, available_cores
from tests.ran import ran
from tests.server.live import ROOT


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "127.0.0.1:99999"]
)
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
    for value, cores in (
        ("1", 1),
        ("100000", all_of_them),
        ("", all_of_them),
        ("many", all_of_them),
        ("0", 1),
    ):
        monkeypatch.setenv(GRANTED, value)
        assert available_cores(unbounded) == cores


ASKED = """
import os, sys
from hybridtei.retrieval.ray import join

leave = join("local", 1)
import ray
there = ray.get(ray.remote(lambda: __import__("sys").path + [os.environ.get("ORT_DISABLE_TELEMETRY")]).remote())
leave()
print(there)
"""


@pytest.mark.slow
def test_its_processes_find_no_modules_in_the_working_folder(tmp_path):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", ASKED]
    done = ran(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    *path, reports_off = ast.literal_eval(done.stdout.splitlines()[-1])
    assert str(ROOT) in path
    assert not {"", ".", str(tmp_path)} & set(path)
    assert reports_off == "1"
