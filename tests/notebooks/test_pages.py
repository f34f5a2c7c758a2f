"""The pages beside the notebooks keep up with the code."""

from __future__ import annotations

import re

import pytest

from hybridtei.cli.flags import SETTINGS, group_of
from hybridtei.config import fields_of
from notebooks import write_flags
from notebooks.execute import FOLDER

FLAG = re.compile(r"`(--[a-z-]+)")
TEST = re.compile(r"`((?:[a-z_0-9]+/)*test_\w+\.py)(?:::(\w+))?")  # below tests/
FILE = re.compile(r"(?<![\w./])((?:hybridtei|tests|conformance|deploy|notebooks)/[\w./-]*\w)")
ROOT = FOLDER.parent
PAGES = ("README.md", "CONTRIBUTING.md", "notebooks/limits.md", "notebooks/tuning.md", "deploy/scale.md")


def flags(*groups: str) -> set[str]:
    return {
        f"--{field.name.replace('_', '-')}"
        for kind in SETTINGS
        for field, _, meta in fields_of(kind)
        if not groups or group_of(kind, meta) in groups
    }


def test_flags_is_up_to_date():
    assert write_flags.PAGE.read_text(encoding="utf-8") == write_flags.page(), "run: python notebooks/write_flags.py"


def test_flags_names_every_flag_and_variable():
    page = write_flags.page()
    for flag in flags():
        assert f"| `{flag}` | `{flag[2:].replace('-', '_').upper()}` |" in page


def test_limits_names_every_flag_that_is_a_limit():
    named = set(FLAG.findall((FOLDER / "limits.md").read_text(encoding="utf-8")))
    assert not flags("limits") - named


def test_pages_name_no_flag_that_is_not_there():
    own = {
        word
        for parser in write_flags.command_parsers().values()
        for action in parser._actions
        for word in action.option_strings
    }
    for page in ("limits.md", "tuning.md", "clients.md"):
        assert not set(FLAG.findall((FOLDER / page).read_text(encoding="utf-8"))) - own


def test_limits_names_tests_that_are_there():
    for file, name in TEST.findall((FOLDER / "limits.md").read_text(encoding="utf-8")):
        assert f"def {name}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, name)


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_no_file_that_is_not_there(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not [file for file in FILE.findall(text) if "NAME" not in file and not (ROOT / file).exists()]
