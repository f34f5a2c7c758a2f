"""The unit: systemd's own verdict, and its variables by the command's parser."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.deploy.command_line import DEPLOY, ROOT, check_serve
from tests.server.live import HANG

UNIT = (DEPLOY / "systemd/hybridtei.service").read_text()
FILE = (DEPLOY / "systemd/hybridtei.env").read_text()


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", UNIT, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def environment() -> dict[str, str]:
    inline = dict(pair.partition("=")[::2] for value in settings()["Environment"] for pair in value.split())
    return {**inline, **dict(re.findall(r"^(\w+)=(.*)$", FILE, re.MULTILINE))}


def test_the_command_takes_the_variables() -> None:
    [command] = settings()["ExecStart"]
    program, *words = command.split()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(program).name in scripts
    server = check_serve(words, environment())
    assert server.hostname == "127.0.0.1"
    assert server.drain_seconds < int(settings()["TimeoutStopSec"][0])


def test_installation_installs_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [named] = re.findall(r"'\.\[([\w,]+)\]'", UNIT)
    assert set(named.split(",")) <= set(extras)


def test_the_file_of_variables_is_where_the_unit_looks() -> None:
    [wanted] = settings()["EnvironmentFile"]
    assert f"deploy/systemd/hybridtei.env {wanted}" in UNIT


def test_systemd_has_nothing_to_say(tmp_path: Path) -> None:
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "hybridtei.service"
    unit.write_text(re.sub(r"^ExecStart=.*$", "ExecStart=/bin/true", UNIT, flags=re.MULTILINE))
    said = subprocess.run([command, "verify", str(unit)], capture_output=True, text=True, check=False, timeout=HANG)
    assert (said.returncode, [line for line in said.stderr.splitlines() if "hybridtei" in line]) == (0, [])
