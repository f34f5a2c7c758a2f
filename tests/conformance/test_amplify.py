"""`conformance/amplify`: what it measures is what was taken, and its search finds the routes that take too much."""

import json
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from conformance.amplify.request import Request, encode, route_of
from conformance.amplify.rpc import draw_call
from conformance.amplify.search import search
from conformance.amplify.shapes import BODY_BYTES, Shapes, fitted, placed
from conformance.amplify.target import Target, running
from conformance.fuzz.bodies import Draw
from conformance.processes import free_port
from hybridtei.server.app import framework
from hybridtei.server.openapi import document
from tests.conformance.costly_app import STALL_SECONDS, TAKEN_BYTES

PATHS = ("/calm", "/memory", "/stall")
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "some": {"type": "array", "items": {"type": "string"}},
    },
}


@pytest.fixture(scope="module")
def costly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    port = free_port()
    command = [sys.executable, "-m", "tests.conformance.costly_app", "{probe}", str(port)]
    with running(command, port=port, log=tmp_path_factory.mktemp("costly") / "log") as target:
        yield target


def test_memory_is_that_beyond_rest_request_and_answer(costly: Target) -> None:
    calm, memory, answer = (
        costly.measure(Request("POST", path, {})) for path in ("/calm", "/memory", "/answer")
    )
    assert memory.growth_bytes - calm.growth_bytes > 0.9 * TAKEN_BYTES
    assert (
        answer.growth_bytes - calm.growth_bytes < 0.5 * answer.answer_bytes
    )  # the answer itself is not counted


def test_a_stall_is_found_wherever_it_comes_from_and_waiting_is_none(costly: Target) -> None:
    wait, stall, thread = (
        costly.measure(Request("POST", path, {})) for path in ("/wait", "/stall", "/thread")
    )
    assert stall.stall_seconds >= 0.9 * STALL_SECONDS
    assert thread.stall_seconds > wait.stall_seconds  # the loop is idle meanwhile, but for the lock
    assert wait.stall_seconds < 0.5 * STALL_SECONDS


def test_the_search_finds_what_costs_too_much(costly: Target) -> None:
    content = {"application/json": {"schema": SCHEMA}}
    told = {
        "paths": {path: {"post": {"requestBody": {"content": content}}} for path in PATHS},
        "components": {"schemas": {}},
    }
    draw = Draw(1)
    kept = [Request("POST", path, {"text": "a"}) for path in PATHS]
    found = search(
        costly.measure, Shapes(told, "small", draw), draw, seconds=0.1, kept=kept, calls=None
    )
    assert {*found.tried} == {*PATHS}
    beyond = {route_of(case.request) for case in found.worst if case.excess > 1}
    assert beyond == {"/memory", "/stall"}


def test_requests_are_drawn_for_every_route_and_can_be_sent_again() -> None:
    draw = Draw(3)
    draw.longest = 3
    shapes = Shapes(document(framework()), "small", draw)
    for route in shapes.routes:
        for request in (fresh := shapes.fresh(route), shapes.changed(fresh)):
            again = Request.read(request.told())
            assert again.pieces() == request.pieces()
            assert route_of(request) == route.path
            assert request.method == route.method
            assert len(encode(request.body)) <= 1.1 * BODY_BYTES


@pytest.mark.parametrize(
    ("body", "plain"),
    [
        ({"a": {"*text": ["b ", 3]}}, {"a": "b b b "}),
        ([{"*list": [{"a": {"*text": ["\\u0041", 2]}}, 2]}], [[{"a": "AA"}, {"a": "AA"}]]),
        ({"*keys": [[], 3]}, {"0": [], "1": [], "2": []}),
        ({"*deep": 3}, [[[]]]),
    ],
)
def test_a_short_description_stands_for_a_large_body(body: Any, plain: Any) -> None:
    assert json.loads(encode(body)) == plain


def test_a_field_is_put_where_it_belongs_and_a_body_is_cut_to_its_limit() -> None:
    assert placed({"a": "b"}, ("a", 0, "c"), 1) == {"a": [{"c": 1}]}
    assert placed({"a": [1, 2]}, ("a", 0), 3) == {"a": [3, 2]}
    body = {"inputs": {"*list": ["a", 10 * BODY_BYTES // 4]}}
    assert 0.9 * BODY_BYTES < len(encode(fitted(body))) <= BODY_BYTES
    assert fitted({"a": 1}) == {"a": 1}


def test_a_call_of_any_method_and_size_is_drawn() -> None:
    for seed in range(2_000):  # among them the smallest size in the most copies
        call = draw_call(Random(seed))
        assert call.method == "RPC"
        assert encode(call.body)
