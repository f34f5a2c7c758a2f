"""Test a server against the specification of TEI's HTTP API, clause by clause.

    python -m conformance.wire                                   our server, one start a profile
    python -m conformance.wire --launch 'CMD {model} {port}'     another one's
    python -m conformance.wire --base-url URL --profile NAME     one that runs: with the model and flags of the profile
    python -m conformance.wire --write-models FOLDER             the models, to start such a one with
    python -m conformance.wire --list                            clauses, and what covers them

Exit 1 if a case fails, or if a clause has neither a case nor a reason to have none.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conformance.wire.case import (
    Case,
    Clause,
    Profile,
    read_cases,
    read_clauses,
    read_profiles,
    uncovered,
)
from conformance.wire.judge import judged
from conformance.wire.launch import OURS, launched

# Servers: one starts while the other answers
AT_ONCE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.base_url and not arguments.profile:
        parser.error("--base-url: say with --profile which model and flags that server has")
    clauses, cases, profiles = read_clauses(), read_cases(), read_profiles()
    if arguments.list:
        _list(clauses, cases)
        return bool(uncovered(clauses, cases))
    if arguments.write_models:
        from conformance.wire.checkpoints import WRITERS, write

        for model in WRITERS:
            print(write(model, Path(arguments.write_models)))
        return 0
    names = [name for name in profiles if arguments.profile in (None, name)]
    with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
        wanted = {
            name: [
                case
                for case in cases
                if name in case.profiles and (arguments.only or "") in case.name
            ]
            for name in names
        }
        wanted = {name: mine for name, mine in wanted.items() if mine}
        folders = (
            {}
            if arguments.base_url
            else _written({profiles[name].model for name in wanted}, Path(folder))
        )
        failures: dict[str, list[str]] = {}
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for found in pool.map(
                lambda name: _asked(arguments, name, profiles[name], wanted[name], folders), wanted
            ):
                failures |= found
    whole = arguments.profile is None and arguments.only is None
    return _report(clauses, wanted, failures, uncovered(clauses, cases) if whole else [])


def _written(models: Iterable[str], folder: Path) -> dict[str, Path]:
    """Model -> its folder. One after the other, since weights follow from a seed of the process."""
    from conformance.wire.checkpoints import write

    return {model: write(model, folder) for model in models}


def _asked(
    arguments: argparse.Namespace,
    name: str,
    profile: Profile,
    cases: Sequence[Case],
    folders: Mapping[str, Path],
) -> dict[str, list[str]]:
    if arguments.base_url:
        return judged(arguments.base_url, name, profile, cases)
    try:
        with launched(arguments.launch, profile, folders[profile.model]) as url:
            return judged(url, name, profile, cases)
    except RuntimeError as error:
        return {f"{case.name} {name}": [str(error)] for case in cases}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--launch", default=OURS, help="command line of a server, with {model} and {port}"
    )
    parser.add_argument("--base-url", help="a server that runs")
    parser.add_argument("--profile", help="of profiles.toml")
    parser.add_argument("--only", help="cases whose name holds this")
    parser.add_argument("--write-models", metavar="FOLDER")
    parser.add_argument("--list", action="store_true")
    return parser


def _list(clauses: Mapping[str, Clause], cases: Sequence[Case]) -> None:
    for name, clause in clauses.items():
        mine = [case.name for case in cases if name in case.clauses]
        covered = (
            f"{len(mine):3d} cases" if mine else "elsewhere" if clause.elsewhere else "UNCOVERED"
        )
        print(
            f"{name:34s} {covered:10s} {clause.title}"
            + (f" -- {clause.elsewhere}" if clause.elsewhere else "")
        )


def _report(
    clauses: Mapping[str, Clause],
    cases: Mapping[str, Sequence[Case]],
    failures: Mapping[str, list[str]],
    bare: Sequence[str],
) -> int:
    """A line a clause, what failed, what nothing covers, and all of it as JSON. `cases`: of each
    profile."""
    asked = [(case, profile) for profile, mine in cases.items() for case in mine]
    for name, clause in clauses.items():
        mine = [f"{case.name} {profile}" for case, profile in asked if name in case.clauses]
        failed = [one for one in mine if one in failures]
        if mine:
            print(
                f"{'FAIL' if failed else 'ok  '} {len(mine) - len(failed):3d}/{len(mine):<3d} "
                f"{name:34s} {clause.title}"
            )
        for one in failed:
            for reason in failures[one]:
                print(f"       {one}: {reason}")
    for name in bare:
        print(f"UNCOVERED {name}: {clauses[name].title}")
    covered = {clause for case, _ in asked for clause in case.clauses}
    elsewhere = [
        name
        for name, clause in clauses.items()
        if clause.elsewhere is not None and name not in covered
    ]
    print(
        json.dumps(
            {
                "clauses": len(clauses),
                "covered": len(covered),
                "elsewhere": len(elsewhere),
                "uncovered": [*bare],
                "cases": len(asked),
                "passed": len(asked) - len(failures),
                "failed": sorted(failures),
            }
        )
    )
    return int(bool(failures or bare))


if __name__ == "__main__":
    raise SystemExit(main())
