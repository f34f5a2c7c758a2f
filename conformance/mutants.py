"""What share of small faults the tests find: `python -m conformance.mutants --count N --seed S`

Draws places in the modules of `--under` (by default four rooms), changes one operator, constant,
condition or statement at each in a copy of the tree, and runs the quick tests that mirror or import
the module, in a child with a time limit. Annotations, docstrings, descriptions, messages of errors
and log lines are left alone. Prints each change that no test found with its line, and the share of
changes found; a change whose tests do not end in the given seconds more than three times what they
take without a change counts as found. Exit status 1 if a module's tests fail without a change.
"""

import argparse
import ast
import copy
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter

import psutil

ROOT = Path(__file__).parents[1]
ROOMS = ("inference/engine", "retrieval/search", "retrieval/store", "server")
SECONDS = 60
# What a module's tests may take without a change
MAX_SECONDS = 900
# Of addresses: a loop without an end may also fill the memory
MEMORY_BYTES = 48 * 2**30
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
# What the routes answer as TEI does has no second test
WIRE = "tests/conformance/test_wire.py"
# Folders whose modules are asked by the tests of another folder
ASKED_BY = {"server": "server/api"}
# Calls whose arguments are words for people
WORDS = re.compile(r"(.*\.)?(log|logger|logging|warnings)\.\w+|Meta|flag|.*Error|.*Parameter|print")


@dataclass(frozen=True)
class Mutant:
    """A change of one module: its path, the node that stands there, and the one in its place."""

    path: Path
    node: ast.AST
    changed: ast.AST

    def source_of(self, source: str) -> str:
        """The module's source with the change."""
        begin, end = span(source, self.node)
        return source[:begin] + self.words() + source[end:]

    def words(self) -> str:
        """The change as it stands in the source."""
        written = ast.unparse(ast.fix_missing_locations(self.changed))
        if isinstance(self.node, ast.expr):
            return f"({written})"
        return written.replace("\n", "\n" + " " * getattr(self.node, "col_offset", 0))

    def __str__(self) -> str:
        before = ast.unparse(self.node).partition("\n")[0]
        after = self.words().partition("\n")[0]
        return f"{self.path}:{getattr(self.node, 'lineno', 0)}  {before}  ->  {after}"


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may stand in place of this one."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator]) if type(operator) in OPERATORS:
            changed.ops = [OPERATORS[type(operator)]()]  # type: ignore[list-item]
            yield changed
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in OPERATORS:
            changed.op = OPERATORS[type(operator)]()  # type: ignore[assignment]
            yield changed
        case ast.UnaryOp(op=ast.Not()):
            yield changed.operand
        case ast.Constant(value=bool()):
            changed.value = not changed.value
            yield changed
        case ast.Constant(value=(int() | float()) as number):
            changed.value = number + 1
            yield changed
        case ast.If() | ast.While() | ast.IfExp():
            changed.test = ast.UnaryOp(ast.Not(), changed.test)
            yield changed
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise():
            yield ast.Pass()
        # None in place of False is no other answer
        case ast.Return(value=ast.Constant(value=None | False)):
            return
        case ast.Return(value=ast.expr()):
            changed.value = ast.Constant(None)
            yield changed


