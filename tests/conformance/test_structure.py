"""Packages import downwards only, as pyproject.toml says; and the figures of a source tree small
enough to count by hand."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from conformance.structure import source
from conformance.structure.source import (
    find_circles,
    read_imports,
    read_modules,
)
from tests.ran import ran

CONTRACTS = (
    "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
)

FILES = {
    "__init__.py": "",
    "top.py": '"""Docstring."""\n\nfrom small.middle import work\n\nwork()\n',
    "middle.py": """from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from small import top


def work():
    from small.low import leaf

    return leaf.X
""",
    "low/__init__.py": "",
    "low/leaf.py": "import small.low.twin\n\nX = 1\n",
    "low/twin.py": "import small.low.leaf\n",
}


@pytest.fixture
def package(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "small"


def test_imports_within_functions_count_and_imports_for_annotations_do_not(package):
    imports = read_imports(read_modules(package))
    assert imports["small.top"] == {"small.middle"}
    assert imports["small.middle"] == {"small.low.leaf"}


def test_circles_are_found(package):
    assert find_circles(read_imports(read_modules(package))) == [
        ["small.low.leaf", "small.low.twin"]
    ]


def test_the_package_has_no_circle():
    """In a process of its own, since Python 3.11's `ast.parse` can fail while another thread of the
    process parses too."""
    ended = ran([sys.executable, "-m", "conformance.structure"])
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(find_spec("importlinter") is None, reason="import-linter is not installed")
def test_packages_import_downwards_only():
    done = ran([sys.executable, "-c", CONTRACTS])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_warm_request_runs_in_no_more_files_calls_and_coroutines():
    """In a process of its own, since the profile function stays in every thread."""
    ended = ran([sys.executable, "-m", "conformance.structure", "--requests"])
    assert ended.returncode == 0, ended.stderr
    assert "calls of /embed " in ended.stdout


STUDIES = ("load", "quality")


@pytest.mark.parametrize("above", ["tests", *(f"conformance.{study}" for study in STUDIES)])
def test_what_measures_any_server_imports_neither_tests_nor_studies(above):
    """It runs also from where no tests are."""
    imports = re.compile(rf"^\s*(from|import) {re.escape(above)}\b", re.MULTILINE)
    room = Path(source.__file__).parents[1]
    studies = [room / study for study in STUDIES]
    importers = [
        str(path.relative_to(room))
        for path in sorted(room.rglob("*.py"))
        if imports.search(path.read_text(encoding="utf-8"))
        and (above == "tests" or not any(map(path.is_relative_to, studies)))
    ]
    assert importers == []
