"""What the package carries: every architecture of the list, readable, found, and what the exporter makes today."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridtei.backends.graphs import SHIPPED, Graph, find_graph, graph_name
from hybridtei.backends.ship_graphs import ARCHITECTURES, ship
from hybridtei.batch import Positions
from hybridtei.checkpoint.spec import ModelSpec

SPEC = ModelSpec(Path(), "", (), 1, 1, 1, Positions(), ())
WORDS = 250_037


def spec_of(name: str) -> ModelSpec:
    config = {**ARCHITECTURES[name], "vocab_size": WORDS}
    return replace(SPEC, model_type=config["model_type"], config=config)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_shipped_and_small(name: str) -> None:
    spec = spec_of(name)
    path = find_graph(spec)
    assert path is not None
    assert path.parent == SHIPPED
    assert path.stat().st_size < 70_000
    graph = Graph.read(path, spec.config)
    assert sum(shape[0] == WORDS for shape in graph.weights.values() if shape) == 1
    assert not graph.held


def test_nothing_else_is_shipped() -> None:
    assert {path.name for path in SHIPPED.iterdir()} == {graph_name(spec_of(name)) for name in ARCHITECTURES}


@pytest.mark.slow
def test_the_exporter_makes_the_same_file_again(tmp_path: Path) -> None:
    for name in ("bert-L2-H128", "bert-L3-H384"):
        path = ship(ARCHITECTURES[name], tmp_path)
        assert path.read_bytes() == (SHIPPED / path.name).read_bytes()
