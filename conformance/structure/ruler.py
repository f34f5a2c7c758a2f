"""Size and density of Python text: `python -m conformance.structure.ruler FOLDER`.

Size is Python's tokens, without comments, docstrings, line ends and indentation, so that packing a
line does not change it. `tests/test_size.py` holds the laws.
"""

import argparse
import ast
import io
import json
import tokenize
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
# Python 3.12 splits an f-string into these; counted as one token, as Python 3.11 does.
FSTRING_START = getattr(tokenize, "FSTRING_START", None)
FSTRING_END = getattr(tokenize, "FSTRING_END", None)

# Names of variables and parameters that say nothing about what they hold.
NO_NOUNS = {
    "one",
    "found",
    "kept",
    "known",
    "given",
    "made",
    "told",
    "there",
    "most",
    "least",
    "some",
    "said",
    "settled",
    "placed",
    "asked",
    "wanted",
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LITERALS = (ast.List, ast.Tuple, ast.IfExp, ast.ListComp, ast.GeneratorExp)
LONGEST_LINE = 100


@dataclass
class Count:
    """Counts of one file, or their sum over several."""

    tokens: int = 0
    code_lines: int = 0
    over_100_columns: int = 0
    conditionals: int = 0
    nested_conditionals: int = 0
    literal_splats: int = 0
    names: int = 0
    no_nouns: int = 0
    comments_above: int = 0
    comments_behind: int = 0

    def add(self, other: "Count") -> None:
        """Add another count to this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def measure_files(paths: Iterable[Path]) -> Count:
    """The sum of the counts of Python files."""
    total = Count()
    for path in paths:
        total.add(measure_text(path.read_text(encoding="utf-8")))
    return total


def measure_text(text: str) -> Count:
    """The counts of one file's text."""
    count = Count()
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings.add(node.body[0].lineno)
        _count_node(node, count)
    _count_tokens(text, docstrings, count)
    count.over_100_columns = sum(len(line) > LONGEST_LINE for line in text.splitlines())
    return count


def _count_node(node: ast.AST, count: Count) -> None:
    if isinstance(node, ast.IfExp):
        count.conditionals += 1
        inner = (child for child in ast.walk(node) if child is not node)
        count.nested_conditionals += any(isinstance(child, ast.IfExp) for child in inner)
    elif isinstance(node, ast.Starred):
        count.literal_splats += isinstance(node.value, LITERALS)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            count.literal_splats += key is None and isinstance(value, (ast.Dict, ast.IfExp))
    elif isinstance(node, ast.arg):
        count.names += 1
        count.no_nouns += node.arg in NO_NOUNS
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        count.names += 1
        count.no_nouns += node.id in NO_NOUNS


def _count_tokens(text: str, docstrings: set[int], count: Count) -> None:
    lines: set[int] = set()
    fstrings = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.line.strip().startswith("#"):
                count.comments_above += 1
            else:
                count.comments_behind += 1
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.type in SKIPPED or is_docstring:
            continue
        lines.update(range(token.start[0], token.end[0] + 1))
        fstrings += token.type == FSTRING_START
        if not fstrings or (token.type == FSTRING_END and fstrings == 1):
            count.tokens += 1
        fstrings -= token.type == FSTRING_END
    count.code_lines = len(lines)


def _print(folder: Path) -> None:
    paths = list(folder.rglob("*.py"))
    count = measure_files(paths)
    print(f"{folder}: {len(paths)} files")
    for name, value in asdict(count).items():
        per_1000_lines = 1000 * value / max(count.code_lines, 1)
        print(f"  {name:22} {value:8}  {per_1000_lines:8.1f} per 1,000 code lines")


def main() -> None:
    """Print the counts of folders: each by itself, or with `--json` their sum."""
    parser = argparse.ArgumentParser(prog="python -m conformance.structure.ruler")
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    parser.add_argument("--json", action="store_true", help="print the sum as one JSON object")
    options = parser.parse_args()
    if options.json:
        paths = [path for folder in options.folders for path in folder.rglob("*.py")]
        print(json.dumps(asdict(measure_files(paths))))
        return
    for folder in options.folders:
        _print(folder)


if __name__ == "__main__":
    main()
