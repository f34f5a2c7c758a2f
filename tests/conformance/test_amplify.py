"""`conformance/amplify`: its search finds the routes that take too much, and those alone."""

import sys

import pytest

from conformance.amplify.request import Request, route_of
from conformance.amplify.search import search
from conformance.amplify.shapes import Shapes
from conformance.amplify.target import running
from conformance.fuzz.bodies import Draw
from conformance.processes import free_port

COSTLY = {"/memory", "/child", "/stall", "/close"}
PATHS = ("/calm", "/wait", "/answer", *sorted(COSTLY))
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "some": {"type": "array", "items": {"type": "string"}},
    },
}


@pytest.fixture(scope="module")
def costly(tmp_path_factory):
    port = free_port()
    command = [sys.executable, "-m", "tests.conformance.costly_app", "{probe}", str(port)]
    log = tmp_path_factory.mktemp("costly") / "log"
    with running(command, port=port, log=log, small=Request("POST", "/calm")) as target:
        yield target


def test_the_search_finds_what_costs_too_much(costly):
    content = {"application/json": {"schema": SCHEMA}}
    told = {
        "paths": {path: {"post": {"requestBody": {"content": content}}} for path in PATHS},
        "components": {"schemas": {}},
    }
    draw = Draw(1)
    kept = [Request("POST", path, {"text": "a"}) for path in PATHS]
    shapes = Shapes(told, "small", draw)
    found = search(costly.measure, shapes, draw, seconds=0.1, kept=kept, calls=None, clients=2)
    assert {*found.tried} == {*PATHS}
    beyond = {route_of(case.request) for case in found.worst if case.excess > 1}
    assert beyond == COSTLY
