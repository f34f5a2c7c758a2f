"""Answers that clients do not read: counted, bounded all together, and given up."""

import asyncio
import json
from contextlib import ExitStack, contextmanager
from select import select

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.inference.engine.service import BYTES_PER_NUMBER
from hybridtei.limits import Bound
from hybridtei.retrieval.store.collection import CollectionSchemas
from hybridtei.retrieval.store.memory import MemoryStore
from hybridtei.server.answers import answers_unsent
from hybridtei.server.serve import encode_large
from tests.inference.engine import small
from tests.retrieval.search.small_search import MODEL, spec_in
from tests.server.http.raw import GET, connected
from tests.server.http.test_limits import refusals
from tests.server.live import serving, until

HANG = 60
LIMIT = 64_000_000
# Of which 32 inputs have an answer of some 20 MB: no kernel takes all of it
WIDE = small.model_spec(hidden_size=1024)
TEXTS = {"inputs": ["one two three " * 20] * 32}


def unsent(running):
    """How many bytes the server says it keeps for its clients."""
    line = next(
        line
        for line in running.get("/metrics").text.splitlines()
        if line.startswith("hybridtei_unsent_bytes ")
    )
    return int(line.split()[1])


def asking(path, body):
    content = json.dumps(body).encode()
    return (
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        % (path.encode(), len(content))
        + content
    )


