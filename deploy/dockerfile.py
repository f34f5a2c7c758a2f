"""A Dockerfile as stages of instructions: what `build_steps` performs and what tests check, so that
neither can drift from it.

Reads the part of the language that ours uses: comments, continued lines, `FROM … AS …`, `${NAME}`.
It knows nothing of what an instruction does. The surprise: an ARG before the first FROM is for FROM
lines alone, as Docker has it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its lines joined; `line` is where it begins, from 1."""

    keyword: str
    arguments: str
    line: int

    def flags(self) -> dict[str, str]:
        """`--from=wheel` and the like, which stand before the arguments proper."""
        words = shlex.split(self.arguments) if self.keyword == "COPY" else self.arguments.split()
        return dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))

    def paths(self) -> list[str]:
        """Of a COPY: its sources and, last, where to."""
        return [word for word in shlex.split(self.arguments) if not word.startswith("--")]

    def words(self) -> list[str]:
        """Of an ENTRYPOINT, CMD or HEALTHCHECK in exec form. Raises ValueError for the shell
        form."""
        start = self.arguments.find("[")
        if start < 0:
            raise ValueError(f"line {self.line}: {self.keyword} should be in exec form")
        return list(json.loads(self.arguments[start:]))

    def pairs(self) -> dict[str, str]:
        """Of an ENV or ARG: names and values; an ARG without a value has an empty one."""
        return dict(word.partition("=")[::2] for word in shlex.split(self.arguments))


@dataclass(frozen=True, slots=True)
class Stage:
    """What one FROM begins; `base` is an image or an earlier stage."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, keyword: str) -> list[Instruction]:
        return [each for each in self.instructions if each.keyword == keyword]


def parse(text: str) -> dict[str, Stage]:
    """Stages by name, in their order. Raises ValueError for a line that belongs to none."""
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    stage: Stage | None = None
    for instruction in _instructions(text):
        if instruction.keyword == "FROM":
            base, _, name = expand(instruction.arguments, arguments).partition(" AS ")
            stage = stages[name] = Stage(name or base, base)
        elif stage is not None:
            stage.instructions.append(instruction)
        elif instruction.keyword == "ARG":
            arguments |= instruction.pairs()
        else:
            raise ValueError(
                f"line {instruction.line}: {instruction.keyword} before the first FROM"
            )
    return stages


def expand(text: str, values: Mapping[str, str]) -> str:
    """`${NAME}` -> its value, or nothing."""
    return VARIABLE.sub(lambda found: values.get(found[1], ""), text)


def lineage(stages: Mapping[str, Stage], name: str) -> list[Stage]:
    """A stage and those it stands on, the lowest first."""
    stage = stages[name]
    return [*(lineage(stages, stage.base) if stage.base in stages else []), stage]


def needed(stages: Mapping[str, Stage], target: str) -> list[str]:
    """The stages a target is made of, each after those it needs."""
    order: list[str] = []

    def visit(name: str) -> None:
        if name in order or name not in stages:
            return
        visit(stages[name].base)
        for copy in stages[name].all("COPY"):
            visit(copy.flags().get("from", ""))
        order.append(name)

    visit(target)
    return order


def _instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    parts: list[str] = []
    begun = 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            keyword, _, rest = " ".join(parts).partition(" ")
            found.append(Instruction(keyword.upper(), rest, begun))
            parts = []
    return found
