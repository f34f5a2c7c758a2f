"""What a forked process makes anew: threads, connections and held locks stay with its parent."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Renewable(Protocol):
    """Holds threads, connections or locks."""

    def renew(self) -> None:
        """Make them anew, in a process that was just forked."""


_renewables: WeakSet[Renewable] = WeakSet()


def renew_in_children(renewable: Renewable) -> None:
    """Call `renewable.renew()` in each process that is forked from this one."""
    _renewables.add(renewable)


def _renew_all() -> None:
    for renewable in [*_renewables]:
        renewable.renew()


# Windows has no forks
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
