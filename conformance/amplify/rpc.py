"""Requests over gRPC: messages with large fields, for every method."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import TYPE_CHECKING, Any

import grpc

from conformance.amplify.request import Request, encode
from conformance.amplify.shapes import UNITS
from hybridtei.server.grpc import messages

if TYPE_CHECKING:
    from conformance.amplify.target import Target

# Of a call, and of each of many calls at once
SECONDS, CROWD_SECONDS = 60.0, 5.0
# Up to what gRPC takes by default
SIZES = (3_900_000, 2_000_000, 500_000, 20_000, 100)
COPIES = (1, 1, 1, 8, 512)
INTEGERS = ("TYPE_UINT32", "TYPE_UINT64", "TYPE_ENUM")


def draw_call(draw: Random) -> Request:
    """A method, with one field of its message large and others as they come."""
    method = draw.choice([method for service in messages.services() for method in service.methods])
    body: dict[str, Any] = {}
    copies = draw.choice(COPIES) if method.client_streaming else 1
    # The smallest size in 512 copies would be nothing
    size = max(draw.choice(SIZES) // copies, 2)
    for field in method.input_type.fields:
        name, kind = field.name, field.type
        if kind == field.TYPE_STRING and not (name == "prompt_name" and draw.random() < 0.9):
            unit = draw.choice([unit for unit in UNITS if "\\" not in unit])
            if field.is_repeated:
                count = draw.choice((2, 1000, size))
                body[name] = {
                    "*list": [{"*text": [unit, max(size // count // len(unit), 1)]}, count]
                }
            else:
                body[name] = {"*text": [unit, max(size // len(unit.encode()), 1)]}
        elif kind == field.TYPE_BOOL:
            body[name] = draw.random() < 0.8
        elif field.is_repeated:
            body[name] = {"*list": [5, draw.choice((2, size // 2))]}
    return Request(
        "RPC", f"/{method.containing_service.full_name}/{method.name}", body, copies=copies
    )


def call(target: Target, request: Request) -> tuple[int, Callable[[], tuple[str, int]]]:
    """How many bytes are sent, and what sends them: its code, and how many bytes came back."""
    service, name = request.path.strip("/").split("/")
    method = next(
        method
        for one in messages.services()
        if one.full_name == service
        for method in one.methods
        if method.name == name
    )
    message = messages.message(method.input_type.name)(
        **json.loads(encode(request.body))
    ).SerializeToString()

    def once(seconds: float) -> tuple[str, int]:
        form = f"{_form(method.client_streaming)}_{_form(method.server_streaming)}"
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(f"{target.host}:{target.rpc_port}", options) as channel:
            stub = getattr(channel, form)(request.path)
            given = iter([message] * request.copies) if method.client_streaming else message
            try:
                answer = stub(given, timeout=seconds)
                parts = [*answer] if method.server_streaming else [answer]
            except grpc.RpcError as error:
                return str(error.code().name), 0
        return "OK", sum(map(len, parts))

    def work() -> tuple[str, int]:
        if request.connections == 1:
            return once(SECONDS)
        with ThreadPoolExecutor(request.connections) as clients:
            outcomes = [*clients.map(once, [CROWD_SECONDS] * request.connections)]
        status, _ = Counter(status for status, _ in outcomes).most_common(1)[0]
        return status, sum(size for _, size in outcomes)

    return len(message) * request.copies * request.connections, work


def _form(streams: bool) -> str:
    return "stream" if streams else "unary"
