"""The largest amplifier: the request that makes the server's memory grow most, blocks its event
loop longest, or makes another client wait longest.

    python -m conformance.amplify [--seconds 20] [--seed 18] [--findings FILE]
    python -m conformance.amplify --replay 'REQUEST'        one line of a report

Starts `hybridtei serve` with its default flags, the embedded model and an embedded vector store
that holds a collection; passes take rows out of a table (`launch`). Requests are drawn for every
route of its OpenAPI document, and over gRPC where that is installed. Memory is the growth at the
peak of the server's processes, less the bytes of the request and of its encoded answer; a stall is
counted in processor time (`probe`); another client asks for one small embedding after the other
(`neighbour`). The most expensive requests are then sent by many clients at once. A request above
64 MB, 100 ms or a wait of 1 s (more on a slow processor: `bound_seconds`) is sent up to six times
more, and the smallest cost counts; the exit status is 1 if that is above, too. `kept.jsonl`, what
was ever found, comes first. The same seed draws the same requests, as far as the time goes.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from conformance.amplify.request import Request
from conformance.amplify.search import MAX_BYTES, MAX_SECONDS, MAX_WAIT_SECONDS, Case, Found, search
from conformance.amplify.shapes import Shapes
from conformance.amplify.target import Target, serving
from conformance.fuzz.bodies import Draw

# Requests that once cost too much
KEPT = Path(__file__).with_name("kept.jsonl")
# Of more, the engine builds an index for minutes
POINTS = 300
TEXT = "hybrid search finds words and meanings in documents "
REPEATS = 3
HEAD = f"{'MB':>8} {'ms':>7} {'wait ms':>8} {'refused':>7} {'answer MB':>9} {'status':>7}  request"
# At most, of texts that are not made large
WORDS = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="for the search, after the kept requests"
    )
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--findings", type=Path, help="file for the requests that cost too much")
    parser.add_argument(
        "--replay", action="append", default=[], help="send only this request; repeatable"
    )
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="amplify-") as folder, serving(Path(folder)) as target:
        store_collection(target)
        if arguments.replay:
            print(HEAD)
            for request in map(Request.read, arguments.replay):
                for _ in range(REPEATS):
                    print(told(Case(request, target.measure(request))), flush=True)
            return 0
        found = _search(target, arguments)
    return _report(found, arguments.seed, arguments.findings)


def store_collection(target: Target) -> None:
    """`docs`: points with different texts of half a kilobyte each, since equal texts are one
    point."""
    points = [{"text": f"{place} {TEXT * 10}"} for place in range(POINTS)]
    reply = target.ask(
        Request("POST", "/collections/docs/points", {"points": points, "create": True})
    )
    if reply is None or reply.status != 200:
        raise RuntimeError(f"no collection: {reply}")


def _search(target: Target, arguments: argparse.Namespace) -> Found:
    draw = Draw(arguments.seed)
    draw.longest = WORDS
    document, info = (
        target.ask(Request("GET", path)) for path in ("/api-doc/openapi.json", "/info")
    )
    assert document is not None
    assert info is not None
    shapes = Shapes(json.loads(document.body), json.loads(info.body)["model_id"], draw)
    calls = None
    if target.rpc_port is not None:
        from conformance.amplify.rpc import draw_call

        calls = partial(draw_call, draw)
    kept = [*map(Request.read, KEPT.read_text().splitlines())]
    return search(target.measure, shapes, draw, seconds=arguments.seconds, kept=kept, calls=calls)


def _report(found: Found, seed: int, findings: Path | None) -> int:
    beyond = [case for case in found.worst if case.excess > 1]
    tried = " ".join(f"{route} {number}" for route, number in sorted(found.tried.items()))
    print(
        f"seed {seed}: {sum(found.tried.values())} requests, {tried}\nanswered "
        f"{dict(sorted(found.statuses.items()))}"
    )
    print("\n".join([HEAD, *map(told, sorted(found.worst, key=lambda case: -case.excess))]))
    bounds = f"{MAX_BYTES / 1e6:.0f} MB, {MAX_SECONDS * 1e3:.0f} ms, {MAX_WAIT_SECONDS:.0f} s"
    print(f"beyond {bounds}: {len(beyond)}")
    if findings is not None:
        findings.write_text(
            "".join(f"{case.request.told()}\n" for case in beyond), encoding="utf-8"
        )
    return int(bool(beyond))


def told(case: Case) -> str:
    """Return a line of the report."""
    cost = case.cost
    figures = (
        f"{cost.growth_bytes / 1e6:8.1f} {cost.stall_seconds * 1e3:7.1f} "
        f"{cost.wait_seconds * 1e3:8.1f} {cost.refused:7d} {cost.answer_bytes / 1e6:9.1f}"
    )
    return f"{figures} {cost.status:>7}  {case.request.told()}"


if __name__ == "__main__":
    sys.exit(main())
