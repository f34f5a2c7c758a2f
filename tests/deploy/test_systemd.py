"""The units: systemd's own verdict, and their variables by the command's parser."""

import re
import shutil
import tomllib
from pathlib import Path

import pytest

from tests.deploy.command_line import DEPLOY, ROOT, check_serve
from tests.ran import ran

UNIT, TEMPLATE = (
    (DEPLOY / "systemd" / name).read_text() for name in ("hybridtei.service", "hybridtei@.service")
)
FILE = (DEPLOY / "systemd/hybridtei.env").read_text()


def settings(unit=UNIT):
    found = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE):
        found.setdefault(name, []).append(value)
    return found


def environment():
    inline = dict(
        pair.partition("=")[::2] for value in settings()["Environment"] for pair in value.split()
    )
    return {**inline, **dict(re.findall(r"^(\w+)=(.*)$", FILE, re.MULTILINE))}


def test_the_command_takes_the_variables():
    [command] = settings()["ExecStart"]
    program, *words = command.split()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert Path(program).name in scripts
    server = check_serve(words, environment())
    assert server.hostname == "127.0.0.1"
    assert server.drain_seconds < int(settings()["TimeoutStopSec"][0])


def test_the_template_is_the_unit_on_a_share_of_the_cores_and_of_the_port():
    one, many = settings(), settings(TEMPLATE)
    taskset, *words = many["ExecStart"][0].split()
    assert (Path(taskset).name, words[:3]) == ("taskset", ["--cpu-list", "%i", *one["ExecStart"]])
    assert check_serve(words[3:], environment()).reuse_port
    # The kernel lets no other user share the port
    assert many["User"] == ["hybridtei"]
    own = {"Description", "ExecStart", "EnvironmentFile", "User"}
    assert {name: value for name, value in many.items() if name not in own} == {
        name: value for name, value in one.items() if name not in own
    }


@pytest.mark.parametrize(
    ("unit", "name"), [(UNIT, "hybridtei.service"), (TEMPLATE, "hybridtei@.service")]
)
def test_systemd_has_nothing_to_say(tmp_path, unit, name):
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / name
    path.write_text(re.sub(r"^ExecStart=.*$", "ExecStart=/bin/true", unit, flags=re.MULTILINE))
    said = ran([command, "verify", str(path)])
    assert (
        said.returncode,
        [line for line in said.stderr.splitlines() if "hybridtei" in line],
    ) == (0, [])
