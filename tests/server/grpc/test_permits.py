"""All permits taken, over a real connection: some callers wait, others are refused, and every leaving caller gives all back."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from tests.server.conftest import labelled
from tests.server.grpc.live import Rpc, rpc_serving, start
from tests.server.live import HANG, Hold, until


def test_single_calls_are_refused_and_streams_wait():
    hold = Hold()
    with (
        rpc_serving(engine={"max_concurrent_requests": 2}, gate=hold) as rpc,
        ThreadPoolExecutor(4) as pool,
    ):
        holders = [pool.submit(rpc.ask, "Embed", {"inputs": text}) for text in ("one", "two")]
        until(lambda: rpc.admission.free == 0)
        streams = [
            pool.submit(rpc.ask, "EmbedStream", [{"inputs": text}] * 5)
            for text in ("three", "four")
        ]
        until(lambda: rpc.admission.waiting == 2)
        assert rpc.refusal("Embed", {"inputs": "five"}) == (
            "RESOURCE_EXHAUSTED",
            "Model is overloaded",
        )
        assert rpc.running.post("/embed", {"inputs": "five"}).status_code == 429
        assert rpc.ask("Tokenize", {"inputs": "one"}).tokens
        assert rpc.ask("TokenizeStream", [{"inputs": "one"}] * 3)
        hold.let_go()
        assert all(holder.result(HANG).embeddings for holder in holders)
        assert [len(stream.result(HANG)) for stream in streams] == [5, 5]
        assert rpc.counted('te_request_failure{err="overloaded"}') == 2
        assert rpc.admission.free == 2
        assert rpc.admission.waiting == 0


def test_reranking_waits_even_for_more_permits_than_there_are():
    hold = Hold()
    with (
        rpc_serving(labelled("LABEL_0"), engine={"max_concurrent_requests": 2}, gate=hold) as rpc,
        ThreadPoolExecutor(2) as pool,
    ):
        holder = pool.submit(rpc.ask, "Predict", {"inputs": "one"})
        until(lambda: rpc.admission.free == 1)
        ranked = pool.submit(rpc.ask, "Rerank", {"query": "one", "texts": ["two", "three", "four"]})
        until(lambda: rpc.admission.waiting == 1)
        hold.let_go()
        assert holder.result(HANG).predictions
        assert len(ranked.result(HANG).ranks) == 3
        assert rpc.admission.free == 2


@pytest.mark.parametrize("name", ["Embed", "EmbedStream", "Rerank", "RerankStream"])
@pytest.mark.parametrize("how", ["cancelled", "gone", "too late"])
def test_whoever_leaves_costs_no_pass_and_no_permit(name, how):
    hold = Hold()
    with rpc_serving(gate=hold) as rpc, ThreadPoolExecutor(1) as pool:
        permits = rpc.admission.free
        first = pool.submit(rpc.ask, "Embed", {"inputs": "one"})
        assert hold.entered.wait(HANG)
        channel = grpc.insecure_channel(rpc.address)
        leaving, done = open_queued(
            rpc, channel, name, [0.3, 3, 30] if how == "too late" else [HANG]
        )
        if how == "cancelled":
            leaving.cancel()
        elif how == "gone":
            channel.close()
        until(lambda: rpc.admission.free == permits - 1 and rpc.admission.waiting == 0)
        done.set()
        hold.let_go()
        first.result(HANG)
        until(lambda: rpc.running.service.engine.metrics.queued.value() == 0)
        assert rpc.running.backend.forwards == 1
        assert rpc.counted('te_request_failure{err="dropped"}') >= 1
        channel.close()
        rpc.is_well()


def open_queued(rpc: Rpc, channel: grpc.Channel, name: str, timeouts: list[float]):
    """A call that waits in the queue: with the shortest time that is enough to come so far."""
    grpc.channel_ready_future(channel).result(HANG)
    queued = rpc.running.service.engine.metrics.queued
    for timeout in timeouts:
        leaving, done = open_call(channel, name, timeout=timeout)
        until(lambda leaving=leaving: queued.value() >= 1 or has_ended(leaving))
        if queued.value() >= 1:
            return leaving, done
        done.set()
    raise AssertionError("never queued")


def has_ended(call: Any) -> bool:
    return call.done() if hasattr(call, "done") else not call.is_active()


def open_call(channel: grpc.Channel, name: str, *, timeout: float):
    """A call that is under way, and what ends its requests. All but EmbedStream have sent all they will send."""
    done = threading.Event()

    def many():
        for text in ("two", "three", "four"):
            yield {"inputs": text} if name == "EmbedStream" else {"query": "five", "text": text}
        if name == "EmbedStream":
            done.wait(HANG)

    given = {
        "Embed": {"inputs": "two"},
        "Rerank": {"query": "five", "texts": ["two", "three"]},
    }.get(name) or many()
    return start(channel, name, given, timeout=timeout, wait=False), done


def test_a_stream_holds_no_more_than_its_share(monkeypatch):
    monkeypatch.setenv("GRPC_MAX_PARALLEL_STREAM_REQUESTS", "3")
    hold = Hold()
    with rpc_serving(gate=hold) as rpc, ThreadPoolExecutor(1) as pool:
        permits = rpc.admission.free
        stream = pool.submit(
            rpc.ask, "EmbedStream", [{"inputs": f"one {number}"} for number in range(20)]
        )
        until(lambda: rpc.admission.free == permits - 3)
        assert rpc.running.post("/embed", {"inputs": [""]}).status_code == 400
        assert rpc.admission.free == permits - 3
        hold.let_go()
        assert len(stream.result(HANG)) == 20
        rpc.is_well()
