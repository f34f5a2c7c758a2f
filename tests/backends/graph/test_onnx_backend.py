"""ONNX Runtime against torch, output by output; neighbours, order and threads that change nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridtei.backends.base import Backend
from hybridtei.backends.graph.onnx_backend import OnnxBackend
from hybridtei.backends.graph.ops import family_graph
from hybridtei.backends.graph.writer import Graph
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.batch import Encoding, Head, Padding, pack
from hybridtei.checkpoint.modules import POOLINGS
from hybridtei.checkpoint.spec import ModelSpec, read_spec
from hybridtei.checkpoint.weights import Weights
from hybridtei.errors import BackendError, LoadError, WeightMismatch
from hybridtei.outputs import HeadOutputs
from hybridtei.system import memory
from hybridtei.system.machine import LaneKind
from tests import tiny, tolerances
from tests.backends.torch.test_backend import columns_of, sixty_four
from tests.backends.torch.test_trunk import random_encodings
from tests.sampled import sampled
from tests.tiny import change

Copied = Callable[[Path], Path]
EVERYTHING = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR, Head.TOKENS})
ACTIVATIONS = ["linear.Identity", "activation.Tanh", "activation.ReLU", "activation.GELU", "activation.SiLU"]


def onnx(spec: ModelSpec, **settings: Any) -> OnnxBackend:
    return OnnxBackend(spec, tiny.graph_of(spec.model_type), Weights.open(spec.folder), **settings)


def run(backend: Backend, encodings: list[Encoding], heads: frozenset[Head] | None = None) -> HeadOutputs:
    return backend.forward(pack(encodings, heads or backend.spec.heads, backend.spec.positions))


def same(ours: HeadOutputs, theirs: HeadOutputs, rows: int) -> None:
    for i in range(rows):
        found, expected = columns_of(ours, i), columns_of(theirs, i)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].dtype == np.float32
            np.testing.assert_allclose(found[name], values, atol=tolerances.HIDDEN["float32"], rtol=0, err_msg=name)


def agree(spec: ModelSpec, encodings: list[Encoding] | None = None) -> None:
    """Torch and ONNX Runtime, every output of a model."""
    texts = encodings or random_encodings(spec)
    same(run(onnx(spec), texts), run(TorchBackend(spec), texts), len(texts))


@pytest.fixture(scope="module")
def m3_backend(m3: Path) -> OnnxBackend:
    return onnx(read_spec(m3))


@pytest.fixture(scope="module")
def hybrid_backend(hybrid: Path) -> OnnxBackend:
    return onnx(read_spec(hybrid))


@pytest.fixture(scope="module")
def causal_backend(tmp_path_factory: pytest.TempPathFactory) -> OnnxBackend:
    return onnx(read_spec(tiny.write_family(tmp_path_factory.mktemp("causal"), "qwen3"), pooling="last-token"))


@pytest.fixture(scope="module")
def local_backend(tmp_path_factory: pytest.TempPathFactory) -> OnnxBackend:
    return onnx(read_spec(tiny.write_family(tmp_path_factory.mktemp("local"), "modernbert"), pooling="mean"))


# --- against torch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", sampled(tiny.FAMILIES, tiny.QUICK))
def test_a_graph_serves_other_weights_of_its_shape(tmp_path: Path, model_type: str) -> None:
    """All ids of the vocabulary, padding among them, token types, lengths of 1 to 120 in one batch."""
    agree(read_spec(tiny.write_family(tmp_path, model_type, seed=1), pooling="mean"))


def test_a_checkpoint_of_a_whole_language_model_runs(tmp_path: Path) -> None:
    agree(read_spec(tiny.write_family(tmp_path, "bert", task="ForMaskedLM"), pooling="mean"))


@pytest.mark.parametrize("pooling", sampled(POOLINGS, {"cls", "weightedmean"}))
def test_every_pooling_agrees(bert: Path, pooling: str) -> None:
    agree(read_spec(bert, pooling=pooling))


def test_poolings_side_by_side_and_dense_layers_agree(tmp_path: Path) -> None:
    widths = (2 * tiny.HIDDEN, 16, 8, 8, 8, 5)
    dense = [(*sizes, f"torch.nn.modules.{name}") for sizes, name in zip(pairwise(widths), ACTIVATIONS, strict=True)]
    folder = tiny.write_modules(tiny.write_family(tmp_path, "bert"), pooling=["max", "mean"], dense=dense)
    spec = read_spec(folder)
    assert len(spec.dense_modules) == len(ACTIVATIONS)
    agree(spec)


def test_m3_heads_agree(m3: Path) -> None:
    spec = read_spec(m3)
    assert spec.heads == EVERYTHING
    agree(spec)


@pytest.mark.parametrize("activation", [None, "gelu", "tanh"])
@pytest.mark.parametrize("inputs", [["hidden"], ["embedding"], ["hidden", "embedding"], ["embedding", "hidden"]], ids="+".join)
def test_our_lexical_heads_agree(tmp_path: Path, inputs: list[str], activation: str | None) -> None:
    folder = tiny.write_bert(tmp_path)
    width = tiny.HIDDEN * len(inputs) if activation is None else 8  # the linear head has the last layer only
    tiny.write_own_heads(folder, inputs=inputs, width=width, sparse={"inputs": inputs, "activation": activation})
    agree(read_spec(folder))


@pytest.mark.parametrize("drop", ["first", "specials", "none"])
def test_multivectors_keep_the_same_tokens(tmp_path: Path, drop: str) -> None:
    folder = tiny.write_bert(tmp_path)
    tiny.write_own_heads(folder, multivector={"dim": 12, "drop": drop})
    agree(read_spec(folder))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision_are_widened(bert: Path, copied: Copied, stored: torch.dtype) -> None:
    agree(read_spec(change(copied(bert), lambda tensors: {name: tensor.to(stored) for name, tensor in tensors.items()})))


def test_token_types_count_and_are_zero_unless_given(hybrid_backend: OnnxBackend) -> None:
    ids = np.array([2, 9, 10, 3, 11, 3])
    none, zeros, pair = (None, np.zeros(6, dtype=np.int64), np.array([0, 0, 0, 0, 1, 1]))
    plain, zero, typed, mixed = (
        columns_of(run(hybrid_backend, texts), 0)["tokens"]
        for texts in (
            [Encoding(ids, none)],
            [Encoding(ids, zeros)],
            [Encoding(ids, pair)],
            [Encoding(ids, none), Encoding(ids, pair)],
        )
    )
    np.testing.assert_array_equal(plain, zero)
    np.testing.assert_allclose(plain, mixed, atol=tolerances.HIDDEN["float32"], rtol=0)
    assert np.abs(plain - typed).max() > 100 * tolerances.HIDDEN["float32"]


# --- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m3_backend", "hybrid_backend", "causal_backend", "local_backend"])
def test_neighbours_and_their_order_change_no_output(request: pytest.FixtureRequest, name: str) -> None:
    backend: OnnxBackend = request.getfixturevalue(name)
    texts = sixty_four(backend.spec.vocab_size)
    order = np.random.default_rng(0).permutation(len(texts))
    together, shuffled = run(backend, texts), run(backend, [texts[i] for i in order])
    for place, i in enumerate(order):
        alone = run(backend, [texts[i]])
        same(together.take([int(i)]), alone, 1)
        same(shuffled.take([place]), alone, 1)


def test_threads_share_a_backend(hybrid_backend: OnnxBackend) -> None:
    texts = sixty_four(hybrid_backend.spec.vocab_size)
    alone = [run(hybrid_backend, [text]) for text in texts]
    before = hybrid_backend.forwards

    def lane(place: int) -> HeadOutputs:
        hybrid_backend.enter_lane(LaneKind.BULK)
        return run(hybrid_backend, [texts[place % len(texts)]])

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lane, range(256)))
    assert hybrid_backend.forwards == before + len(found)
    for place, outputs in enumerate(found):
        same(outputs, alone[place % len(texts)], 1)


def test_threads_of_one_pass_change_nothing(hybrid: Path, hybrid_backend: OnnxBackend) -> None:
    texts = sixty_four(hybrid_backend.spec.vocab_size)
    team = onnx(read_spec(hybrid), threads=2)
    assert team.lanes == (LaneKind.BULK,)
    same(run(team, texts), run(hybrid_backend, texts), len(texts))


def test_what_came_out_is_not_touched_by_the_next_pass(m3_backend: OnnxBackend) -> None:
    one, other = sixty_four(m3_backend.spec.vocab_size)[:2]
    outputs = run(m3_backend, [one])
    before = {name: values.copy() for name, values in columns_of(outputs, 0).items()}
    run(m3_backend, [other])
    for name, values in columns_of(outputs, 0).items():
        np.testing.assert_array_equal(values, before[name])


# --- as a backend ------------------------------------------------------------------------------------------------------


def test_a_backend_says_what_it_is(m3_backend: OnnxBackend) -> None:
    assert (m3_backend.name, m3_backend.dtype, m3_backend.padding) == ("ort", "float32", Padding.ATTENTION)
    assert m3_backend.busy_tokens > 0
    assert set(m3_backend.lanes) == set(LaneKind)


@pytest.mark.parametrize("head", sorted(EVERYTHING))
def test_only_wanted_heads_are_computed_and_all_share_a_pass(m3_backend: OnnxBackend, head: Head) -> None:
    before = m3_backend.forwards
    found = columns_of(run(m3_backend, [Encoding(np.array([0, 7, 2]))], frozenset({head})), 0)
    assert set(found) == {{Head.SPARSE: "token_weights"}.get(head, str(head))}
    run(m3_backend, sixty_four(m3_backend.spec.vocab_size))
    assert m3_backend.forwards == before + 2


@pytest.mark.parametrize("wrong", [[2, 10_000, 3], [5] * 1000])
@pytest.mark.parametrize("name", ["m3_backend", "hybrid_backend"])
def test_a_pass_that_fails_is_a_backend_error_and_the_next_one_works(
    request: pytest.FixtureRequest, name: str, wrong: list[int]
) -> None:
    backend: OnnxBackend = request.getfixturevalue(name)
    before = backend.forwards
    with pytest.raises(BackendError, match="forward pass failed"):
        run(backend, [Encoding(np.array(wrong))])
    assert backend.forwards == before
    assert run(backend, [Encoding(np.array([0, 7, 2]))]).dense is not None


@pytest.mark.parametrize("part", ["_hidden", "_dense", "_token_weights", "_multivector"])
def test_whatever_a_pass_raises_is_a_backend_error(m3_backend: OnnxBackend, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("of numpy's own")

    monkeypatch.setattr(m3_backend if part == "_hidden" else m3_backend._heads, part, fail)
    with pytest.raises(BackendError, match="of numpy's own"):
        run(m3_backend, [Encoding(np.array([0, 7, 2]))])


# --- graphs and weights that do not fit --------------------------------------------------------------------------------

BIAS = "encoder.layer.1.output.dense.bias"


def test_a_missing_weight_is_an_error_that_names_it(bert: Path, copied: Copied) -> None:
    folder = change(copied(bert), lambda tensors: {name: tensor for name, tensor in tensors.items() if name != BIAS})
    with pytest.raises(WeightMismatch, match=rf"{folder}.*`{BIAS}`"):
        onnx(read_spec(folder))


def test_a_misshapen_weight_is_an_error_with_both_shapes(bert: Path, copied: Copied) -> None:
    folder = change(copied(bert), lambda tensors: {**tensors, BIAS: torch.zeros(tiny.HIDDEN + 1)})
    with pytest.raises(WeightMismatch, match=rf"{folder}.*`{BIAS}`.*\[{tiny.HIDDEN + 1}\].*\[{tiny.HIDDEN}\]"):
        onnx(read_spec(folder))


def test_a_graph_of_another_family_is_a_mismatch(bert: Path) -> None:
    with pytest.raises(WeightMismatch, match=str(bert)):
        OnnxBackend(read_spec(bert), tiny.graph_of("modernbert"), Weights.open(bert))


@pytest.mark.parametrize("content", [b"", b"no protobuf"])
def test_a_graph_that_onnxruntime_does_not_take_is_a_load_error(bert: Path, content: bytes) -> None:
    with pytest.raises(LoadError, match=f"{bert}: ONNX Runtime does not take the graph"):
        OnnxBackend(read_spec(bert), Graph(content, tiny.graph_of("bert").weights), Weights.open(bert))


def test_word_embeddings_that_could_be_two_tables_are_an_error(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, graph = read_spec(hybrid), tiny.graph_of("bert")
    shape = (spec.vocab_size, spec.hidden_size)
    backend = OnnxBackend.__init__
    assert [found for found in graph.weights.values() if found == shape] == [shape]
    monkeypatch.setattr("hybridtei.backends.graph.onnx_backend.open_sessions", lambda *_, **__: [NoSession])
    with pytest.raises(LoadError, match=f"{hybrid}: 2 tensors could be"):
        backend(object.__new__(OnnxBackend), spec, Graph(b"", {**graph.weights, "twin": shape}), Weights.open(hybrid))


class NoSession:
    """Takes no inputs."""

    inputs = frozenset[str]()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_large_pass_took_is_freed(tmp_path: Path) -> None:
    spec = read_spec(tiny.write_bert(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=1))
    backend = OnnxBackend(spec, family_graph(spec), Weights.open(spec.folder))
    memory.trim()
    before = memory.resident()
    texts = [Encoding(np.full(100, 5 + place)) for place in range(60)]
    backend.forward(pack(texts, frozenset({Head.DENSE}), spec.positions))
    assert memory.resident() - before > 20_000_000
    memory.trim()
    assert memory.resident() - before < 10_000_000
