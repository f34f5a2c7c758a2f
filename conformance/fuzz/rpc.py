"""Garbage over gRPC: bytes that are no messages, messages of odd values, wrong paths, much, and calls that are taken back."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from conformance.fuzz.bodies import text
from conformance.fuzz.mutations import ODD_TEXTS
from conformance.fuzz.servers import Server
from conformance.fuzz.shot import Shot
from conformance.fuzz.storm import Finding

HANG_SECONDS = 20.0
GARBAGE = "not a tei.v1."  # what is no message is INTERNAL by gRPC's own rules
OURS = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "ABORTED", "DEADLINE_EXCEEDED", "UNAVAILABLE"})
PATHS = ("/", "/x", "/tei.v1.Embed/Nope", "/tei.v1.Nope/Embed", "/tei.v1.Embed/Embed/x", "/grpc.health.v1.Health/Nope", "//")


def storm(server: Server, seed: str, calls: int, found: Callable[[Finding], object]) -> Counter[str]:
    """Codes by count; findings are told. Nothing happens without grpcio."""
    try:
        import grpc

        from hybridtei.rpc import messages
    except ImportError:
        return Counter()
    draw = Random(seed)
    methods = [method for service in messages.services() for method in service.methods]
    codes: Counter[str] = Counter()
    with grpc.insecure_channel(f"{server.host}:{server.grpc_port}", [("grpc.max_send_message_length", -1)]) as channel:
        for _ in range(calls):
            method = draw.choice(methods)
            path = draw.choice(PATHS) if draw.random() < 0.1 else f"/{method.containing_service.full_name}/{method.name}"
            given = [_message(draw, messages.message(method.input_type.name)) for _ in range(draw.choice((0, 1, 1, 2, 9)))]
            code, said = _call(draw, channel, method, path, given=given or [b""], server=server)
            codes[code] += 1
            if code in OURS and not said.startswith(GARBAGE):
                note = json.dumps({"path": path, "code": code, "said": said})
                shot = Shot("grpc", tuple(given) or (b"",), note=note)
                found(Finding(server.plan.name, (f"{path}: {code} {said[:300]}",), shot))
    return codes


def _call(draw: Random, channel: Any, method: Any, path: str, *, given: list[bytes], server: Server) -> tuple[str, str]:
    import grpc

    streams = method.client_streaming
    form = f"{'stream' if streams else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    metadata = [("model", draw.choice((*server.plan.models, "nobody", "", "x" * 3000)))] if draw.random() < 0.5 else []
    if server.plan.key is not None and draw.random() < 0.9:
        metadata.append(("authorization", f"Bearer {server.plan.key}"))
    stub = getattr(channel, form)(path)
    call = stub if method.server_streaming else stub.future
    pending = call(iter(given) if streams else given[0], metadata=metadata, timeout=HANG_SECONDS)
    if draw.random() < 0.1:
        pending.cancel()
    try:
        [*pending] if method.server_streaming else pending.result()
    except grpc.FutureCancelledError:
        return "CANCELLED", ""
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


def _message(draw: Random, kind: Any) -> bytes:
    """A message of drawn values, its bytes spoiled, or noise."""
    message = kind()
    for field in kind.DESCRIPTOR.fields:
        if draw.random() < 0.6:
            _fill(draw, message, field)
    data = bytearray(message.SerializeToString())
    roll = draw.random()
    if roll < 0.2:
        return draw.randbytes(draw.choice((1, 5, 100, 3000)))
    if roll < 0.4 and data:
        for _ in range(draw.choice((1, 3))):
            data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)


def _fill(draw: Random, message: Any, field: Any) -> None:
    values: dict[int, Any] = {
        field.TYPE_STRING: lambda: draw.choice((text(draw), draw.choice(ODD_TEXTS), "baka " * draw.choice((100, 50_000)))),
        field.TYPE_BOOL: lambda: draw.random() < 0.5,
        field.TYPE_UINT32: lambda: draw.choice((0, 1, 7, 30, 2**31, 2**32 - 1)),
        field.TYPE_UINT64: lambda: draw.choice((0, 1, 2**64 - 1)),
        field.TYPE_FLOAT: lambda: draw.choice((0.0, float("nan"), float("inf"), -1.5)),
        field.TYPE_ENUM: lambda: draw.choice((0, 1, 2, 77, -1)),
    }
    make = values.get(field.type)
    if make is None:
        return
    if field.is_repeated:
        getattr(message, field.name).extend(make() for _ in range(draw.choice((0, 1, 2, 3, 40, 700))))
    else:
        setattr(message, field.name, make())
