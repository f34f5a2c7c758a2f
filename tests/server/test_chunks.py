"""Requests of more inputs than one may have, in chunks: answers as of one, few permits, and nothing
done for who has left."""

import asyncio
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.fuzz.judge import same
from hybridtei import limits
from hybridtei.inference.engine.chunks import in_order
from hybridtei.inference.tasks.label import Classify
from hybridtei.limits import MAX_CHUNKS_AT_ONCE, Bounds, most_of_large
from tests.server.conftest import LABELS, labelled
from tests.server.live import HANG, serving

SPLIT = {"split_large_batches": True, "max_client_batch_size": 4}
TEXTS = [
    f"{word} search {'engine ' * (i % 5)}"
    for i, word in enumerate(["one", "two", "three", "four", "five"] * 5)
]
PERMITS = 9


@pytest.fixture(scope="module")
def split():
    with serving(server=SPLIT, engine={"max_concurrent_requests": PERMITS}) as running:
        yield running


@pytest.fixture(scope="module")
def whole():
    with serving(server={"max_client_batch_size": 100}) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": TEXTS, "normalize": False}),
        ("/embed_all", {"inputs": TEXTS}),
        ("/embed_sparse", {"inputs": TEXTS}),
        ("/embed_hybrid", {"inputs": TEXTS}),
        ("/embed_multivector", {"inputs": TEXTS, "dimensions": 4}),
        ("/v1/embeddings", {"input": [*TEXTS, [2, 5, 6, 3]]}),
        ("/similarity", {"inputs": {"source_sentence": "one", "sentences": TEXTS}}),
        ("/rerank", {"query": "one", "texts": TEXTS}),
        ("/tokenize", {"inputs": TEXTS}),
        ("/decode", {"ids": [[5, 6, 7], [8]] * 6}),
    ],
)
def test_the_answer_is_that_of_one_chunk(split, whole, path, body):
    answer, expected = split.post(path, body), whole.post(path, body)
    assert answer.status_code == expected.status_code == 200
    assert same(answer.json(), expected.json())
    for name in ("x-compute-tokens", "x-compute-characters"):
        assert answer.headers.get(name) == expected.headers.get(name)
    assert split.service.admission.free == PERMITS


def test_classes_and_tags_in_chunks():
    for labels, path, body in (
        (labelled(*LABELS), "/predict", {"inputs": [[text] for text in TEXTS]}),
        (labelled(*LABELS), "/classify", {"input": TEXTS}),
        (labelled("O", "B-PER", tags=True), "/predict_tokens", {"inputs": TEXTS}),
    ):
        with (
            serving(labels, server=SPLIT) as running,
            serving(labels, server={"max_client_batch_size": 100}) as other,
        ):
            one, two = running.post(path, body).json(), other.post(path, body).json()
        if isinstance(one, dict):
            one, two = one["data"], two["data"]
        assert len(one) == len(TEXTS)
        assert same(one, two)


@pytest.mark.parametrize("place", [0, 7, 24])
def test_a_wrong_input_fails_the_whole(split, place):
    inputs = [*TEXTS]
    inputs[place] = ""
    answer = split.post("/embed", {"inputs": inputs})
    assert (answer.status_code, answer.json()["error_type"]) == (400, "Empty")
    assert split.service.admission.free == PERMITS


def test_a_large_answer_is_refused_before_or_in_between(monkeypatch, split):
    monkeypatch.setattr(limits, "MAX_ANSWER_NUMBERS", 200)
    answer = split.post("/embed_all", {"inputs": TEXTS})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("the answer would hold more than 200 numbers")
    assert split.post("/embed_all", {"inputs": TEXTS[:4]}).status_code == 200


def test_many_texts_hold_few_permits_and_leave_room_for_others():
    """While ten thousand run, under 512 permits, others are let in."""
    most, held = [0], threading.Event()
    with serving(server={"split_large_batches": True}) as running:
        admission = running.service.admission
        free = admission.free

        def gate(_):
            most[0] = max(most[0], free - admission.free)
            held.set()

        running.backend.gate = gate
        request = threading.Thread(
            target=lambda: answers.append(running.post("/embed", {"inputs": ["one two"] * 10_000}))
        )
        answers = []
        request.start()
        assert held.wait(HANG)
        assert running.client.post("/embed", json={"inputs": ["three"] * 32}).status_code == 200
        request.join(HANG)
        assert len(answers[0].json()) == 10_000
        assert most[0] <= 64 + 32


def test_who_leaves_stops_the_rest():
    begun, go = threading.Event(), threading.Event()

    def gate(_):
        begun.set()
        assert go.wait(HANG)

    with serving(server=SPLIT, gate=gate, budget_tokens=16) as running:
        body = b'{"inputs":[' + b",".join([b'"one two three"'] * 2_000) + b"]}"
        head = (
            b"POST /embed HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall(head + body)
            assert begun.wait(HANG)
        # The server hears of it when the loop comes round
        while 'err="dropped"' not in running.get("/metrics").text:
            pass
        assert running.service.admission.free == running.service.config.max_concurrent_requests
        go.set()
        assert running.post("/embed", {"inputs": "one"}).status_code == 200
        assert 'te_request_failure{err="dropped"} 1' in running.get("/metrics").text


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 64))
def test_bounds_are_kept_and_chunks_lose_nothing(inputs, largest, permits):
    made = Bounds.of(inputs, largest=largest, permits=permits)
    chunks = [*Classify(range(inputs)).split(made.chunk)]
    assert [place for one in chunks for place in one.inputs] == [*range(inputs)]
    assert all(1 <= one.size <= made.chunk for one in chunks)
    assert 1 <= made.chunk <= largest
    assert 1 <= made.at_once <= MAX_CHUNKS_AT_ONCE
    assert made.permits <= min(permits, inputs)
    assert made.chunk * made.at_once <= permits
    assert made.permits <= most_of_large(permits) or not made.turns


def test_order_and_the_first_failure_by_place():
    started = []

    async def work(place):
        started.append(place)
        await asyncio.sleep(0)
        if place in (2, 3):
            raise ValueError(place)
        return place

    def starts(count):
        return (lambda place=place: work(place) for place in range(count))

    assert asyncio.run(in_order(starts(2), 2)) == [0, 1]
    with pytest.raises(ValueError, match="2"):
        asyncio.run(in_order(starts(10), 2))
    assert max(started) <= 4
