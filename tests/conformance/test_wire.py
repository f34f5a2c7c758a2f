"""The conformance suite against our server, in this process: one start a profile, every case of
it."""

from contextlib import contextmanager

import pytest

from conformance.wire import checks
from conformance.wire.asking import Answer
from conformance.wire.case import (
    Case,
    read_cases,
    read_clauses,
    read_profiles,
    uncovered,
)
from conformance.wire.checkpoints import write
from conformance.wire.judge import judged
from tests.server.live import commanded

CASES, PROFILES = read_cases(), read_profiles()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wire")
    return lambda name: write(name, folder)


@contextmanager
def served(profile, model_folder):
    """The URL of a server as the command line starts it, but in a thread."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in profile.env.items():
            patch.setenv(name, value)
        with commanded("--model-id", str(model_folder), *profile.ours, *profile.args) as url:
            yield url


@pytest.mark.parametrize("name", PROFILES)
def test_profile(name, checkpoint):
    mine = [case for case in CASES if name in case.profiles]
    assert mine
    with served(PROFILES[name], checkpoint(PROFILES[name].model)) as url:
        assert judged(url, name, PROFILES[name], mine) == {}


def test_every_clause_has_a_case_or_a_reason():
    assert uncovered(read_clauses(), CASES) == []


def test_checks_that_cases_name_exist():
    assert all(
        callable(getattr(checks, check.split()[0], None)) for case in CASES for check in case.check
    )


def answer(body):
    return Answer(200, {"content-type": "application/json"}, body.encode(), "POST /embed")


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        ("vectors 1 2", "[[1.0]]"),
        ("unit", "[[1.0,1.0]]"),
        ("not_unit", "[[1.0,0.0]]"),
        ("tokens 2", "[[[1.0]]]"),
        ("sparse 1", '[[{"index":2,"value":1.0},{"index":1,"value":1.0}]]'),
        ("sparse 1", '[[{"index":2,"value":0.0}]]'),
        ("falling", '[{"score":0.1},{"score":0.2}]'),
        ("probabilities", '[{"score":0.1},{"score":0.2}]'),
        ("keys a b", '{"b":1,"a":1}'),
        ("before 2 0", '[{"index":0,"score":1.0},{"index":2,"score":1.0}]'),
        ("shortest_floats", "[0.10000000149011612]"),
        ("shortest_floats", "[1]"),
        ("compact", "[1.0, 2.0]"),
        ("times", "[]"),
        ("empty", "[]"),
        ("equal 0 1", "[[1.0],[2.0]]"),
        ("schemas", '{"components":{"schemas":{}},"paths":{"$ref":"#/components/schemas/Lost"}}'),
    ],
)
def test_checks_can_fail(check, wrong):
    name, *words = check.split()
    assert getattr(checks, name)(answer(wrong), *words)


def test_a_wrong_answer_is_told(checkpoint):
    case = Case(
        clause="1.1 404",
        profile="plain",
        request="GET /health",
        status=200,
        text="no",
        header={"vary": "x"},
        absent=("vary",),
    )
    other = Case(clause="1.1 404", profile="plain", request="GET /nope", name="other")
    with served(PROFILES["plain"], checkpoint("plain")) as url:
        failures = judged(url, "plain", PROFILES["plain"], [case, other])
    assert len(failures[" plain"]) == 3
    assert failures["other plain"] == ["status 404, not 200: "]
