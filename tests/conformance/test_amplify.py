"""`conformance/amplify`: what it measures is what was taken, and its search finds the routes that
take too much."""

import sys

import pytest

from conformance.amplify.request import Request, route_of
from conformance.amplify.search import search
from conformance.amplify.shapes import Shapes
from conformance.amplify.target import running
from conformance.fuzz.bodies import Draw
from conformance.processes import free_port

PATHS = ("/calm", "/memory", "/stall")
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
    with running(command, port=port, log=tmp_path_factory.mktemp("costly") / "log") as target:
        yield target


def test_the_search_finds_what_costs_too_much(costly):
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
