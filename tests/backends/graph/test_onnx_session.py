"""Sessions by the library's C interface and by its Python package: the same numbers, the same refusals."""

from __future__ import annotations

import gc
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridtei.backends.graph import onnx_session
from hybridtei.backends.graph.onnx_session import Api, Container, NativeSession, Session, find_api, open_sessions
from hybridtei.backends.graph.writer import declarations, product_graph
from hybridtei.errors import LoadError
from hybridtei.outputs import Floats
from hybridtei.system.machine import own_processors

DRAW = np.random.default_rng(0)
MATRIX = DRAW.normal(size=(70, 33)).astype(np.float32)
ROWS = DRAW.normal(size=(9, 33)).astype(np.float32)
GRAPH = product_graph("rows", "matrix", "product") + declarations({"matrix": MATRIX.shape})


def opened(*threads: int, matrix: Floats = MATRIX) -> list[Session]:
    return open_sessions(GRAPH, {"matrix": matrix}, Path("/folder"), threads)


@pytest.fixture
def api() -> Api:
    found = find_api()
    if found is None:
        pytest.skip("the installed onnxruntime has no library of its C interface")
    return found


def test_the_installed_package_has_the_library() -> None:
    assert find_api() is not None, "sessions would keep a copy of the matrices each"


@pytest.mark.parametrize("native", [True, False])
def test_every_session_computes_the_product(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(onnx_session, "find_api", lambda: None)
    for session in opened(1, 2, 1):
        assert isinstance(session, NativeSession) == native
        assert session.inputs == {"rows"}
        np.testing.assert_allclose(session.run("product", {"rows": ROWS}), ROWS @ MATRIX.T, rtol=1e-5, atol=1e-5)
        assert session.run("product", {"rows": ROWS[:0]}).shape == (0, 70)


def test_what_sessions_have_packed_is_kept_once(api: Api) -> None:
    """The second session computes with what the first has packed: the array that was packed is something else by then."""
    matrix = MATRIX.copy()
    first, second = opened(1, 2, matrix=matrix)
    matrix[:] = 0
    np.testing.assert_array_equal(first.run("product", {"rows": ROWS}), second.run("product", {"rows": ROWS}))
    np.testing.assert_allclose(second.run("product", {"rows": ROWS}), ROWS @ MATRIX.T, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(len(own_processors()) < 2, reason="this process has one processor, or a part of several")
@pytest.mark.parametrize("native", [True, False])
def test_threads_of_a_session_over_all_cores_have_a_processor_each(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(onnx_session, "find_api", lambda: None)
    before = set(os.listdir("/proc/self/task"))
    sessions = opened(1, len(own_processors()))
    new = set(os.listdir("/proc/self/task")) - before
    expected, end = [{one} for one in own_processors()[1:]], time.monotonic() + 60
    while sorted(map(os.sched_getaffinity, map(int, new)), key=min) != expected:  # each moves once it has started
        assert time.monotonic() < end
    np.testing.assert_allclose(sessions[1].run("product", {"rows": ROWS}), ROWS @ MATRIX.T, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(len(own_processors()) < 2, reason="this process has one processor, or a part of several")
@pytest.mark.parametrize("native", [True, False])
def test_a_pass_over_all_cores_leaves_its_thread_where_it_may_run(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(onnx_session, "find_api", lambda: None)
    everywhere, during = os.sched_getaffinity(0), list[set[int]]()

    class Watched(dict[str, Floats]):
        def values(self) -> Any:
            during.append(os.sched_getaffinity(0))
            return super().values()

        def keys(self) -> Any:
            during.append(os.sched_getaffinity(0))
            return super().keys()

        def __iter__(self) -> Any:  # so that `dict` asks for the keys
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


def test_threads_call_one_session_at_once() -> None:
    (session,) = opened(1)
    feeds = [{"rows": DRAW.normal(size=(count, 33)).astype(np.float32)} for count in range(1, 40)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda feed: session.run("product", feed), feeds))
    for feed, product in zip(feeds, found, strict=True):
        np.testing.assert_allclose(product, feed["rows"] @ MATRIX.T, rtol=1e-5, atol=1e-5)


def test_a_session_outlives_the_others_of_its_container(api: Api) -> None:
    *others, last = opened(1, 1, 1)
    del others
    gc.collect()
    np.testing.assert_allclose(last.run("product", {"rows": ROWS}), ROWS @ MATRIX.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("feed", "why"),
    [
        ({}, "rows"),
        ({"rows": ROWS[:, :5]}, "imension"),
        ({"other": ROWS}, "other"),
        ({"rows": ROWS.astype(np.int64)}, "int64"),
    ],
)
def test_what_the_graph_does_not_take_is_an_error_in_the_librarys_words(api: Api, feed: dict[str, Floats], why: str) -> None:
    session = NativeSession(GRAPH, Container(api, {"matrix": MATRIX}), 1, {})
    with pytest.raises(RuntimeError, match=why):
        session.run("product", feed)


@pytest.mark.parametrize("native", [True, False])
def test_a_tensor_that_is_missing_is_a_load_error(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(onnx_session, "find_api", lambda: None)
    with pytest.raises(LoadError, match="/folder: ONNX Runtime does not take the graph"):
        open_sessions(GRAPH, {}, Path("/folder"), [1])


def test_a_file_that_is_no_library_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "libonnxruntime.so").write_bytes(b"no library")
    with pytest.raises(OSError, match="libonnxruntime"):
        Api(tmp_path / "libonnxruntime.so")
