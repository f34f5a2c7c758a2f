"""ONNX Runtime: heads against torch, threads of a pass, graphs that do not fit, memory of a large
pass. Laws of all backends: tests/inference/backends/test_laws.py."""

import sys
from concurrent.futures import wait
from dataclasses import replace

import numpy as np
import pytest

from conformance.families.oracle import open_engine
from conformance.small import tiny
from hybridtei.batch import Encoding, Head
from hybridtei.errors import LoadError
from hybridtei.inference.backends.graph import onnx_backend, packed_file
from hybridtei.inference.backends.graph.onnx_backend import OnnxBackend, Session, opened
from hybridtei.inference.backends.graph.ops import family_graph
from hybridtei.inference.backends.graph.writer import Graph
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.checkpoint.weights import Weights
from hybridtei.system import memory
from hybridtei.system.machine import LaneKind
from tests.inference.backends.outputs import columns_of, random_encodings, run, same, sixty_four
from tests.resident import resident


def onnx(spec, threads=1):
    """By a graph that was made from other weights of the same shape."""
    return OnnxBackend(
        spec, tiny.graph_of(spec.model_type), Weights.open(spec.folder), threads=threads
    )


def test_threads_of_one_pass_change_nothing(hybrid):
    spec = read_spec(hybrid)
    team, texts = onnx(spec, threads=2), sixty_four(spec.vocab_size)
    assert team.lanes == (LaneKind.BULK,)
    same(run(team, texts), run(onnx(spec), texts), len(texts))


@pytest.mark.parametrize("family", [*tiny.FAMILIES])
def test_a_text_alone_is_computed_as_among_others(tmp_path, family):
    spec = tiny.family_spec(tmp_path, family)
    agree_alone(open_engine("ort", spec))


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max"])
@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "qwen3"])
@pytest.mark.usefixtures("cache")
def test_a_text_alone_reads_the_weights_of_the_packed_file(tmp_path, monkeypatch, family, pooling):
    monkeypatch.setattr(packed_file, "LEAST_BYTES", 0)
    spec = tiny.family_spec(tmp_path / family, family)
    spec = replace(spec, kind=replace(spec.kind, pooling=(pooling,)))
    agree_alone(OnnxBackend(spec, family_graph(spec), Weights.open(spec.folder), cache_gb=1))


def agree_alone(backend):
    """The graph of one text and that of any batch give the same bits."""
    wait(backend._openings)
    assert backend._alone is not None
    for text in random_encodings(backend.spec):
        for heads in (frozenset({Head.DENSE}), backend.spec.heads):
            found, expected = (
                columns_of(run(backend, [text], heads, use_all_cores=wide), 0)
                for wide in (True, False)
            )
            assert found.keys() == expected.keys()
            for name, values in expected.items():
                assert (found[name] == values).all()


@pytest.mark.usefixtures("cache")
def test_a_session_that_cannot_be_opened_leaves_its_work_to_the_first(bert, monkeypatch, caplog):
    class OnlyFirst(Session):
        def __init__(self, graph, threads, *more, **named):
            if threads > 1 or isinstance(graph, bytes):
                raise MemoryError("no room for it")
            super().__init__(graph, threads, *more, **named)

    monkeypatch.setattr(packed_file, "LEAST_BYTES", 0)
    monkeypatch.setattr(onnx_backend, "Session", OnlyFirst)
    spec = read_spec(bert, pooling="mean")
    backend = OnnxBackend(spec, family_graph(spec), Weights.open(spec.folder), cache_gb=1)
    wait(backend._openings)
    assert "could not be opened" in caplog.text
    text = random_encodings(spec)[:1]
    found, expected = (
        columns_of(run(backend, text, spec.heads, use_all_cores=wide), 0) for wide in (True, False)
    )
    assert (found["dense"] == expected["dense"]).all()
    backend.close()


@pytest.mark.parametrize("content", [b"", b"no protobuf"])
def test_a_graph_that_onnxruntime_does_not_take_is_a_load_error(bert, content):
    with pytest.raises(LoadError, match=f"{bert}: ONNX Runtime refuses the graph"):
        OnnxBackend(
            read_spec(bert), Graph(content, tiny.graph_of("bert").weights), Weights.open(bert)
        )


def test_word_embeddings_that_could_be_two_tables_are_an_error(hybrid, monkeypatch):
    spec, graph = read_spec(hybrid), tiny.graph_of("bert")
    shape = (spec.vocab_size, spec.hidden_size)
    assert [found for found in graph.weights.values() if found == shape] == [shape]
    monkeypatch.setattr(
        "hybridtei.inference.backends.graph.onnx_backend.open_sessions",
        lambda *_, **__: [opened(NoSession)],
    )
    with pytest.raises(LoadError, match=f"{hybrid}: 2 tensors could be"):
        OnnxBackend(spec, Graph(b"", {**graph.weights, "twin": shape}), Weights.open(hybrid))


class NoSession:
    """Takes no inputs."""

    inputs = frozenset[str]()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_large_pass_took_is_freed(tmp_path):
    spec = read_spec(
        tiny.write_bert(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=1)
    )
    backend = open_engine("ort", spec)
    backend.free_unused()
    memory.trim()
    before = resident()
    texts = [Encoding(np.full(100, 5 + place)) for place in range(60)]
    run(backend, texts, frozenset({Head.DENSE}))
    assert resident() - before > 20_000_000
    backend.free_unused()
    memory.trim()
    assert resident() - before < 10_000_000
