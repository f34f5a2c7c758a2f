"""Permits of several processes: as those of one, summed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from hybridtei.engine.admission import Admission, shared_memory
from hybridtei.errors import Overloaded

ROOT = Path(__file__).parents[2]


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = shared_memory(3)
    yield descriptor
    os.close(descriptor)


def test_a_full_house_is_full_for_all(memory):
    places = [Admission(10, memory, place) for place in range(3)]
    with ExitStack() as inside:
        inside.enter_context(places[0].inside(4))
        inside.enter_context(places[1].inside(4))
        assert [place.free for place in places] == [2, 2, 2]
        with pytest.raises(Overloaded), places[2].inside(3):
            raise AssertionError
        inside.enter_context(places[2].inside(2))
        with pytest.raises(Overloaded), places[0].inside(1):
            raise AssertionError
    assert places[0].free == 10


def test_the_place_of_who_died_is_emptied(memory):
    dying, other = Admission(10, memory, 0), Admission(10, memory, 1)
    held = dying.inside(8)
    held.__enter__()
    assert other.free == 2
    other.clear(0)
    assert other.free == 10
    assert held is not None


def crowd(memory: int, place: int) -> None:
    admission = Admission(3, memory, place)
    for _ in range(300):
        try:
            with admission.inside(2):
                if admission.free != 1:
                    os._exit(1)
        except Overloaded:
            pass


def test_processes_never_let_in_too_many(memory):
    code = "import sys; from tests.engine.test_shared_admission import crowd; crowd(*map(int, sys.argv[1:]))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(memory), str(place)], cwd=ROOT, pass_fds=[memory])
        for place in range(3)
    ]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert Admission(3, memory, 0).free == 3
