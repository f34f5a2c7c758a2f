"""What users import is in `hybridtei` itself, and documents import nothing else."""

import re
import sys

import nbformat
import pytest

import hybridtei
from hybridtei import errors
from notebooks.writing.execute import notebooks
from tests.notebooks.test_snippets import PYTHON
from tests.ran import ran

CELLS = [
    (path.name, cell.source)
    for path in notebooks()
    for cell in nbformat.read(path, as_version=4).cells
    if cell.cell_type == "code"
]


@pytest.mark.parametrize("name", hybridtei.__all__)
def test_every_name_is_there(name):
    assert getattr(hybridtei, name)


def test_every_error_is_among_them():
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert kinds <= set(hybridtei.__all__) <= set(dir(hybridtei))


def test_importing_it_imports_no_library():
    code = "import sys, hybridtei; print(*{'torch', 'onnxruntime', 'numpy', 'msgspec', 'litestar'} & set(sys.modules))"
    done = ran([sys.executable, "-c", code], check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("where", "code"), [*CELLS, *((f"{block.page}:{block.line}", block.text) for block in PYTHON)]
)
def test_documents_import_from_the_package_alone(where, code):
    assert not re.findall(r"^\s*(?:from|import) hybridtei\.\S+", code, re.MULTILINE), where
