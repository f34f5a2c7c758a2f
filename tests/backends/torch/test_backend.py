"""The torch backend: BGE-M3's formulas, neighbours that change nothing, and what a pass costs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from hybridtei.backends.torch import backend as backend_module
from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.batch import Encoding, Head, Padding, pack
from hybridtei.checkpoint.spec import read_spec
from hybridtei.errors import BackendError
from hybridtei.outputs import HeadOutputs
from hybridtei.system.machine import LaneKind
from tests import tiny, tolerances

EVERYTHING = frozenset({Head.DENSE, Head.SPARSE, Head.MULTIVECTOR, Head.TOKENS})


def load(folder: Path, pooling: str | None = None, **settings: str) -> TorchBackend:
    return TorchBackend(read_spec(folder, pooling=pooling), **settings)


def run(backend: TorchBackend, encodings: list[Encoding], heads: frozenset[Head] = EVERYTHING) -> HeadOutputs:
    return backend.forward(pack(encodings, heads, backend.spec.positions))


def sixty_four(vocab_size: int) -> list[Encoding]:
    """Texts of 1 to 120 tokens."""
    draw = np.random.default_rng(3)
    return [Encoding(draw.integers(0, vocab_size, int(120 ** draw.random()))) for _ in range(64)]


@pytest.fixture(scope="module")
def hybrid_backend(hybrid: Path) -> TorchBackend:
    return load(hybrid)


@pytest.fixture(scope="module")
def m3_backend(m3: Path) -> TorchBackend:
    return load(m3)


@pytest.fixture(scope="module")
def splade_backend(splade: Path) -> TorchBackend:
    return load(splade, "splade")


@pytest.fixture(scope="module")
def padded_backend(tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    return load(tiny.write_family(tmp_path_factory.mktemp("padded"), "mpnet"), "mean")


def columns_of(outputs: HeadOutputs, i: int) -> dict[str, np.ndarray]:
    """All that came out for sequence i."""
    ragged = {"token_weights": outputs.token_weights, "multivector": outputs.multivector, "tokens": outputs.tokens}
    columns = {name: column.row(i) for name, column in ragged.items() if column is not None}
    if outputs.dense is not None:
        columns["dense"] = outputs.dense[i]
    if outputs.splade is not None:
        columns["splade"] = outputs.splade.take([i]).to_dense()[0]
    return columns


@pytest.mark.parametrize("name", ["hybrid_backend", "m3_backend", "splade_backend", "padded_backend"])
def test_neighbours_and_their_order_change_no_output(request: pytest.FixtureRequest, name: str) -> None:
    backend: TorchBackend = request.getfixturevalue(name)
    encodings = sixty_four(backend.spec.vocab_size)
    heads = backend.spec.heads
    together = run(backend, encodings, heads)
    order = np.random.default_rng(0).permutation(len(encodings))
    shuffled = run(backend, [encodings[i] for i in order], heads)
    for place, i in enumerate(order):
        expected = columns_of(run(backend, [encodings[i]], heads), 0)
        assert len(expected) == len(heads)
        for found in (columns_of(together, int(i)), columns_of(shuffled, place)):
            for column, values in expected.items():
                np.testing.assert_allclose(found[column], values, atol=tolerances.HIDDEN["float32"], rtol=0, err_msg=column)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32])
def test_m3_heads_equal_the_formulas(tmp_path: Path, suffix: str, stored: torch.dtype) -> None:
    folder = tiny.write_m3(tmp_path, suffix=suffix, dtype=stored)
    backend = load(folder)
    encodings = sixty_four(backend.spec.vocab_size)[:12]
    outputs = run(backend, encodings)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    heads = []
    for name in ("sparse_linear", "colbert_linear"):
        from safetensors.torch import load_file

        file = folder / f"{name}{suffix}"
        state = load_file(file) if suffix == ".safetensors" else torch.load(file, weights_only=True)
        heads.append(torch.nn.Linear(tiny.HIDDEN, len(state["weight"])))
        heads[-1].load_state_dict(state)
    sparse, colbert = heads
    for i, encoding in enumerate(encodings):
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor(encoding.input_ids)[None]).last_hidden_state[0]
            expected = {
                "dense": hidden[0],
                "token_weights": torch.relu(sparse(hidden)).squeeze(1),
                "multivector": colbert(hidden)[1:],
                "tokens": hidden,
            }
        found = columns_of(outputs, i)
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values.numpy(), atol=tolerances.WEIGHTS["float32"], rtol=0, err_msg=name)


def test_our_own_heads_equal_the_formulas(hybrid: Path, hybrid_backend: TorchBackend, tmp_path: Path) -> None:
    tensors = tiny.write_own_heads(tmp_path)  # the same seed, so the same weights
    model = AutoModel.from_pretrained(hybrid, attn_implementation="eager").eval()
    functional = torch.nn.functional
    for encoding in sixty_four(hybrid_backend.spec.vocab_size)[:8]:
        found = columns_of(run(hybrid_backend, [encoding]), 0)
        ids = torch.tensor(encoding.input_ids)
        with torch.inference_mode():
            hidden = model(input_ids=ids[None]).last_hidden_state[0]
            words = functional.layer_norm(model.get_input_embeddings()(ids), (tiny.HIDDEN,))
            inner = functional.linear(
                torch.cat([hidden, words], 1), tensors["sparse.hidden.weight"], tensors["sparse.hidden.bias"]
            )
            weights = torch.relu(
                functional.linear(functional.gelu(inner), tensors["sparse.out.weight"], tensors["sparse.out.bias"])
            )
            ordinary = ~torch.isin(ids, torch.tensor([0, 1, 2, 3]))
            expected = {
                "dense": hidden.mean(0),
                "token_weights": weights.squeeze(1),
                "multivector": hidden[ordinary] @ tensors["multivector.weight"].T,
            }
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values.numpy(), atol=tolerances.WEIGHTS["float32"], rtol=0, err_msg=name)


@pytest.mark.parametrize("head", sorted(EVERYTHING))
def test_only_wanted_heads_are_computed(m3_backend: TorchBackend, head: Head) -> None:
    outputs = run(m3_backend, [Encoding(np.array([0, 7, 2]))], frozenset({head}))
    column = {Head.SPARSE: "token_weights"}.get(head, str(head))
    present = {
        name for name in ("dense", "token_weights", "splade", "multivector", "tokens") if getattr(outputs, name) is not None
    }
    assert present == {column}


def test_all_heads_share_one_pass(m3_backend: TorchBackend) -> None:
    before = m3_backend.forwards
    run(m3_backend, sixty_four(m3_backend.spec.vocab_size))
    assert m3_backend.forwards == before + 1


def test_every_output_is_float32_whatever_the_precision(hybrid: Path) -> None:
    outputs = run(load(hybrid, dtype="bfloat16"), sixty_four(90)[:3])
    columns = columns_of(outputs, 1)
    assert set(columns) == {"dense", "token_weights", "multivector", "tokens"}
    assert {values.dtype for values in columns.values()} == {np.dtype(np.float32)}


def test_half_precision_vectors_point_the_same_way(hybrid: Path, hybrid_backend: TorchBackend) -> None:
    encodings = sixty_four(hybrid_backend.spec.vocab_size)[:16]
    exact, rough = (run(backend, encodings).dense for backend in (hybrid_backend, load(hybrid, dtype="bfloat16")))
    assert exact is not None
    assert rough is not None
    exact, rough = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (exact, rough))
    np.testing.assert_allclose(exact, rough, atol=tolerances.UNIT["bfloat16"], rtol=0)


@pytest.mark.parametrize(
    ("model_type", "padding"),
    [("bert", Padding.NONE), ("qwen3", Padding.NONE), ("mpnet", Padding.NONE)],
)
def test_a_backend_tells_whether_it_pads(tmp_path: Path, model_type: str, padding: Padding) -> None:
    backend = load(tiny.write_family(tmp_path, model_type), "mean")
    assert backend.padding is padding
    assert (backend.name, backend.dtype) == ("torch", "float32")
    assert backend.busy_tokens > 0
    assert len(backend.lanes) >= 1


@pytest.mark.parametrize("wrong", [[2, 10_000, 3], [5] * 1000])
def test_a_pass_that_fails_is_a_backend_error_and_the_next_one_works(m3_backend: TorchBackend, wrong: list[int]) -> None:
    with pytest.raises(BackendError, match="forward pass failed"):
        run(m3_backend, [Encoding(np.array(wrong))])
    assert run(m3_backend, [Encoding(np.array([0, 7, 2]))]).dense is not None


@pytest.mark.parametrize(
    "kind", [RuntimeError, IndexError, MemoryError, TypeError, KeyError, AssertionError, ZeroDivisionError]
)
def test_whatever_a_pass_raises_is_a_backend_error(
    m3_backend: TorchBackend, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise kind("of the model's own")

    monkeypatch.setattr(m3_backend, "launch", fail)
    with pytest.raises(BackendError, match="of the model's own"):
        run(m3_backend, [Encoding(np.array([0, 7, 2]))])


def test_the_hosts_work_is_done_before_the_turn_to_launch(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a GPU's passes are launched one at a time: its lock stands here in place of a CPU's, which has none."""
    backend, turn, seen = load(hybrid), threading.Lock(), list[tuple[str, bool]]()
    backend._launching = turn

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            seen.append((name, turn.locked()))
            return function(*arguments)

        return noted

    for name in ("to_device", "wanted", "computed_once", "outputs_of", "compute"):
        monkeypatch.setattr(backend_module, name, noting(name, getattr(backend_module, name)))
    backend.shares_prefixes = True
    run(backend, sixty_four(backend.spec.vocab_size)[:5])
    assert seen == [("wanted", False), ("computed_once", False), ("to_device", False), ("compute", True), ("outputs_of", False)]


def test_threads_share_a_backend(hybrid_backend: TorchBackend) -> None:
    from concurrent.futures import ThreadPoolExecutor

    encodings = sixty_four(hybrid_backend.spec.vocab_size)
    expected = [run(hybrid_backend, [encoding]).dense for encoding in encodings]
    before = hybrid_backend.forwards

    def lane(encoding: Encoding) -> np.ndarray | None:
        hybrid_backend.enter_lane(LaneKind.BULK)
        return run(hybrid_backend, [encoding]).dense

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lane, encodings))
    assert hybrid_backend.forwards == before + len(encodings)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerances.WEIGHTS["float32"], rtol=0)
