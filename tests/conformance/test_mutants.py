"""Changes of `conformance.mutants`: one place each, valid Python, never words for people."""

import ast
from pathlib import Path

import pytest

from conformance import mutants

SOURCE = '''
"""Words."""
import logging

log = logging.getLogger("a")


def half(numbers: list[int] | None, limit: "int" = 3) -> float | None:
    """Words, 5."""
    if numbers is None or len(numbers) < limit:
        log.info("é %d", 7)
        raise ValueError("é", 8)
    total = 0.5
    numbers.append(1)
    return sum(numbers) / 2
'''


@pytest.fixture
def module(tmp_path):
    (tmp_path / "half.py").write_text(SOURCE)
    return tmp_path, Path("half.py")


def told(module):
    root, path = module
    return [str(mutant).partition("  ")[2] for mutant in mutants.mutants_of(path, root)]


def test_operators_constants_conditions_and_statements_change_and_words_do_not(module):
    assert sorted(told(module)) == sorted(
        [
            "3  ->  (4)",
            "if numbers is None or len(numbers) < limit:  ->  if not (numbers is None or len(numbers) < limit):",
            "numbers is None or len(numbers) < limit  ->  (numbers is None and len(numbers) < limit)",
            "numbers is None  ->  (numbers is not None)",
            "len(numbers) < limit  ->  (len(numbers) <= limit)",
            "raise ValueError('é', 8)  ->  pass",
            "0.5  ->  (1.5)",
            "numbers.append(1)  ->  pass",
            "1  ->  (2)",
            "return sum(numbers) / 2  ->  return None",
            "sum(numbers) / 2  ->  (sum(numbers) * 2)",
            "2  ->  (3)",
        ]
    )


def test_each_change_is_one_change_of_valid_python(module):
    root, path = module
    before = ast.dump(ast.parse(SOURCE))
    sources = [mutant.source_of(SOURCE) for mutant in mutants.mutants_of(path, root)]
    assert all(ast.dump(ast.parse(source)) != before for source in sources)
    assert len({ast.dump(ast.parse(source)) for source in sources}) == len(sources)


def test_tests_of_a_module_are_those_beside_its_mirror_that_import_it():
    found = mutants.mirrors_of(Path("hybridtei/inference/engine/scheduler.py"))
    assert "tests/inference/engine/test_scheduler.py" in found
    assert all(name.startswith("tests/inference/engine/") for name in found)