def places(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are computed: no annotation, docstring, decorator or word for people."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if isinstance(tree, ast.ClassDef) and name == "keywords":
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            match node:
                case ast.Expr(value=ast.Constant()) | ast.ImportFrom() | ast.Import():
                    continue
                case ast.Expr(value=ast.Call(func=called)) | ast.Call(func=called) if (
                    WORDS.fullmatch(ast.unparse(called))
                ):
                    continue
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    continue
            yield node
            yield from places(node)


def mutants_of(path: Path, root: Path = ROOT) -> list[Mutant]:
    """All changes of a module."""
    tree = ast.parse((root / path).read_text(encoding="utf-8"))
    return [
        Mutant(path, node, changed)
        for node in places(tree)
        if hasattr(node, "lineno")
        for changed in changes(node)
    ]


def span(source: str, node: ast.AST) -> tuple[int, int]:
    """The first character of a node, and the one after its last. Columns of `ast` are bytes."""
    lines = source.splitlines(keepends=True)

    def at(line: int, column: int) -> int:
        before = sum(map(len, lines[: line - 1]))
        return before + len(lines[line - 1].encode()[:column].decode())

    fields = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    first_line, first, last_line, last = (getattr(node, field) for field in fields)
    return at(first_line, first), at(last_line, last)


def is_valid(mutant: Mutant) -> bool:
    try:
        compile(mutant.source_of((ROOT / mutant.path).read_text(encoding="utf-8")), "", "exec")
    except SyntaxError:
        return False
    return True


def mirrors_of(path: Path, root: Path = ROOT) -> list[str]:
    """The test files of the mirrored folder, first those that import the module or have its name;
    behind them those of its folders that import the module, or without any those elsewhere. For a
    route also `WIRE`, and for what all routes share their tests."""
    inner = path.relative_to("hybridtei").with_suffix("")
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    parent, _, name = module.rpartition(".")
    imported = re.compile(
        rf"\b{re.escape(module)}\b|from {re.escape(parent)} import [^\n]*\b{name}\b"
    )
    folder = root / "tests" / inner.parent
    near: list[Path] = []
    beside: list[Path] = []
    below: list[Path] = []
    far: list[Path] = []
    for test in sorted((root / "tests").rglob("test_*.py")):
        is_importing = bool(imported.search(test.read_text(encoding="utf-8")))
        if test.parent == folder:
            (near if is_importing or name in test.stem else beside).append(test)
        elif is_importing:
            (below if test.is_relative_to(folder) else far).append(test)
    elsewhere = below or ([] if near else far)
    shared = ASKED_BY.get(str(inner.parent))
    if shared is not None:
        elsewhere = sorted({*elsewhere, *(root / "tests" / shared).glob("test_*.py")})
    tests = [str(test.relative_to(root)) for test in (*near, *beside, *elsewhere)]
    return [*tests, WIRE] if inner.parts[:2] == ("server", "api") else tests


def passes(folder: Path, tests: Sequence[str], seconds: float) -> bool:
    """True if the tests pass in a copy of the tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-n", "0", "-p", "no:cacheprovider", *tests]
    limited = ["prlimit", f"--as={MEMORY_BYTES}", *command]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        limited,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            told, _ = process.communicate(timeout=seconds)
            # A change may also end pytest before its tests, with any status
            return process.returncode == 0 and b" passed" in told
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return False
        finally:
            end_rest(folder)


def end_rest(folder: Path) -> None:
    """End what the tests of a copy have left: a changed process may never end."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("PYTHONPATH") == str(folder):
                process.kill()


def copied(folder: Path) -> Path:
    """A copy of the tracked files, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = subprocess.run(
        ["tar", "--create", "--null", "--files-from=-"],
        cwd=ROOT,
        input=listed.stdout,
        capture_output=True,
        check=True,
    )
    folder.mkdir()
    subprocess.run(["tar", "--extract"], cwd=folder, input=names.stdout, check=True)
    return folder


def seconds_of(tests: Sequence[str], folders: "SimpleQueue[Path]") -> float | None:
    """What the tests take without a change; None if they fail."""
    folder, begin = folders.get(), perf_counter()
    try:
        return perf_counter() - begin if passes(folder, tests, MAX_SECONDS) else None
    finally:
        folders.put(folder)


def is_found(
    mutant: Mutant, folders: "SimpleQueue[Path]", tests: Sequence[str], seconds: float
) -> bool:
    folder = folders.get()
    place = folder / mutant.path
    before = place.read_text(encoding="utf-8")
    try:
        place.write_text(mutant.source_of(before), encoding="utf-8")
        return not passes(folder, tests, seconds)
    finally:
        place.write_text(before, encoding="utf-8")
        folders.put(folder)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--under", action="append", help=f"a room; by default {', '.join(ROOMS)}")
    parser.add_argument(
        "--seconds", type=int, default=SECONDS, help="beside three times the unchanged tests'"
    )
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args(arguments)
    paths = [
        path.relative_to(ROOT)
        for room in given.under or ROOMS
        for path in sorted((ROOT / "hybridtei" / room).rglob("*.py"))
    ]
    every = [mutant for path in paths for mutant in mutants_of(path)]
    random.Random(given.seed).shuffle(every)
    drawn = list(islice(filter(is_valid, every), given.count))
    tests = {path: mirrors_of(path) for path in dict.fromkeys(mutant.path for mutant in drawn)}
    folders: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(given.jobs) as threads:
        for job in range(given.jobs):
            folders.put(copied(Path(name, str(job))))
        # Modules of a room have the same tests, in another order
        sets = {frozenset(names): names for names in tests.values()}
        unchanged = threads.map(partial(seconds_of, folders=folders), sets.values())
        times = dict(zip(sets, unchanged, strict=True))
        broken = [path for path, names in tests.items() if times[frozenset(names)] is None]
        asked = [
            (one, threads.submit(is_found, one, folders, names, given.seconds + 3 * time))
            for one in drawn
            if (time := times[frozenset(names := tests[one.path])]) is not None
        ]
        counts: Counter[str] = Counter()
        rooms: Counter[str] = Counter()
        for mutant, answer in asked:
            room = next(room for room in (given.under or ROOMS) if room in str(mutant.path))
            rooms[room] += 1
            counts[room] += answer.result()
            if not answer.result():
                print(f"not found  {mutant}", flush=True)
    for path in broken:
        print(f"fails without a change: the tests of {path}")
    for room, number in rooms.items():
        print(f"{room}: {counts[room]} of {number} found")
    print(f"{counts.total()} of {len(asked)} found, of {len(every)} places, seed {given.seed}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
