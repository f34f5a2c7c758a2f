"""Nodes of a server or cluster: calls go on elsewhere where one is gone, hangs or fails half its
calls; callers learn at once that all are away, and reach them again when they are back."""

import asyncio
import contextlib
import itertools
import socket
import threading
from contextlib import ExitStack, asynccontextmanager, contextmanager

import httpx
import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from qdrant_client.http.exceptions import UnexpectedResponse

from hybridtei.config import StoreConfig
from hybridtei.errors import StoreAway, StoreError, StoreUnavailable
from hybridtei.retrieval.store import nodes as addresses
from hybridtei.retrieval.store import nodes as module
from hybridtei.retrieval.store.nodes import ADVICE, Nodes, store_error, urls_of
from hybridtei.retrieval.store.server import ServerStore
from tests.retrieval.store.speaking import Failure, Qdrant, serving_grpc, serving_rest, speaking
from tests.retrieval.store.stores import plan
from tests.retrieval.store.test_server_store import POINTS


class Server:
    """A server's answer, and the number of its calls."""

    def __init__(self):
        self.calls, self.checks = 0, 0
        self.failure = None
        self.held, self.deaf = asyncio.Event(), asyncio.Event()
        self.held.set()
        self.deaf.set()
        self.nodes = Nodes({"here": self}, lambda _: self.check(), 0.01, 0.01)

    async def answer(self, _):
        self.calls += 1
        await self.held.wait()
        await self.deaf.wait()
        if self.failure is not None:
            raise self.failure
        return "found"

    async def check(self):
        self.checks += 1
        await self.deaf.wait()
        if isinstance(self.failure, OSError):
            raise self.failure

    async def close(self):
        """As a client is closed."""

    def ask(self):
        return self.nodes.call(self.answer)


@asynccontextmanager
async def server_of(failure=None):
    server = Server()
    server.failure = failure
    yield server
    await server.nodes.close()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def away(server):
    with pytest.raises(StoreAway, match="no such host"):
        await server.ask()


async def test_while_it_is_away_calls_are_told_at_once_and_it_is_found_when_it_is_back(
    monkeypatch,
):
    monkeypatch.setattr(module, "RETURN_S", 0.01)
    async with server_of(ConnectionRefusedError("no such host")) as server:
        for _ in range(2):
            for _ in range(3):
                await away(server)
            assert server.calls == 1
            # It is looked for, and not found
            while server.checks < 4:
                await asyncio.sleep(0.001)
            await away(server)
            server.failure = None
            while server.nodes._nodes[0].away is not None:
                await asyncio.sleep(0.001)
            assert [await server.ask() for _ in range(3)] == ["found"] * 3
            server.calls, server.checks, server.failure = (
                0,
                0,
                ConnectionRefusedError("no such host"),
            )


async def test_calls_that_fail_together_share_one_check():
    async with server_of(ConnectionRefusedError("no such host")) as server:
        failed = await asyncio.gather(*(server.ask() for _ in range(20)), return_exceptions=True)
        assert {type(one) for one in failed} == {StoreAway}
        assert (server.calls, server.checks) == (20, 1)


async def test_a_long_call_goes_on_while_the_server_answers_others():
    async with server_of() as server:
        server.held.clear()
        asking = [asyncio.ensure_future(server.ask()) for _ in range(3)]
        while server.checks < 3:
            await asyncio.sleep(0.001)
        server.held.set()
        assert await asyncio.gather(*asking) == ["found"] * 3


async def test_a_server_that_hangs_is_away_and_the_call_is_cancelled():
    async with server_of() as server:
        server.deaf.clear()
        asked = await asyncio.gather(*(server.ask() for _ in range(3)), return_exceptions=True)
        assert {type(one) for one in asked} == {StoreAway}
        with pytest.raises(StoreAway, match=r"has not answered for 0\.02 s"):
            await server.ask()
        assert server.calls == 3


