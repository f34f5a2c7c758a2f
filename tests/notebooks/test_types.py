"""Python of README and of all pages passes mypy and basedpyright as it is written, and both find
misspelt options."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Blocks of these pages are for one client each; those of all others follow each other
SEPARATE = {"clients"}
WRONG = {
    'Encoder.load(dtyp="float32")': "dtyp",
    'encoder.encode("a", outputs=("dens",))': "dens",
    'encoder.encode("a", input_type="passage")': "passage",
    'encoder.rerank("a", ["b"], budget=3)': "budget",
    'index.search("a", mode="dens")': "dens",
    'index.search("a", limi=3)': "limi",
    'index.search("a", k=3)': "k",
    'client.search("notes", "a", limi=3)': "limi",
    'client.rerank("a", ["b"], budget_m=3)': "budget_m",
    'client.rerank("a", ["b"], top_n=3)': "top_n",
    'ingest("notes", "notes", delete_mising=True)': "delete_mising",
    'SearchOptions(mode="rff")': "rff",
}
BEGIN = """from hybridtei import Client, Encoder, Index, SearchOptions, ingest

encoder, index, client = Encoder.load(), Index(), Client("http://127.0.0.1:3000")
"""
PYRIGHT = {
    "typeCheckingMode": "basic",
    "pythonVersion": "3.11",
    "extraPaths": [str(ROOT)],
    # Packages of pages that are not installed here, or that export their names without `__all__`
    "reportMissingImports": False,
    "reportMissingModuleSource": False,
    "reportPrivateImportUsage": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("types")
    pages = [
        ROOT / "README.md",
        *(ROOT / "notebooks").glob("*.md"),
        *(ROOT / "deploy").glob("*.md"),
    ]
    for page in pages:
        blocks = FENCE.findall(page.read_text(encoding="utf-8"))
        name = page.stem.replace("-", "_")
        if page.stem not in SEPARATE:
            blocks = ["\n\n".join(blocks)] if blocks else []
        for number, block in enumerate(blocks):
            (folder / f"{name}_{number}.py").write_text(block, encoding="utf-8")
    assert len(list(folder.iterdir())) > 15
    (folder / "wrong.py").write_text(BEGIN + "\n".join(WRONG) + "\n", encoding="utf-8")
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    return folder


def mypy_errors(folder):
    command = [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--no-error-summary"]
    # As for a package that is installed: only the pages' own errors
    command.append("--follow-imports=silent")
    # An editable install is found by a finder, which checkers do not run
    paths = {**os.environ, "MYPYPATH": str(ROOT)}
    out = subprocess.run(
        [*command, "."], cwd=folder, env=paths, capture_output=True, text=True, check=False
    )
    lines = [line for line in out.stdout.splitlines() if ": error: " in line]
    return [(name, int(place)) for name, place, _ in (line.split(":", 2) for line in lines)], lines


def pyright_errors(folder):
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    out = subprocess.run(
        [*command, "-p", "."], cwd=folder, capture_output=True, text=True, check=False
    )
    found = [
        item for item in json.loads(out.stdout)["generalDiagnostics"] if item["severity"] == "error"
    ]
    places = [(Path(item["file"]).name, item["range"]["start"]["line"] + 1) for item in found]
    return places, found


@pytest.mark.slow
@pytest.mark.parametrize("errors_of", [mypy_errors, pyright_errors])
def test_pages_pass_the_checker_and_misspelt_options_do_not(folder, errors_of):
    places, told = errors_of(folder)
    assert [place for place in places if place[0] != "wrong.py"] == [], told
    first = BEGIN.count("\n") + 1
    assert {line for name, line in places if name == "wrong.py"} == {
        *range(first, first + len(WRONG))
    }
