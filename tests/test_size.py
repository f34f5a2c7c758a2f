"""The size and density of the product, and of the rooms beside it, in numbers that may only fall.

A change that lowers a count lowers its number here in the same commit; a commit that raises a
number of `SIZE` says why. The numbers of `LAWS` are never raised.
"""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("hybridtei", "notebooks", "deploy")

SIZE = {"tokens": 366_051, "modules": 224}
LAWS = {
    "over_100_columns": 0,
    "nested_conditionals": 0,
    "conditionals": 794,
    "literal_splats": 20,
    "no_nouns": 23,
    "comments_behind": 34,
    "tokens_per_1000_code_lines": 8_293,
}
LONGEST_FILE_LINES = 564
# The same for what stands beside the product. A commit that raises `tokens` says why.
ROOMS = {
    "tests": {
        "tokens": 410_384,
        "over_100_columns": 109,
        "nested_conditionals": 5,
        "literal_splats": 90,
        "no_nouns": 982,
        "comments_behind": 6,
    },
    "conformance": {
        "tokens": 127_567,
        "over_100_columns": 16,
        "nested_conditionals": 6,
        "literal_splats": 50,
        "no_nouns": 382,
        "comments_behind": 36,
    },
}
# What a change may leave between a count and its number, in thousandths of the number.
SLACK = 5


def product_files():
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def counts_of(*folders):
    """Counted in a process of its own: `ast.parse` of Python 3.11 can fail beside another thread."""
    command = [sys.executable, "-m", "conformance.structure.ruler", "--json", *folders]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    counts: dict[str, int] = json.loads(ended.stdout)
    counts["tokens_per_1000_code_lines"] = round(1000 * counts["tokens"] / counts["code_lines"])
    return counts


def check(name, value, limit):
    assert value <= limit, f"{name} is {value}, and may be {limit} at most"
    floor = limit - limit * SLACK // 1000
    assert value >= floor, f"{name} fell to {value}: lower its number in {Path(__file__).name}"


@pytest.mark.parametrize("law", LAWS)
def test_text_gets_no_denser(law):
    check(law, counts_of(*FOLDERS)[law], LAWS[law])


def test_the_product_does_not_grow():
    """`__init__.py` is no module."""
    modules = sum(path.name != "__init__.py" for path in product_files())
    check("tokens", counts_of(*FOLDERS)["tokens"], SIZE["tokens"])
    check("modules", modules, SIZE["modules"])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_beside_the_product_gets_no_larger_and_no_denser(room):
    for name, limit in ROOMS[room].items():
        check(f"{name} of {room}/", counts_of(room)[name], limit)


def test_no_file_is_longer_than_its_bound():
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in product_files()}
    longest = max(lengths, key=lengths.__getitem__)
    assert lengths[longest] <= LONGEST_FILE_LINES, f"{longest} has {lengths[longest]} lines"
