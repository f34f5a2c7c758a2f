"""Forked processes, such as those of gunicorn's `--preload`, Celery's prefork or a DataLoader:
threads, connections and held locks stay with the parent, so the child makes them anew.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import Future, wait
from typing import Any, Protocol
from weakref import WeakSet

# Ends the error of what only its own process can use
REMEDY = (
    "in a forked process: load or open it in each process, or start processes by spawn "
    '(`multiprocessing.get_context("spawn")`)'
)


class Renewable(Protocol):
    """Holds threads, connections or locks."""

    def renew(self) -> None:
        """Make them anew, in a process that was just forked."""


class OfOneProcess:
    """Base of what has threads, connections, or a model in memory."""

    def __reduce__(self) -> str:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled, since its threads, connections or model are "
            "of this process: make or load another one in each process"
        )


_renewables: WeakSet[Renewable] = WeakSet()
_work: WeakSet[Future[Any]] = WeakSet()
_of_parent: list[object] = []


def renew_in_children(renewable: Renewable) -> None:
    """Call `renewable.renew()` in each process that is forked from this one."""
    _renewables.add(renewable)


def finish_before_forks(work: Future[Any]) -> None:
    """Let forks of this process wait for work in another thread, which a child could not end."""
    _work.add(work)


def leave_to_parent(*things: object) -> None:
    """Keep what is the parent's until this process has ended: a runtime would wait for threads that
    only the parent has, and a loop would deregister the sockets of both from their `epoll`."""
    _of_parent.extend(thing for thing in things if thing is not None)


def _finish() -> None:
    wait([*_work])


def _renew_all() -> None:
    for renewable in [*_renewables]:
        renewable.renew()


# Windows has no forks
if hasattr(os, "register_at_fork"):
    # An interpreter that ends frees what modules hold
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_of_parent))
    os.register_at_fork(before=_finish, after_in_child=_renew_all)
