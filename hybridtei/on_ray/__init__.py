"""Several machines, by Ray: an ingest whose encoders are actors, and a Serve application of many replicas. Extra `ray`.

A package called `ray` would hide the real one from scripts that run in this folder, hence the name. Only `ingest.run` imports
this package, for `--engine ray`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridtei.on_ray.cluster import application

__all__ = ["application"]


def __getattr__(name: str) -> Any:
    """`application`, which Serve's configuration files name as `hybridtei.on_ray:application`."""
    if name in __all__:
        from hybridtei.on_ray import cluster

        return getattr(cluster, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