SERVING = {"grpc": serving_grpc, "rest": serving_rest}


class Node(Qdrant):
    """A node of a cluster: its own troubles, the state of `others`. `is_flaky`: each second call
    fails."""

    is_flaky = False

    def __post_init__(self):
        super().__post_init__()
        self._turns = itertools.count()

    def join(self, other):
        self.local.close()
        self.local, self.lock = other.local, other.lock
        self.made, self.optimizers, self.status, self.peers = (
            other.made,
            other.optimizers,
            other.status,
            other.peers,
        )

    def do(self, call, *arguments, **options):
        if self.is_flaky and next(self._turns) % 2:
            raise Failure(503, "this node is ill")
        return super().do(call, *arguments, **options)


def urls(protocol, *ports):
    scheme = "grpc" if protocol == "grpc" else "http"
    return ",".join(f"{scheme}://127.0.0.1:{port}" for port in ports)


@asynccontextmanager
async def cluster(protocol, **settings):
    """A store of two nodes, and these."""
    nodes = [Node(), Node()]
    nodes[1].join(nodes[0])
    with ExitStack() as stack:
        ports = [stack.enter_context(SERVING[protocol](node)) for node in nodes]
        store = ServerStore(
            StoreConfig(qdrant_url=urls(protocol, *ports), **settings),
            patient=settings.get("qdrant_patience") is not None,
        )
        try:
            async with asyncio.timeout(60):
                await store.create("c", plan())
                yield store, nodes
        finally:
            for node in nodes:
                node.held.set()
            await store.close()
    nodes[0].local.close()


async def test_a_node_that_fails_half_its_calls_costs_no_call(protocol):
    # Not patient, as /search is: a call that fails is not tried again at the same node
    async with cluster(protocol) as (store, nodes):
        nodes[0].is_flaky = True
        for point in POINTS:
            await store.upsert("c", [point])
            await store.count("c")
        assert await store.count("c") == len(POINTS)
        assert nodes[1].calls


async def test_a_node_that_hangs_is_left_and_asked_again_once_it_answers(protocol):
    # A healthy node may take longer than the check on a loaded machine
    async with cluster(protocol, qdrant_patience=60.0) as (store, nodes):
        store._nodes._check_after_s = store._nodes._check_s = 0.05
        nodes[0].held.clear()
        await store.upsert("c", POINTS)
        assert "upsert" in nodes[1].calls
        store._nodes._check_s = 5
        nodes[0].held.set()
        nodes[0].calls.clear()
        while "count" not in nodes[0].calls:
            assert await store.count("c") == len(POINTS)
            await asyncio.sleep(0.05)


@asynccontextmanager
async def half_gone(protocol, *, is_first, **settings):
    """A node, and a store with points of it and of another one that is gone, which is the first or
    the last of its addresses."""
    node = Qdrant()
    with SERVING[protocol](node) as port:
        ports = [1, port] if is_first else [port, 1]
        store = ServerStore(
            StoreConfig(qdrant_url=urls(protocol, *ports), **settings),
            patient=settings.get("qdrant_patience") is not None,
        )
        async with asyncio.timeout(60):
            await store.create("c", plan())
            await store.upsert("c", POINTS)
            yield node, store
        await store.close()
    node.local.close()


async def test_a_first_node_that_is_gone_is_nothing_to_wait_for(protocol):
    async with half_gone(protocol, is_first=True, qdrant_patience=0.0) as (_, store):
        assert await store.count("c") == len(POINTS)


@pytest.mark.parametrize("status", [500, 503])
async def test_an_error_of_one_collection_is_that_collections(protocol, status):
    """Of a lost shard, say: a node that answers is not left for it, and others that are gone are no
    absence of the store."""
    lost = Failure(status, "shard 2 of collection lost has no active replica")
    async with half_gone(protocol, is_first=False) as (node, store):
        for _ in range(3):
            node.failures.append(lost)
            with pytest.raises(StoreUnavailable) as raised:
                await store.count("lost")
            assert isinstance(raised.value, StoreAway) == (status == 503)
            assert await store.count("c") == len(POINTS)


