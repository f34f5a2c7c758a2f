"""The parts of a release: the wheel's files, versions that agree, hooks that can run."""

import re
import shutil
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import hybridtei
from tests.deploy.command_line import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_of_the_package_is_in_the_wheel():
    package = ROOT / "hybridtei"
    globs = PYPROJECT["tool"]["setuptools"]["package-data"]["hybridtei"]
    found = [
        path.relative_to(package)
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    data = [path for path in found if path.suffix != ".py"]
    left = [
        path
        for path in data
        if not any(
            fnmatch(str(path), glob) and len(path.parts) == glob.count("/") + 1 for glob in globs
        )
    ]
    assert Path("py.typed") in data
    assert not left


def test_the_version_is_said_once_or_the_same():
    version = PYPROJECT["project"]["version"]
    assert hybridtei.__version__ == version, (
        f"the installed metadata is not of {version}: run `pip install -e .` again, and delete an "
        "older hybridtei.egg-info of this folder"
    )


@pytest.mark.parametrize(
    ("system", "machine", "comes"),
    [
        ("Linux", "x86_64", True),
        ("Linux", "aarch64", True),
        ("Linux", "riscv64", False),
        ("Darwin", "arm64", False),
    ],
)
def test_openvino_comes_with_a_plain_install_where_it_is_the_faster_engine(system, machine, comes):
    [openvino] = [
        one
        for one in map(Requirement, PYPROJECT["project"]["dependencies"])
        if one.name == "openvino"
    ]
    assert (
        openvino.marker.evaluate({"platform_system": system, "platform_machine": machine}) is comes
    )
    # Of commands that name it
    assert "openvino" in PYPROJECT["project"]["optional-dependencies"]


def test_hooks_are_commands_of_the_development_environment():
    [own] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    beside = str(Path(sys.executable).parent)
    for hook in own["hooks"]:
        command = hook["entry"].split()[0]
        assert shutil.which(command, path=beside) or command == "hadolint", command
        assert not hook.get("files") or [
            path for path in tracked() if re.search(hook["files"], path)
        ], hook["id"]


def tracked():
    folders = [ROOT / "hybridtei", ROOT / "deploy"]
    return [
        "Dockerfile",
        *(
            str(path.relative_to(ROOT))
            for folder in folders
            for path in folder.rglob("*")
            if path.is_file()
        ),
    ]
