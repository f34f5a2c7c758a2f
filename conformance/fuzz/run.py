"""Fuzz the server: every route, every kind of model, any bytes; and between them requests whose
answers must never change.

    python conformance/fuzz/run.py --requests 200000 [--seed N] [--only PLAN …] [--findings FOLDER]

Starts one server after the other (`servers.PLANS`) over seeded tiny checkpoints. A finding is: a
process that ends, no end within 20 s, a 5xx, a body that is not what it says, an answer that is
missing, a valid request answered otherwise than before, a trace in the log, memory that grows.
Writes findings to a folder as raw bytes. Write a test for each finding that mattered. Prints a
table, then one line of JSON; exit 1 if anything was found. The same seed makes the same shots; in
which order the connections' shots reach the server is the network's.

Memory is flat if what the process comes back to does not rise: after a first fifth, in which it may
grow to what its largest requests take, the low-water mark of the second half is compared with that
of the first, since both see requests of the same sizes. Short runs say nothing: see `LOOKS`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    # Run as a file, this package is not on the path
    sys.path.insert(0, str(ROOT))

from conformance.fuzz.servers import PLANS, Plan, Server, serving, write_model  # noqa: E402
from conformance.fuzz.shot import Shot  # noqa: E402
from conformance.fuzz.storm import Finding, Storm, Tally  # noqa: E402

# By which the second half's low-water mark may be above the first's, whichever is more
GROWTH_SHARE, GROWTH_MB = (0.05, 16.0)
# Two a second; fewer say nothing about memory
LOOKS = 60
# The first 1 / WARM_UP of the measurements does not count
WARM_UP = 5
# Findings of a server whose bytes are written
KEPT = 200
NOTHING = Shot("none", (b"",))


@dataclass(frozen=True)
class Result:
    """One server's results."""

    server: Server
    tally: Tally
    findings: int


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    arguments = _parser().parse_args(argv)
    seed = arguments.seed if arguments.seed is not None else int.from_bytes(os.urandom(4), "big")
    plans = [plan for plan in PLANS if not arguments.only or plan.name in arguments.only]
    print(f"seed {seed}, {arguments.requests} requests", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        scratch = Path(folder)
        os.environ.setdefault("HYBRIDTEI_CACHE", str(scratch / "cache"))
        results = [_storm(plan, plans, seed, arguments, scratch) for plan in plans]
    return _report(seed, results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000, help="over all servers")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--only", nargs="+", choices=[plan.name for plan in PLANS])
    parser.add_argument(
        "--findings", default="fuzz-findings", help="folder for the bytes of findings"
    )
    return parser


def _storm(
    plan: Plan, plans: Sequence[Plan], seed: int, arguments: argparse.Namespace, scratch: Path
) -> Result:
    wanted = arguments.requests * plan.share // sum(one.share for one in plans)
    with serving(plan, partial(write_model, folder=scratch / "models"), scratch) as server:
        return _against(server, seed, wanted, arguments)


def _against(server: Server, seed: int, wanted: int, arguments: argparse.Namespace) -> Result:
    findings = Findings(Path(arguments.findings))
    before = server.pids()
    tally = asyncio.run(Storm(server, str(seed), wanted, findings.add).run())
    for reason in (*flatness(server), *strangers(server, before), *server.alarms()):
        findings.add(Finding(server.plan.name, (reason,), NOTHING))
    line = (
        f"{server.plan.name:10s} {tally.requests:7d} requests "
        f"{tally.requests / max(tally.seconds, 0.001):6.0f}/s"
    )
    valid = f"{tally.valid:6d} valid ({tally.exactly_equal} byte-equal)"
    print(f"{line} {valid} {findings.count} findings", flush=True)
    return Result(server, tally, findings.count)


class Findings:
    """Prints each finding, and writes its bytes and the reason to a folder."""

    def __init__(self, folder: Path) -> None:
        self.count = 0
        self._folder = folder

    def add(self, finding: Finding) -> None:
        shot = finding.shot
        self.count += 1
        print(
            f"FINDING {finding.server} {shot.kind}: {'; '.join(finding.reasons)[:400]}", flush=True
        )
        if self.count > KEPT:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = f"{finding.server}-{self.count:03d}-{shot.kind.replace(' ', '-').replace('/', '-')}"
        (self._folder / f"{stem}.raw").write_bytes(shot.data)
        (self._folder / f"{stem}.txt").write_text(
            "\n".join((*finding.reasons, shot.note)), encoding="utf-8"
        )


def flatness(server: Server) -> list[str]:
    """Return the reason why memory is not flat, or None."""
    if len(server.megabytes) < LOOKS:
        return []
    first, second = low_water(server.megabytes)
    if second - first > max(GROWTH_MB, GROWTH_SHARE * first):
        return [f"memory grows: its low-water mark from {first:.0f} to {second:.0f} MB"]
    return []


def low_water(looks: Sequence[float]) -> tuple[float, float]:
    """The first decile of the measurements, in each of the two halves after the warm-up."""
    warm = looks[len(looks) // WARM_UP :]
    first, second = (sorted(half) for half in (warm[: len(warm) // 2], warm[len(warm) // 2 :]))
    return first[len(first) // 10], second[len(second) // 10]


def strangers(server: Server, pids: set[int]) -> list[str]:
    """Processes that have ended."""
    gone = pids - server.pids()
    return [f"processes are gone: {sorted(gone)}"] if gone else []


def _report(seed: int, results: Sequence[Result]) -> int:
    statuses: Counter[tuple[str, str]] = Counter()
    errors: Counter[str] = Counter()
    for result in results:
        statuses += result.tally.statuses
        errors += result.tally.errors
    print(_table(statuses))
    print("\n".join(f"  {count:6d} x 424 {message}" for message, count in errors.most_common(12)))
    by_status: Counter[str] = Counter()
    for (_, status), count in statuses.items():
        by_status[status] += count
    findings = sum(result.findings for result in results)
    told = {
        "seed": seed,
        "requests": sum(result.tally.requests for result in results),
        "valid": sum(result.tally.valid for result in results),
        "valid_byte_equal": sum(result.tally.exactly_equal for result in results),
        "seconds": round(sum(result.tally.seconds for result in results)),
        "statuses": dict(sorted(by_status.items())),
        "findings": findings,
    }
    print(json.dumps(told))
    return int(bool(findings))


def _table(statuses: Counter[tuple[str, str]]) -> str:
    names = sorted({status for _, status in statuses})
    lines = [f"{'':14s}" + "".join(f"{name:>8s}" for name in names)]
    for kind in sorted({kind for kind, _ in statuses}):
        lines.append(f"{kind:14s}" + "".join(f"{statuses[kind, name] or '':>8}" for name in names))
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
