"""Graphs exported once a run: an export takes seconds, and its graph serves every checkpoint of its architecture."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridtei.backends.export import export_graph
from hybridtei.backends.graph_names import graph_name
from hybridtei.backends.graphs import Graph
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from tests import tiny
from tests.sampled import sampled

QUICK = ("bert", "xlm-roberta", "modernbert", "qwen3")  # positions from 0, from the padding id, windows, causal attention
FAMILIES = sampled([*QUICK, "distilbert", "mpnet"], QUICK)
_MADE: dict[tuple[str, bool], Graph] = {}


def exported(spec: ModelSpec, *, rectangle: bool = False) -> Graph:
    """What `export_graph` gives for this architecture, made when it is first asked for."""
    key = graph_name(spec), rectangle
    if key not in _MADE:
        _MADE[key] = export_graph(spec, rectangle=rectangle)
    return _MADE[key]


@functools.cache
def graph_of(model_type: str, rectangle: bool = False) -> Graph:
    """The graph of a tiny family; the checkpoint it was made from is gone by then."""
    with TemporaryDirectory() as folder:
        return exported(read_spec(tiny.write_family(Path(folder), model_type), pooling="mean"), rectangle=rectangle)
