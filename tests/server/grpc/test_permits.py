"""All permits taken, over a real connection: callers are refused, and every leaving caller gives
all back."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from tests.server.conftest import labelled
from tests.server.grpc.live import rpc_serving, start
from tests.server.live import HANG, Hold, until


def test_at_capacity_calls_and_streams_are_refused_as_over_http():
    hold = Hold()
    with (
        rpc_serving(engine={"max_concurrent_requests": 2}, gate=hold) as rpc,
        ThreadPoolExecutor(4) as pool,
    ):
        holders = [pool.submit(rpc.ask, "Embed", {"inputs": text}) for text in ("one", "two")]
        until(lambda: rpc.admission.free == 0)
        for name, given in (("Embed", {"inputs": "five"}), ("EmbedStream", [{"inputs": "five"}])):
            assert rpc.refusal(name, given) == ("RESOURCE_EXHAUSTED", "Model is overloaded")
        assert rpc.running.post("/embed", {"inputs": "five"}).status_code == 429
        assert rpc.ask("Tokenize", {"inputs": "one"}).tokens
        assert rpc.ask("TokenizeStream", [{"inputs": "one"}] * 3)
        hold.let_go()
        assert all(holder.result(HANG).embeddings for holder in holders)
        assert rpc.counted('te_request_failure{err="overloaded"}') == 3
        assert rpc.admission.free == 2


@pytest.mark.parametrize("permits", [1, 2, 16])
def test_a_stream_alone_has_an_answer_for_each_of_its_messages(permits):
    with rpc_serving(engine={"max_concurrent_requests": permits}) as rpc:
        answers = rpc.ask("EmbedStream", [{"inputs": f"one {place}"} for place in range(200)])
        assert len(answers) == 200
        assert rpc.admission.free == permits


def test_streams_leave_a_quarter_of_the_permits_to_single_calls():
    hold = Hold()
    with (
        rpc_serving(engine={"max_concurrent_requests": 8}, gate=hold) as rpc,
        ThreadPoolExecutor(2) as pool,
    ):
        stream = pool.submit(rpc.ask, "EmbedStream", [{"inputs": f"one {i}"} for i in range(50)])
        until(lambda: rpc.admission.free == 2)
        assert rpc.refusal("EmbedStream", [{"inputs": "two"}])[0] == "RESOURCE_EXHAUSTED"
        single = pool.submit(rpc.ask, "Embed", {"inputs": "two"})
        until(lambda: rpc.admission.free == 1)
        hold.let_go()
        assert single.result(HANG).embeddings
        assert len(stream.result(HANG)) == 50
        assert rpc.admission.free == 8


def test_reranking_is_refused_while_there_are_too_few_permits():
    hold = Hold()
    with (
        rpc_serving(labelled("LABEL_0"), engine={"max_concurrent_requests": 2}, gate=hold) as rpc,
        ThreadPoolExecutor(2) as pool,
    ):
        holders = [pool.submit(rpc.ask, "Predict", {"inputs": text}) for text in ("one", "two")]
        until(lambda: rpc.admission.free == 0)
        texts = {"query": "one", "texts": ["two", "three"]}
        assert rpc.refusal("Rerank", texts) == ("RESOURCE_EXHAUSTED", "Model is overloaded")
        hold.let_go()
        assert all(holder.result(HANG).predictions for holder in holders)
        until(lambda: rpc.admission.free == 2)
        assert len(rpc.ask("Rerank", texts).ranks) == 2
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
        until(lambda: rpc.admission.free == permits - 1)
        done.set()
        hold.let_go()
        first.result(HANG)
        until(lambda: rpc.running.service.engine.metrics.queued.value() == 0)
        assert rpc.running.backend.forwards == 1
        assert rpc.counted('te_request_failure{err="dropped"}') >= 1
        channel.close()
        rpc.is_well()


def open_queued(rpc, channel, name, timeouts):
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


def has_ended(call):
    return call.done() if hasattr(call, "done") else not call.is_active()


def open_call(channel, name, *, timeout):
    """A call that is under way, and what ends its requests. All but EmbedStream have sent all they
    will send."""
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