@contextmanager
def unread(running, count, request=("/embed_all", TEXTS)):
    """Clients that ask for much and read nothing of it."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connected(running)) for _ in range(count)]
        for client in clients:
            client.sendall(asking(*request))
        yield clients


def test_answers_that_nobody_reads_are_bounded_all_together_and_queries_still_answered():
    with serving(WIDE, server={"max_unsent_bytes": LIMIT}) as running:
        size = len(running.post("/embed_all", TEXTS).content)
        with unread(running, 12):
            # Some are kept, some wait, and as many may not
            until(lambda: refusals(running, "max_unsent_bytes") > 0)
            for _ in range(5):
                assert running.post("/embed", {"inputs": "one"}).status_code == 200
                assert 12 * size > LIMIT > unsent(running)
        until(lambda: unsent(running) == 0)
        assert len(running.post("/embed_all", TEXTS).content) == size


def test_answers_that_carry_stored_texts_are_weighed_by_their_bytes(tmp_path):
    """Few hits with long payloads, some 17 MB together; ranked texts that are given back."""
    search = ("/search", {"collection": "papers", "query": "one two", "limit": 10})
    settings = {"max_unsent_bytes": LIMIT, "max_search_bytes": 64_000_000}
    store = CollectionSchemas(MemoryStore())
    with serving(spec_in(tmp_path), server=settings, schemas=store, model_id=MODEL) as running:
        for place in range(9):
            points = [
                {
                    "id": place,
                    "text": f"one two {'three ' * place}",
                    "payload": {"long": "x" * 1_900_000},
                }
            ]
            asked = running.post("/collections/papers/points", {"points": points, "create": True})
            assert asked.status_code == 200
        size = len(running.post(*search).content)
        assert size > 17_000_000
        with unread(running, 12, search):
            until(lambda: refusals(running, "max_unsent_bytes") > 0)
            assert 12 * size > LIMIT > unsent(running)
        until(lambda: unsent(running) == 0)


def received(client, most):
    """Not nothing: the server has not cut the client off."""
    data = client.recv(most)
    assert data
    return data


def is_whole(answer):
    """True if head and content have arrived."""
    end = answer.find(b"\r\n\r\n")
    return end >= 0 and len(answer) == end + 4 + int(
        answer[:end].partition(b"content-length: ")[2].split()[0]
    )


def test_an_answer_that_waits_for_room_is_given_when_others_are_read(monkeypatch):
    # However slow this machine is just now
    monkeypatch.setattr("hybridtei.server.http.protocol.UNREAD_SECONDS", 600.0)
    monkeypatch.setattr("hybridtei.limits.WAIT_SECONDS", 600.0)
    with serving(WIDE, server={"max_unsent_bytes": LIMIT}) as running:
        with unread(running, 3) as clients:
            until(lambda: 'te_request_success{method="batch"} 3' in running.get("/metrics").text)
            # In whatever order the server has begun them
            answers = {client: bytearray() for client in clients}
            while waiting := [client for client, answer in answers.items() if not is_whole(answer)]:
                readable, _, _ = select(waiting, [], [], HANG)
                assert readable, "the rest waits for room, though what was sent has been read"
                for client in readable:
                    answers[client] += received(client, 1 << 20)
            assert all(answer.startswith(b"HTTP/1.1 200 ") for answer in answers.values())
        assert refusals(running, "max_unsent_bytes") == 0
        until(lambda: unsent(running) == 0)


@pytest.mark.parametrize("close", [b"", b"connection: close\r\n"])
def test_a_client_that_reads_nothing_is_cut_off_by_name(monkeypatch, close):
    monkeypatch.setattr("hybridtei.server.http.protocol.UNREAD_SECONDS", 0.2)
    with serving(WIDE) as running, connected(running) as client:
        client.sendall(asking("/embed_all", TEXTS).replace(b"host: x\r\n", b"host: x\r\n" + close))
        name = client.getsockname()
        until(lambda: running.backend.forwards >= 1)
        until(lambda: name not in [connection.client for connection in running.connections])
        assert refusals(running, "unread_seconds") == 1
        until(lambda: unsent(running) == 0)
        assert running.post("/embed", {"inputs": "one"}).status_code == 200


def test_at_the_bound_nothing_is_begun_but_health_and_metrics():
    with serving(WIDE, server={"max_unsent_bytes": 1}) as running, unread(running, 1):
        until(lambda: unsent(running) > 0)
        before = running.backend.forwards
        for path in ("/embed", "/qdrant/inference", "/rerank"):
            refused = running.post(path, {"inputs": "one"})
            assert refused.status_code == 503
            assert "1 are allowed (max-unsent-bytes): try again later" in refused.text
        assert running.backend.forwards == before
        assert running.get("/health").status_code == 200
        assert refusals(running, "max_unsent_bytes") == 3


def test_the_next_request_of_a_connection_waits_for_its_reader():
    """Else one connection would have as many answers kept for it as it asks for."""
    with (
        serving(WIDE, server={"max_unsent_bytes": LIMIT}) as running,
        unread(running, 1) as (client,),
    ):
        until(lambda: unsent(running) > 0)
        # An answer of /metrics itself may be among them
        kept = min(unsent(running) for _ in range(5))
        client.sendall((GET + b"\r\n") * 5)
        assert running.get("/health").status_code == 200
        until(lambda: unsent(running) <= kept)


class Turns:
    """Who was let in, in order."""

    def __init__(self, limit):
        self.limit, self.unsent = limit, Bound(limit, answers_unsent)
        self.came = []

    async def ask(self, name, size):
        reserved = await self.unsent.room(size)
        self.came.append(name)
        assert self.unsent.units <= self.limit
        await asyncio.sleep(0)
        self.unsent.give_back(reserved)


# As many bytes may wait as the bound has.
@given(st.lists(st.integers(1, 9), max_size=10) | st.lists(st.integers(1, 150), max_size=1))
def test_turns_come_in_order_and_never_beyond_the_bound(sizes):
    async def all_of_them():
        turns = Turns(100)
        turns.unsent.give_back(-100)
        asking = [asyncio.create_task(turns.ask(name, size)) for name, size in enumerate(sizes)]
        await asyncio.sleep(0)
        turns.unsent.give_back(100)
        await asyncio.gather(*asking)
        assert turns.came == list(range(len(sizes)))
        assert turns.unsent.units == 0

    asyncio.run(all_of_them())


async def test_who_waits_in_vain_or_leaves_gives_up_its_turn(monkeypatch):
    from hybridtei.errors import AnswersUnsent

    monkeypatch.setattr("hybridtei.limits.WAIT_SECONDS", 0.01)
    turns = Turns(100)
    held = await turns.unsent.room(75)
    left = asyncio.ensure_future(turns.ask(0, 50))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(AnswersUnsent, match="75 bytes of answers wait for clients"):
        await turns.ask(1, 50)
    with pytest.raises(asyncio.CancelledError):
        await left
    turns.unsent.give_back(held)
    await turns.ask(2, 75)
    assert (turns.came, turns.unsent.units) == ([2], 0)


LONG = "one " * 400_000


def test_an_answer_counts_the_texts_that_it_repeats(server, monkeypatch):
    """Or it would be written on the event loop, beside all others."""
    counted = []

    async def encode(request, reply):
        counted.append(reply.numbers * BYTES_PER_NUMBER)
        return await encode_large(request, reply)

    monkeypatch.setattr("hybridtei.server.serve.encode_large", encode)
    assert LONG in server.post("/v2/embed", {"texts": [LONG]}).text
    assert sum(counted) > len(LONG)
