"""Figures of the source tree: modules, lines, statements, layers of imports, and the largest file
and folder."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SHORT_MODULE_LINES = 60


@dataclass(frozen=True)
class Module:
    """One Python file below the package's folder."""

    name: str
    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source)

    @property
    def lines(self) -> int:
        return self.source.count("\n")

    @property
    def statements(self) -> int:
        """Statements as a formatter counts them; docstrings are left out."""
        return sum(
            isinstance(node, ast.stmt) and not _is_docstring(node) for node in ast.walk(self.tree)
        )


def read_modules(package: Path) -> dict[str, Module]:
    """Every module of a package, by its full name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path)
    return modules


def read_imports(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """For each module the modules of the same package that it imports anywhere, but for annotations
    alone."""
    return {
        name: {found for found in _imported(module, modules) if found != name}
        for name, module in modules.items()
    }


def find_circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others. Imports inside
    functions count."""
    first_of = _circles(imports)
    groups: dict[str, list[str]] = {}
    for module in sorted(imports):
        groups.setdefault(first_of[module], []).append(module)
    return [group for group in groups.values() if len(group) > 1]


def count_layers(imports: Mapping[str, Iterable[str]], rooms: Mapping[str, str]) -> int:
    """The longest chain of imports between rooms (module -> room); rooms that import each other in
    a circle are one layer."""
    arrows: dict[str, set[str]] = {room: set() for room in rooms.values()}
    for module, targets in imports.items():
        arrows[rooms[module]] |= {rooms[target] for target in targets} - {rooms[module]}
    circle_of = _circles(arrows)
    heights: dict[str, int] = {}

    def height(circle: str) -> int:
        if circle not in heights:
            below = {
                circle_of[target]
                for room in arrows
                if circle_of[room] == circle
                for target in arrows[room]
            }
            heights[circle] = 1 + max((height(other) for other in below - {circle}), default=0)
        return heights[circle]

    return max(height(circle) for circle in set(circle_of.values()))


def measure(package: Path) -> dict[str, object]:
    """All figures of the tree at `package`, ready to print."""
    modules = read_modules(package)
    imports = read_imports(modules)
    importers = {name: sum(name in targets for targets in imports.values()) for name in modules}
    written = [module for module in modules.values() if module.path.name != "__init__.py"]
    folders: dict[Path, int] = {}
    for module in written:
        folders[module.path.parent] = folders.get(module.path.parent, 0) + 1
    largest_folder = max(folders, key=lambda folder: folders[folder])
    largest_file = max(written, key=lambda module: module.lines)
    return {
        "modules": len(modules),
        "lines": sum(module.lines for module in modules.values()),
        "statements": sum(module.statements for module in modules.values()),
        "layers of rooms": count_layers(imports, {name: _room(name) for name in modules}),
        "circles of imports": len(find_circles(imports)),
        f"modules under {SHORT_MODULE_LINES} lines": sum(
            module.lines < SHORT_MODULE_LINES for module in written
        ),
        "modules with one importer": sum(importers[module.name] == 1 for module in written),
        "files in the largest folder": (
            f"{folders[largest_folder]} ({largest_folder.relative_to(package.parent)})"
        ),
        "lines of the largest file": (
            f"{largest_file.lines} ({largest_file.path.relative_to(package.parent)})"
        ),
    }


def _room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _is_docstring(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _imported(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    for node in _executed_nodes(module.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules and not node.level:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in modules else node.module


def _executed_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node but those below `if TYPE_CHECKING:`."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            waiting.extend(node.orelse)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def _circles(arrows: Mapping[str, set[str]]) -> dict[str, str]:
    """Each room -> the first name among the rooms that it reaches and that reach it."""
    reach = {room: _reachable(room, arrows) for room in arrows}
    return {
        room: min({room} | {other for other in reach[room] if room in reach[other]})
        for room in arrows
    }


def _reachable(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in arrows[waiting.pop()] - found:
            found.add(target)
            waiting.append(target)
    return found
