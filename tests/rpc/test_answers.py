"""Every error of the tree has a code, and its words fit into a trailer."""

from __future__ import annotations

from urllib.parse import quote

import grpc
import pytest

from hybridtei import errors as tree
from hybridtei.errors import Garbage, NoInputs, NoKey, RequestRefused, WrongModel
from hybridtei.rpc.answers import CODES, DETAIL_BYTES, fitting, status_of
from hybridtei.server.routing import TABLE

INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


def test_every_wire_name_of_http_has_a_code():
    assert {row.error_type for row in TABLE.values()} <= CODES.keys()


@pytest.mark.parametrize(
    ("error", "code", "details"),
    [
        (tree.EmptyInput("x"), INVALID, "Input validation error: x"),
        (NoInputs("x"), INVALID, "x"),
        (RequestRefused("x"), INVALID, "x"),
        (tree.TokenizerError("x"), PRECONDITION, "x"),
        (tree.UnsupportedHead("x"), PRECONDITION, "Backend error: x"),
        (WrongModel("x"), PRECONDITION, "x"),
        (tree.Overloaded(), grpc.StatusCode.RESOURCE_EXHAUSTED, "Model is overloaded"),
        (tree.Unhealthy(), grpc.StatusCode.UNAVAILABLE, "unhealthy"),
        (tree.NotANumber(), PRECONDITION, "score is NaN"),
        (tree.UnknownModel("x"), grpc.StatusCode.NOT_FOUND, "x"),
        (NoKey("x"), grpc.StatusCode.UNAUTHENTICATED, "x"),
        (Garbage("x"), grpc.StatusCode.INTERNAL, "x"),
    ],
)
def test_status(error, code, details):
    assert status_of(error) == (code, details)


@pytest.mark.parametrize("details", ["short", "é" * 5000, "%" * 5000, "x" * 100_000, "深" * 3, "\n" * 9000])
def test_details_fit_and_say_as_much_as_does(details):
    shown = fitting(details)
    written = len(quote(shown, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"))
    assert written <= DETAIL_BYTES + 9
    assert shown == details or (written > DETAIL_BYTES - 9 and details.startswith(shown[:-1]))
