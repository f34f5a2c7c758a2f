"""Nodes that share one state, as a cluster's do: calls go on elsewhere where one is gone, hangs or fails half its calls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest

from hybridtei.config import StoreConfig
from hybridtei.errors import StoreError, StoreUnavailable
from hybridtei.store.failures import retry_unavailable
from hybridtei.store.nodes import urls_of
from hybridtei.store.server import ServerStore
from tests.store.speaking import Failure, Qdrant, serving_grpc, serving_rest
from tests.store.stores import plan
from tests.store.test_server_store import POINTS

PROTOCOLS = ("grpc", "rest")
SERVING: dict[str, Any] = {"grpc": serving_grpc, "rest": serving_rest}


class Node(Qdrant):
    """A node of a cluster: its own troubles, the state of `others`. `is_flaky`: each second call fails."""

    is_flaky = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._turns = itertools.count()

    def join(self, other: Qdrant) -> None:
        self.local.close()
        self.local, self.lock = other.local, other.lock
        self.made, self.optimizers, self.status, self.peers = other.made, other.optimizers, other.status, other.peers

    def do(self, call: str, *arguments: Any, **options: Any) -> Any:
        if self.is_flaky and next(self._turns) % 2:
            raise Failure(503, "this node is ill")
        return super().do(call, *arguments, **options)


def cluster(protocol: str, story: Callable[[ServerStore, list[Node]], Awaitable[None]], **settings: Any) -> None:
    """Runs the story with a store of two nodes."""
    nodes = [Node(), Node()]
    nodes[1].join(nodes[0])
    with ExitStack() as stack:
        ports = [stack.enter_context(SERVING[protocol](node)) for node in nodes]
        scheme = "grpc" if protocol == "grpc" else "http"
        urls = ",".join(f"{scheme}://127.0.0.1:{port}" for port in ports)

        async def run() -> None:
            store = ServerStore(StoreConfig(qdrant_url=urls, **settings), patient=settings.get("qdrant_patience") is not None)
            try:
                async with asyncio.timeout(60):
                    await story(store, nodes)
            finally:
                for node in nodes:
                    node.held.set()
                await store.close()

        asyncio.run(run())
    nodes[0].local.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_node_that_fails_half_its_calls_costs_no_call(protocol: str) -> None:
    async def story(store: ServerStore, nodes: list[Node]) -> None:
        await store.create("c", plan())
        nodes[0].is_flaky = True
        for point in POINTS:
            await store.upsert("c", [point])
            await store.count("c")
        assert await store.count("c") == len(POINTS)
        assert nodes[1].calls

    cluster(protocol, story)  # not patient, as /search is: a call that fails is not tried again at the same node


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_node_that_hangs_is_left_and_asked_again_once_it_answers(protocol: str) -> None:
    async def story(store: ServerStore, nodes: list[Node]) -> None:
        await store.create("c", plan())
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

    cluster(protocol, story, qdrant_patience=60.0)  # a healthy node may take longer than the check on a loaded machine


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_first_node_that_is_gone_is_nothing_to_wait_for(protocol: str) -> None:
    node = Qdrant()
    with SERVING[protocol](node) as port:
        scheme = "grpc" if protocol == "grpc" else "http"

        async def run() -> None:
            urls = f"{scheme}://127.0.0.1:1,{scheme}://127.0.0.1:{port}"
            store = ServerStore(StoreConfig(qdrant_url=urls, qdrant_patience=0.0))
            await store.create("c", plan())
            await store.upsert("c", POINTS)
            assert await store.count("c") == len(POINTS)
            await store.close()

        asyncio.run(asyncio.wait_for(run(), 60))
    node.local.close()


def test_a_failure_has_one_account_of_its_tries() -> None:
    async def away() -> None:
        raise StoreUnavailable("down")

    async def run() -> None:
        await retry_unavailable(lambda: retry_unavailable(away, 0.01), 0.0)

    with pytest.raises(StoreUnavailable) as raised:
        asyncio.run(run())
    assert str(raised.value).count("tried") == 1


def test_addresses_are_those_of_one_protocol() -> None:
    assert urls_of("http://a:6334/, http://b") == ["http://a:6334", "http://b"]
    with pytest.raises(StoreError, match="commas"):
        urls_of("http://a,,http://b")
    with pytest.raises(StoreError, match="all of REST"):
        ServerStore(StoreConfig(qdrant_url="grpc://a,http://b:8080"))
