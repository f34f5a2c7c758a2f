"""Sessions: numbers, threads and their processors, refusals."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from hybridtei.errors import LoadError
from hybridtei.inference.backends.graph.onnx_backend import open_sessions
from hybridtei.inference.backends.graph.writer import Graph, product_graph
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.outputs import Floats
from hybridtei.system.machine import own_processors
from tests.near import near

DRAW = np.random.default_rng(0)
MATRIX = DRAW.normal(size=(70, 33)).astype(np.float32)
ROWS = DRAW.normal(size=(9, 33)).astype(np.float32)
GRAPH = Graph(product_graph("rows", "matrix", "product"), {"matrix": MATRIX.shape})
WEIGHTS = Weights(Path("/folder"), {})


def opened(*threads):
    return [
        session
        for one in open_sessions(GRAPH, {"matrix": MATRIX}, WEIGHTS, threads)
        if (session := one.result())
    ]


def test_every_session_computes_the_product():
    for session in opened(1, 2, 1):
        assert session.inputs == {"rows"}
        near(session.run("product", {"rows": ROWS}), ROWS @ MATRIX.T, 1e-5)
        assert session.run("product", {"rows": ROWS[:0]}).shape == (0, 70)


def test_a_session_keeps_nothing_of_its_first_pass_and_of_one_that_shrinks():
    (session,) = opened(1)
    kept = [session.holds]
    for shrink in (False, False, True, False):
        session.run("product", {"rows": ROWS}, shrink=shrink)
        kept.append(session.holds)
    assert kept == [True, False, True, False, True]


several = pytest.mark.skipif(
    len(own_processors()) < 2, reason="this process has one processor, or a part of several"
)


@several
def test_threads_of_a_session_over_all_cores_have_a_processor_each():
    before = set(os.listdir("/proc/self/task"))
    sessions = opened(1, len(own_processors()))
    new = set(os.listdir("/proc/self/task")) - before
    expected, end = [{one} for one in own_processors()[1:]], time.monotonic() + 60
    # Each moves once it has started
    while sorted(map(os.sched_getaffinity, map(int, new)), key=min) != expected:
        assert time.monotonic() < end
    near(sessions[1].run("product", {"rows": ROWS}), ROWS @ MATRIX.T, 1e-5)


@several
def test_a_pass_over_all_cores_leaves_its_thread_where_it_may_run():
    everywhere, during = os.sched_getaffinity(0), []

    class Watched(dict[str, Floats]):
        def values(self):
            during.append(os.sched_getaffinity(0))
            return super().values()

        def keys(self):
            during.append(os.sched_getaffinity(0))
            return super().keys()

        # So that `dict` asks for the keys
        def __iter__(self):
            return super().__iter__()

    one, every = opened(1, len(own_processors()))
    one.run("product", Watched(rows=ROWS))
    assert set(map(frozenset, during)) == {frozenset(everywhere)}
    during.clear()
    every.run("product", Watched(rows=ROWS))
    assert set(map(frozenset, during)) == {frozenset(own_processors()[:1])}
    assert os.sched_getaffinity(0) == everywhere
    with pytest.raises(Exception, match="rows"):
        every.run("product", {})
    assert os.sched_getaffinity(0) == everywhere


def test_a_tensor_that_is_missing_is_a_load_error():
    with pytest.raises(LoadError, match="/folder: ONNX Runtime refuses the graph"):
        open_sessions(GRAPH, {}, WEIGHTS, [1])
