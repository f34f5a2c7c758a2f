"""Cases and clauses as data: the request, the server, and the expected answer. `cases/*.toml`,
`clauses.toml`.

A case belongs to one or more clauses, and runs under one or more profiles (a model and flags).
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
Fill = tuple[str, int]


class Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request. `raw`: the bytes of head and body instead, with \\r\\n for every line end.

    A body is sent as JSON unless `headers` say otherwise ("" leaves a header out). `fill`: name ->
    (text, times); `$name` in body, path or raw is replaced by the repeated text.
    """

    request: str = ""
    headers: Mapping[str, str] = {}
    body: str | None = None
    raw: str | None = None
    fill: Mapping[str, Fill] = {}


class Case(Question, frozen=True, kw_only=True):
    """A request, and the checked properties of its answer.

    `text`: the whole body. `json`: the same as data, numbers within a tolerance. `has`: path
    (`0.1.score`, `data.0.index`) -> value there. `header`: name -> regular expression of the whole
    value. `absent`: headers that should not be there. `check`: functions of `checks`, each with its
    arguments. `same_as`, `unlike`: another question (what it leaves out is as here), whose body
    should be equal, or should not.
    """

    clause: str | tuple[str, ...]
    profile: str | tuple[str, ...]
    status: int = 200
    text: str | None = None
    json: str | None = None
    has: Mapping[str, Any] = {}
    header: Mapping[str, str] = {}
    absent: tuple[str, ...] = ()
    check: tuple[str, ...] = ()
    same_as: Question | None = None
    unlike: Question | None = None
    name: str = ""

    @property
    def clauses(self) -> tuple[str, ...]:
        return (self.clause,) if isinstance(self.clause, str) else self.clause

    @property
    def profiles(self) -> tuple[str, ...]:
        return (self.profile,) if isinstance(self.profile, str) else self.profile


class Clause(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A clause of the specification. `elsewhere`: why HTTP does not show it, or which tests check
    it instead."""

    title: str
    elsewhere: str | None = None


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server: one of the models of `checkpoints`, flags, environment. `ours`: flags of this
    server that make it TEI's, which another server does not know."""

    model: str
    args: tuple[str, ...] = ()
    ours: tuple[str, ...] = ("--only-tei-routes",)
    env: Mapping[str, str] = {}


def read_cases() -> list[Case]:
    """All, named by file and place. Raises ValueError for an unknown clause or profile."""
    clauses, profiles = read_clauses(), read_profiles()
    cases: list[Case] = []
    for file in sorted((HERE / "cases").glob("*.toml")):
        for place, table in enumerate(_tables(file).get("case", [])):
            name = f"{file.stem}.{place:03d}"
            case = msgspec.convert({**table, "name": name}, Case)
            unknown = [
                *(set(case.clauses) - clauses.keys()),
                *(set(case.profiles) - profiles.keys()),
            ]
            if unknown:
                raise ValueError(f"{name}: unknown: {', '.join(unknown)}")
            cases.append(case)
    return cases


def read_clauses() -> dict[str, Clause]:
    """Id -> clause, in the order of the specification."""
    found: dict[str, Clause] = {}
    for name, given in _tables(HERE / "clauses.toml").items():
        for key, clause in given.items():
            found[f"{name} {key}"] = (
                Clause(clause) if isinstance(clause, str) else msgspec.convert(clause, Clause)
            )
    return found


def read_profiles() -> dict[str, Profile]:
    """Name -> profile."""
    return {
        name: msgspec.convert(table, Profile)
        for name, table in _tables(HERE / "profiles.toml").items()
    }


def uncovered(clauses: Mapping[str, Clause], cases: Sequence[Case]) -> list[str]:
    """Clauses without a case and without a reason for that."""
    covered = {clause for case in cases for clause in case.clauses}
    return [
        name for name, clause in clauses.items() if name not in covered and clause.elsewhere is None
    ]


def filled(text: str, fill: Mapping[str, Fill]) -> str:
    """`$name` -> its repeated text."""
    for name, (part, times) in fill.items():
        text = text.replace(f"${name}", part * times)
    return text


def _tables(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))
