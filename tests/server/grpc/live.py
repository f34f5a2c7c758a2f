"""A real server over the fake backend, and a real gRPC client: requests as dictionaries, answers as
messages."""

import itertools
import os
import socket
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import grpc

from hybridtei.server.grpc import messages
from tests.server.live import HANG, Running, serving

Metadata = Sequence[tuple[str, str]]


# Below those that systems give away, and apart from another process's
PORTS = itertools.count(12_000 + os.getpid() % 200 * 100)


def free_port():
    """A port that the system gives to no other program before it is used."""
    for port in PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("unreachable")


def method_of(name):
    """By the method's name, which no two services share."""
    return next(
        method
        for service in messages.services()
        for method in service.methods
        if method.name == name
    )


def start(
    channel,
    name,
    given,
    *,
    metadata=(),
    timeout=HANG,
    wait=True,
):
    """A call: its answers where it streams them, else (answer, call); without `wait` what it will
    be.

    `given`: a dictionary or, for a stream, an iterable of them; bytes go as they are.
    """
    method = method_of(name)
    takes, gives = (
        messages.message(method.input_type.name),
        messages.message(method.output_type.name),
    )
    form = "_".join(
        "stream" if streams else "unary"
        for streams in (method.client_streaming, method.server_streaming)
    )

    def written(item):
        return item if isinstance(item, bytes) else takes(**item).SerializeToString()

    call = getattr(channel, form)(
        f"/{method.containing_service.full_name}/{name}",
        request_serializer=written,
        response_deserializer=gives.FromString,
    )
    request = iter(given) if method.client_streaming else given
    if method.server_streaming:
        return call(request, metadata=metadata, timeout=timeout)
    return (call.with_call if wait else call.future)(request, metadata=metadata, timeout=timeout)


@dataclass
class Rpc:
    """A server and a channel to it."""

    running: Running
    address: str
    channel: grpc.Channel

    @property
    def admission(self):
        return self.running.service.admission

    def ask(self, name, given, **settings):
        """The answer; of a stream, all of them."""
        call = start(self.channel, name, given, **settings)
        return [*call] if method_of(name).server_streaming else call[0]

    def refusal(self, name, given, **settings):
        """(code, details) of a call that fails."""
        try:
            self.ask(name, given, **settings)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError("answered")

    def counted(self, name):
        """A metric with its labels, as its line begins."""
        lines = self.running.get("/metrics").text.splitlines()
        return next(
            (float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} ")), 0
        )

    def is_well(self):
        """`Running.is_well`, and no caller waits."""
        self.running.is_well()


@contextmanager
def rpc_serving(*args, server=None, **settings):
    """`serving`, with gRPC."""
    own = {"hostname": "127.0.0.1", "grpc_port": free_port(), **(server or {})}
    address = f"127.0.0.1:{own['grpc_port']}"
    with (
        serving(*args, server=own, **settings) as running,
        grpc.insecure_channel(address) as channel,
    ):
        yield Rpc(running, address, channel)
