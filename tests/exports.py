"""Graphs of the tiny families: an export takes seconds, so those that the quick tests need lie in `graphs`, by their names.

    PYTHONHASHSEED=0 python -m tests.exports [FOLDER]

makes them anew: after a change of the exporter, or with another torch or transformers. The seed is needed for the same bytes:
ModernBERT of transformers walks over a set of its kinds of layers, and a graph keeps the order that it met. Whatever is not
there is exported when a test first asks for it, once a run, since a graph serves every checkpoint of its architecture.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridtei.backends.export import export_graph
from hybridtei.backends.graph_names import graph_name
from hybridtei.backends.graphs import Graph
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from tests import tiny
from tests.sampled import sampled

QUICK = ("bert", "xlm-roberta", "modernbert", "qwen3")  # positions from 0, from the padding id, windows, causal attention
EVERY_FAMILY = [*QUICK, "distilbert", "mpnet"]
FAMILIES = sampled(EVERY_FAMILY, QUICK)
KEPT = [*((name, False) for name in QUICK), ("bert", True)]  # (family, rectangle)
GRAPHS = Path(__file__).with_name("graphs")
_MADE: dict[str, Graph] = {}


def file_name(spec: ModelSpec, rectangle: bool) -> str:
    """Of the graph among those that are kept."""
    return f"{'rectangle-' if rectangle else ''}{graph_name(spec)}"


def exported(spec: ModelSpec, *, rectangle: bool = False) -> Graph:
    """What `export_graph` gives for this architecture."""
    name = file_name(spec, rectangle)
    if (GRAPHS / name).exists():
        return Graph.read(GRAPHS / name, spec.config)
    if name not in _MADE:
        _MADE[name] = export_graph(spec, rectangle=rectangle)
    return _MADE[name]


@functools.cache
def graph_of(model_type: str, rectangle: bool = False) -> Graph:
    """The graph of a tiny family; the checkpoint it was made from is gone by then."""
    with TemporaryDirectory() as folder:
        return exported(read_spec(tiny.write_family(Path(folder), model_type), pooling="mean"), rectangle=rectangle)


def write(folder: Path) -> None:
    """Export what is kept into a folder."""
    for model_type, rectangle in KEPT:
        with TemporaryDirectory() as made:
            spec = read_spec(tiny.write_family(Path(made), model_type), pooling="mean")
            export_graph(spec, rectangle=rectangle).write(folder / file_name(spec, rectangle))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else GRAPHS
    for old in target.glob("*.zip"):
        old.unlink()
    write(target)
