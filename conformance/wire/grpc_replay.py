"""Replay calls recorded from TEI's gRPC build against this server, one start per profile.

    python conformance/wire/grpc_replay.py --golden FOLDER [--profile NAME]

FOLDER holds `grpc.json` and `models/`. Codes, texts and integers are compared exactly, numbers
within 2e-3 (TEI computes GELU in its tanh form); near-zero entries of a sparse vector may be
missing, and prompts are named in no order. Calls that TEI never answered must be answered once.
Ends with `grpc: A/B equal`, and with status 0 when all are.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from google.protobuf import json_format

from hybridtei.server.grpc import messages

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# Run as a file, this package is not on the path
from conformance.processes import free_port, served, started  # noqa: E402

PROFILES: dict[str, tuple[str, list[str]]] = {
    "grpc.bert-mean": ("bert-mean", []),
    "grpc.splade": ("bert-splade", ["--pooling", "splade"]),
    "grpc.reranker": ("bert-reranker", []),
    "grpc.classifier": ("bert-classifier", []),
    "grpc.api-key": ("bert-mean", ["--api-key", "secret"]),
    "grpc.prompt": ("bert-mean", ["--default-prompt", "query: "]),
}
TOLERANCE = 2e-3
SECONDS = 60
# Of Info
FREE = {"version", "sha", "docker_label", "model_id", "max_batch_requests", "tokenization_workers"}
NEVER_ANSWERED = "NEVER ANSWERED"
# (model, flags) -> the gRPC address of a server
Serve = Callable[[Path, Sequence[str]], AbstractContextManager[str]]


@contextmanager
def server(model: Path, flags: Sequence[str]) -> Iterator[str]:
    """A server process, once it is ready: its gRPC address. Raises RuntimeError if it does not come
    up."""
    port, grpc_port = free_port(), free_port()
    command = served(port, "--model-id", str(model), "--grpc-port", str(grpc_port), *flags)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with (
        TemporaryDirectory() as folder,
        started(command, port, Path(folder) / "log", env=environment) as process,
    ):
        yield f"127.0.0.1:{grpc_port}"
        process.terminate()
        if (status := process.wait(SECONDS)) != 0:
            raise RuntimeError(f"ended with status {status}")


def ask(channel: grpc.Channel, call: dict[str, Any]) -> list[dict[str, Any]]:
    """All answers of one call, as protobuf JSON. Raises grpc.RpcError."""
    service = messages.POOL.FindServiceByName(f"{messages.PACKAGE}.{call['service']}")
    method = service.methods_by_name[call["method"]]
    takes, gives = (
        messages.message(method.input_type.name),
        messages.message(method.output_type.name),
    )
    form = "_".join(
        "stream" if streams else "unary"
        for streams in (method.client_streaming, method.server_streaming)
    )
    given = [json_format.ParseDict(request, takes()) for request in call["request"]]
    answer = getattr(channel, form)(
        f"/{service.full_name}/{method.name}",
        request_serializer=takes.SerializeToString,
        response_deserializer=gives.FromString,
    )(iter(given) if method.client_streaming else given[0], timeout=SECONDS)
    answers = [*answer] if method.server_streaming else [answer]
    return [
        json_format.MessageToDict(
            one, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        for one in answers
    ]


def judge(channel: grpc.Channel, call: dict[str, Any]) -> str | None:
    """None, or what differs."""
    wanted_error = call.get("error")
    try:
        got = ask(channel, call)
    except grpc.RpcError as error:
        if wanted_error is None:
            return f"{error.code().name}: {error.details()}"
        told = {"code": error.code().name, "details": _sorted_prompts(error.details() or "")}
        wanted = {"code": wanted_error["code"], "details": _sorted_prompts(wanted_error["details"])}
        return None if told == wanted else f"{told}, recorded {wanted}"
    if wanted_error is None:
        return differ(got, call["response"], "")
    if not wanted_error["code"].startswith(NEVER_ANSWERED):
        return f"answered, recorded {wanted_error}"
    ranks = got[0]["ranks"]
    complete = len(got) == 1 and sorted(rank["index"] for rank in ranks) == [
        *range(len(call["request"]))
    ]
    falling = [rank["score"] for rank in ranks] == sorted(
        (rank["score"] for rank in ranks), reverse=True
    )
    return None if complete and falling else f"not one answer about all: {got}"


def _sorted_prompts(details: str) -> str:
    head, named, prompts = details.partition("Available prompts: ")
    return head + named + str(sorted(json.loads(prompts))) if named else details


def differ(got: Any, want: Any, path: str) -> str | None:
    """None, or the first place where two values differ."""
    if want == "any":
        return None if str(got).isdecimal() else f"{path}: {got!r} is no time"
    if isinstance(want, dict):
        return _objects(got, want, path)
    if isinstance(want, list):
        return _lists(got, want, path)
    equal = _near(got, want) if isinstance(want, float) else got == want
    return None if equal else f"{path}: {got!r}, recorded {want!r}"


def _objects(got: dict[str, Any], want: dict[str, Any], path: str) -> str | None:
    if "model_id" in want:
        got, want = (
            {key: value for key, value in one.items() if key not in FREE} for one in (got, want)
        )
    if got.keys() != want.keys():
        return f"{path} keys: {sorted(got.keys() ^ want.keys())}"
    return next(
        (found for key in want if (found := differ(got[key], want[key], f"{path}.{key}"))), None
    )


def _lists(got: list[Any], want: list[Any], path: str) -> str | None:
    if want and isinstance(want[0], dict) and want[0].keys() == {"index", "value"}:
        return _sparse(got, want, path)
    if len(got) != len(want):
        return f"{path}: {len(got)} elements, recorded {len(want)}"
    pairs = enumerate(zip(got, want, strict=True))
    return next(
        (
            found
            for place, (one, other) in pairs
            if (found := differ(one, other, f"{path}[{place}]"))
        ),
        None,
    )


def _sparse(got: list[dict[str, Any]], want: list[dict[str, Any]], path: str) -> str | None:
    ours, theirs = ({entry["index"]: entry["value"] for entry in one} for one in (got, want))
    if [*ours] != sorted(ours):
        return f"{path}: not ascending"
    far = [
        index
        for index in ours.keys() | theirs.keys()
        if not _near(ours.get(index, 0.0), theirs.get(index, 0.0))
    ]
    return (
        f"{path} index {far[0]}: {ours.get(far[0])}, recorded {theirs.get(far[0])}" if far else None
    )


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= TOLERANCE + TOLERANCE * abs(other)


def replay(golden: Path, profile: str = "", serve: Serve = server) -> tuple[int, list[str]]:
    """(how many calls were compared, what differs) over all profiles that begin with `profile`."""
    calls = json.loads((golden / "grpc.json").read_text(encoding="utf-8"))["calls"]
    total, differences = 0, []
    for name, (model, flags) in PROFILES.items():
        if not name.startswith(profile):
            continue
        own = [(place, call) for place, call in enumerate(calls) if call["profile"] == name]
        with (
            serve(golden / "models" / model, flags) as address,
            grpc.insecure_channel(address) as channel,
        ):
            for place, call in own:
                found = judge(channel, call)
                if found is not None:
                    differences.append(f"{place} {name} {call['method']}: {found[:400]}")
        total += len(own)
    return total, differences


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--golden", type=Path, required=True)
    parser.add_argument("--profile", default="", help="a profile, or the beginning of several")
    arguments = parser.parse_args()
    total, differences = replay(arguments.golden, arguments.profile)
    print(*differences, sep="\n")
    print(f"grpc: {total - len(differences)}/{total} equal")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
