"""The table of errors: every class has its row, and every row looks on the wire as it says."""

import asyncio
import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from litestar import Litestar, Request, get

from hybridtei import errors
from hybridtei.config import ServerConfig
from hybridtei.errors import NoInputs, OtherOrigin, RequestRefused, RoleNeeded
from hybridtei.outputs import HeadOutputs
from hybridtei.retrieval.ingest.ledger import SourceTaken
from hybridtei.server.answers import Origins
from hybridtei.server.http.body import BodyError, SchemaError
from hybridtei.server.http.connection import ConnectionLimits
from hybridtei.server.models import Models
from hybridtei.server.routing import HANDLERS, ROUTE, Route
from hybridtei.server.wires import TEI, ErrorResponse, OpenAICompatErrorResponse, facts_of
from hybridtei.system.metrics import Registry

TEI_STATUS = {
    "Unhealthy": 503,
    "Backend": 424,
    "Overloaded": 429,
    "Validation": 422,
    "Tokenizer": 422,
    "Empty": 400,
}
# Of several models and of keys, which TEI does not know
OURS = {
    "NotFound": 404,
    "Forbidden": 403,
    "Unauthorized": 401,
}
# Refused for want of time, not of room
TIMED = {errors.TimedOut: 503}
STORE = {errors.StoreError: 502, errors.StoreUnavailable: 503, errors.CollectionMismatch: 409}


def family(kind):
    """The class and all below it."""
    return {kind}.union(*(family(child) for child in kind.__subclasses__()))


def make(kind):
    if kind is RoleNeeded:
        return RoleNeeded("write", "dashboard", ["search"])
    if kind is errors.Ended:
        return errors.Ended("OUT_OF_RANGE", "what went wrong")
    if kind is errors.TokensUsed:
        return errors.TokensUsed(100, 5)
    if kind is SourceTaken:
        return SourceTaken(Path("here"), "notes", Path("there"))
    if kind is errors.PartlyFailed:
        return errors.PartlyFailed("what went wrong", [], HeadOutputs())
    return (
        kind()
        if kind in (errors.Overloaded, errors.Unhealthy, OtherOrigin)
        else kind("what went wrong")
    )


@pytest.mark.parametrize(
    "kind", sorted(family(errors.HybridTeiError), key=lambda kind: kind.__name__)
)
def test_every_class_is_mapped(kind):
    nearest = next((parent for parent in kind.__mro__ if parent in STORE | TIMED), None)
    if nearest in STORE and kind.error_type == "Store":
        assert kind.http_status == STORE[nearest]
        return
    assert kind.error_type in TEI_STATUS | OURS
    if nearest in TIMED:
        assert (kind.http_status, kind.error_type) == (TIMED[nearest], "Overloaded")
        return
    of_no_request = (
        issubclass(kind, errors.LoadError | errors.UsageError | errors.NoAnswer)
        or kind is errors.HybridTeiError
    )
    expected = 500 if of_no_request else (TEI_STATUS | OURS)[kind.error_type]
    assert kind.http_status == expected


def test_classes_named_in_the_module_are_all_in_the_tree():
    named = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert named <= family(errors.HybridTeiError)


@pytest.mark.parametrize(
    "kind", sorted(family(errors.HybridTeiError), key=lambda kind: kind.__name__)
)
@pytest.mark.parametrize("shape", [ErrorResponse, OpenAICompatErrorResponse])
def test_every_row_on_the_wire(kind, shape):
    response = ask(make(kind), shape)
    if kind is errors.NoKey:
        return
    text = kind.prefix + str(make(kind))
    assert response.status_code == kind.http_status
    assert response.headers["content-type"] == "application/json"
    expected = (
        {"error": text, "error_type": kind.error_type}
        if shape is ErrorResponse
        else {"message": text, "code": kind.http_status, "type": kind.error_type}
    )
    assert list(json.loads(response.content).items()) == list(expected.items())


def test_what_nobody_foresaw_is_500_without_its_words():
    response = ask(ZeroDivisionError("secret detail"), ErrorResponse)
    assert response.status_code == 500
    assert response.json() == {
        "error": "internal error: ZeroDivisionError",
        "error_type": "Backend",
    }


def test_the_nearest_row_counts():
    assert facts_of(NoInputs("x")) == (400, "x", "Empty")
    assert facts_of(RequestRefused("x")) == (422, "x", "Validation")
    assert facts_of(ValueError("x"))[0] == 500


def ask(error, shape):
    """A route that raises, behind our handlers."""

    wire = replace(TEI, error=shape)
    of_error = Route(paths=["/"], methods=["GET"], work=ask, request=None, answer=None, wire=wire)

    @get("/", opt={ROUTE: of_error})
    async def route() -> None:
        raise error

    app = Litestar([route], exception_handlers=dict(HANDLERS), openapi_config=None)
    server = ServerConfig()
    app.state = SimpleNamespace(
        server=server,
        origins=Origins([]),
        limits=ConnectionLimits(server, Registry()),
        models=Models({}),
    )

    async def call():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test"
        ) as client:
            return await client.get("/")

    return asyncio.run(call())


@pytest.mark.parametrize(
    "error", [NoInputs("none"), SchemaError("none")], ids=["refused", "not understood"]
)
def test_what_a_failed_request_held_is_let_go_with_its_answer(error):
    class Held:
        pass

    def handle():
        held = Held()
        kept.append(weakref.ref(held))
        raise error

    kept = []
    with pytest.raises(type(error)) as caught:
        handle()
    HANDLERS[BodyError if isinstance(error, SchemaError) else errors.HybridTeiError](
        Request({"type": "http"}), caught.value
    )
    assert kept[0]() is None
