"""Many clients at once: none lost, none wrong; overload told at once; whoever leaves costs
nothing."""

import asyncio
import threading
from contextlib import nullcontext
from typing import Any

import httpx
import pytest

from conformance.fuzz.judge import same
from hybridtei.errors import Overloaded
from hybridtei.limits import Bound
from hybridtei.server import serve
from hybridtei.server.http.body import DISCONNECT, ClientDisconnected, Disconnect, while_connected
from hybridtei.server.models import Models, StoreBounds
from hybridtei.server.routing import ROUTES
from tests.inference.engine import small
from tests.server.api.test_sides import named
from tests.server.live import HANG, Hold, serving, until

Request = tuple[str, dict[str, Any]]
CONCURRENT = 128


def mixed(count):
    """Requests of every route, lengths from 1 to 90 words, some of them bad."""
    requests = []
    for i in range(count):
        text = " ".join(small.WORDS[(i + j) % len(small.WORDS)] for j in range(1 + i * i % 90))
        forms = (
            ("/embed", {"inputs": text}),
            (
                "/embed_hybrid",
                {"inputs": [text, "one"], "outputs": ["sparse", "dense"], "normalize": i % 3 == 0},
            ),
            ("/embed_sparse", {"inputs": text}),
            ("/embed_multivector", {"inputs": text, "dimensions": 1 + i % small.DIM}),
            ("/v1/embeddings", {"input": [text, [2, 5, 3]], "dimensions": 1 + i % small.HIDDEN}),
            ("/embed_all", {"inputs": text, "truncation_direction": "left"}),
            ("/similarity", {"inputs": {"source_sentence": text, "sentences": ["one", "two"]}}),
            ("/tokenize", {"inputs": text}),
            (
                "/embed",
                {"inputs": text, "prompt_name": "nobody"} if i % 2 else {"inputs": ["", text]},
            ),
        )
        requests.append(forms[i % len(forms)])
    return requests


async def all_at_once(running, requests):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=running.url, timeout=HANG, limits=limits, trust_env=False
    ) as client:
        return await asyncio.gather(*(client.post(path, json=body) for path, body in requests))


def test_mixed_requests_at_once_are_answered_as_each_alone():
    requests = mixed(CONCURRENT)
    with serving(engine={"max_concurrent_requests": 4 * CONCURRENT}, lanes=2) as running:
        alone = [running.post(path, body) for path, body in requests]
        passes_alone = running.backend.forwards
        together = asyncio.run(all_at_once(running, requests))
        for (path, _), one, other in zip(requests, alone, together, strict=True):
            assert one.status_code == other.status_code, path
            assert same(one.json(), other.json()), path
            assert one.headers.get("x-compute-tokens") == other.headers.get("x-compute-tokens")
        assert {response.status_code for response in together} == {200, 400, 422}
        assert running.backend.forwards - passes_alone < passes_alone
        running.is_well()


def test_a_large_body_is_decoded_beside_the_event_loop(monkeypatch):
    """Also one that is repaired; a small one costs no thread."""
    threads = []

    def decoded(*arguments):
        threads.append(threading.get_ident())
        return real(*arguments)

    real = serve.decoded
    monkeypatch.setattr(serve, "decoded", decoded)
    with serving() as running:
        for size in (10, 20_000, 1_100_000):
            asked = {"input": "one " * (size // 4), "user": None}
            assert running.post("/v1/embeddings", asked).status_code == 200
    assert threads[-3] == threads[-2] != threads[-1]


@pytest.mark.parametrize(("side", "prompt"), [("query", "query"), ("document", "passage")])
def test_a_side_in_the_name_is_read_where_a_route_has_no_field_for_the_model(server, side, prompt):
    asked = {"inputs": "one two"}
    vectors = server.post("/embed", {**asked, "model": f"any:{side}"}).json()
    assert vectors == server.post("/embed", {**asked, "prompt_name": prompt}).json()
    assert vectors != server.post("/embed", {**asked, "model": "any"}).json()


def test_overload_is_told_at_once_and_permits_come_back():
    hold = Hold()
    with serving(engine={"max_concurrent_requests": 8}, gate=hold) as running:
        holders = [
            threading.Thread(target=running.post, args=("/embed", {"inputs": ["one"] * 4}))
            for _ in range(2)
        ]
        for holder in holders:
            holder.start()
        until(lambda: running.service.admission.free == 0)
        refused = asyncio.run(all_at_once(running, [("/embed_hybrid", {"inputs": "one"})] * 100))
        # While the engine stands still: nobody waited
        for response in refused:
            assert response.status_code == 429
            assert response.json() == {"error": "Model is overloaded", "error_type": "Overloaded"}
            assert response.headers["retry-after"] == "1"
        assert (
            'hybridtei_refusals_total{limit="max_concurrent_requests"} 100\n'
            in running.get("/metrics").text
        )
        # None took a place
        assert running.service.engine.metrics.queued.value() <= 8
        # Takes no permit
        assert running.post("/tokenize", {"inputs": "one"}).status_code == 200
        assert running.get("/health").status_code == 200
        hold.let_go()
        for holder in holders:
            holder.join(HANG)
        running.is_well()
        assert running.post("/embed", {"inputs": ["one"] * 8}).status_code == 200
        assert running.post("/embed", {"inputs": ["one"] * 9}).status_code == 429


def test_work_ends_when_its_client_leaves_and_only_then():
    async def leave():
        disconnect, ended = Disconnect(), []

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        asyncio.get_running_loop().call_soon(disconnect.notify)
        with (
            pytest.raises(ClientDisconnected),
            while_connected({"extensions": {DISCONNECT: disconnect}}),
        ):
            await work()
        assert ended == [True]
        # Once more, when nobody works any longer
        disconnect.notify()
        # Under a server that does not tell
        with while_connected({"type": "http"}):
            return await asyncio.sleep(0, 7)

    assert asyncio.run(leave()) == 7


async def test_whoever_cancels_the_work_is_not_taken_for_a_client_that_left():
    async def work():
        with while_connected({"extensions": {DISCONNECT: Disconnect()}}):
            await asyncio.sleep(HANG)

    task = asyncio.ensure_future(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("full", ["nothing", "model", "store"])
def test_a_full_bound_refuses_the_routes_that_take_of_it_before_their_body(full):
    store = StoreBounds(Bound(1))
    context = named("small")
    if full == "model":
        context.service.admission.take(context.service.admission.free)
    if full == "store":
        store.admission.take(1)
    takes = {"/embed": "model", "/search": "store", "/tokenize": "", "/collections": ""}
    for path, taken in takes.items():
        (route,) = [one for one in ROUTES if path in one.paths and not one.is_peer]
        for alias in (None, "small", "small:query"):
            expected = pytest.raises(Overloaded) if taken == full else nullcontext()
            with expected:
                serve.check_capacity(route, alias, Models({"small": context}), store)