async def test_no_port_is_asked_that_was_not_given(monkeypatch):
    with speaking(key="secret") as state:
        state.peers = 3
        monkeypatch.setattr(addresses, "REST_PORT", state.rest_port)

        async def peers(**settings):
            url = state.url("grpc")
            store = ServerStore(StoreConfig(qdrant_url=url, qdrant_api_key="secret", **settings))
            try:
                return await store.peers()
            finally:
                await store.close()

        with pytest.raises(StoreError, match="names no port of REST"):
            await peers()
        assert state.calls == []
        assert await peers(qdrant_rest_port=state.rest_port) == 3


class Names:
    """A DNS server with one address for every name. `asked`: how often it was asked for it."""

    def __init__(self, address):
        self.address, self.asked = address, 0
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]

    def answer(self):
        while len(query := (received := self._socket.recvfrom(512))[0]) > 12:
            # Labels, type and class
            question = query[12 : query.index(b"\0", 12) + 5]
            is_v4 = question.endswith(b"\0\1\0\1")
            self.asked += is_v4
            record = (
                b"\xc0\x0c\0\1\0\1\0\0\0\0\0\4" + socket.inet_aton(self.address) if is_v4 else b""
            )
            counts = b"\0\1" + bytes([0, is_v4]) + bytes(4)
            self._socket.sendto(query[:2] + b"\x84\0" + counts + question + record, received[1])

    @contextmanager
    def answering(self):
        thread = threading.Thread(target=self.answer)
        thread.start()
        try:
            yield
        finally:
            self._socket.sendto(b"end", self._socket.getsockname())
            thread.join()
            self._socket.close()


async def test_a_server_that_comes_back_at_another_address_is_found():
    """gRPC's own resolver is asked, whose answers the client keeps for half a minute by default."""
    node, names = Qdrant(), Names("127.0.0.9")
    with serving_grpc(node) as port, names.answering():
        address = addresses.Address(
            f"dns://127.0.0.1:{names.port}/qdrant.test", None, port, tls=False
        )
        client = addresses.client_of("grpc://qdrant.test", address, StoreConfig())
        async with asyncio.timeout(20):
            while not node.calls:
                with contextlib.suppress(AioRpcError):
                    await client.collection_exists("-")
                await asyncio.sleep(0.02)
                # Three times it is asked at once, and later where the address is not there
                if names.asked >= 6:
                    names.address = "127.0.0.1"
        await client.close()
    node.local.close()


def test_addresses_are_those_of_one_protocol():
    assert urls_of("http://a:6334/, http://b") == ["http://a:6334", "http://b"]
    with pytest.raises(StoreError, match="commas"):
        urls_of("http://a,,http://b")
    with pytest.raises(StoreError, match="all of REST"):
        ServerStore(StoreConfig(qdrant_url="grpc://a,http://b:8080"))


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("INVALID_ARGUMENT", 400),
        ("UNAUTHENTICATED", 401),
        ("PERMISSION_DENIED", 403),
        ("NOT_FOUND", 404),
        ("DEADLINE_EXCEEDED", 408),
        ("ALREADY_EXISTS", 409),
        ("RESOURCE_EXHAUSTED", 429),
        ("INTERNAL", 500),
    ],
)
def test_both_protocols_tell_the_same_advice(code, status):
    of_grpc = AioRpcError(StatusCode[code], Metadata(), Metadata(), details="words")
    of_rest = UnexpectedResponse(status, "", b"words", httpx.Headers())
    errors = [store_error(error, "http://q") for error in (of_grpc, of_rest)]
    assert len({type(error) for error in errors}) == 1
    for error in errors:
        assert str(error).startswith(f"Qdrant at http://q: {ADVICE[status]} (")
        assert str(error).endswith("words)")
