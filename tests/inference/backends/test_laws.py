"""Laws of every backend: a pass changes no output of another pass in any lane; a failure is a
BackendError, and the next pass works; weights that do not fit are refused by name. States are held
to transformers in tests/families, every head, alone and among neighbours, in
tests/inference/test_every_backend.py."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from conformance.families.oracle import ENGINES
from conformance.small import tiny
from conformance.small.tiny import change
from hybridtei.batch import Encoding, Head, Padding
from hybridtei.errors import BackendError, WeightMismatch
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.system.machine import LaneKind
from tests.inference.backends.outputs import (
    columns_of,
    near,
    run,
    same,
    sixty_four,
)
from tests.models.families.test_families import opened

EVERYTHING = (Head.DENSE, Head.SPARSE, Head.MULTIVECTOR, Head.TOKENS)
SHORT = Encoding(np.array([0, 7, 2]))
BIAS = "encoder.layer.1.output.dense.bias"
each = pytest.mark.parametrize("engine", ENGINES)


@pytest.fixture(scope="module", params=ENGINES)
def backend(request, hybrid):
    found = opened(request.param, read_spec(hybrid))
    yield found
    found.close()


def test_all_lanes_at_once_compute_what_each_does_alone(backend):
    texts = sixty_four(backend.spec.vocab_size)
    alone = [run(backend, [text]) for text in texts]
    before = backend.forwards

    def lane(place):
        backend.enter_lane(LaneKind.EXPRESS if place % 2 else LaneKind.BULK)
        return run(backend, [texts[place % len(texts)]], use_all_cores=place % 5 == 0)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lane, range(128)))
    assert backend.forwards == before + len(found)
    for place, outputs in enumerate(found):
        same(outputs, alone[place % len(texts)], 1)


def test_what_came_out_is_not_touched_by_the_next_pass(backend):
    one, other = sixty_four(backend.spec.vocab_size)[:2]
    outputs = run(backend, [one])
    before = {name: values.copy() for name, values in columns_of(outputs, 0).items()}
    run(backend, [other])
    for name, values in columns_of(outputs, 0).items():
        assert (values == before[name]).all()


def test_token_types_count_and_are_zero_unless_given(backend):
    ids, pair = np.array([2, 9, 10, 3, 11, 3]), np.array([0, 0, 0, 0, 1, 1])
    plain, typed = Encoding(ids), Encoding(ids, pair)
    zeros = Encoding(ids, np.zeros(6, dtype=np.int64))
    batches = ([plain], [zeros], [plain, typed], [typed])
    first, *others, last = (columns_of(run(backend, texts), 0)["tokens"] for texts in batches)
    for other in others:
        near(first, other)
    assert np.abs(first - last).max() > 0.001


@pytest.mark.parametrize("head", EVERYTHING)
def test_only_wanted_heads_are_computed_and_all_share_a_pass(backend, head):
    before = backend.forwards
    found = columns_of(run(backend, [SHORT], frozenset({head})), 0)
    assert set(found) == {{Head.SPARSE: "token_weights"}.get(head, str(head))}
    run(backend, sixty_four(backend.spec.vocab_size))
    assert backend.forwards == before + 2


@pytest.mark.parametrize("wrong", [[2, 10_000, 3], [5] * 1000], ids=["id", "position"])
def test_a_pass_that_fails_is_a_backend_error_and_the_next_one_works(backend, wrong):
    with pytest.raises(BackendError, match="forward pass failed"):
        run(backend, [Encoding(np.array(wrong))])
    assert run(backend, [SHORT]).dense is not None


def test_whatever_a_pass_raises_is_a_backend_error(backend, monkeypatch):
    def fail(*_, **__):
        raise TypeError("of the library's own")

    monkeypatch.setattr(backend, "launch" if backend.name == "torch" else "_hidden", fail)
    with pytest.raises(BackendError, match="of the library's own"):
        run(backend, [SHORT])


def test_a_backend_says_what_it_is(backend):
    padding = Padding.NONE if backend.name == "torch" else Padding.ATTENTION
    assert (backend.dtype, backend.padding) == ("float32", padding)
    assert backend.busy_tokens > 0
    assert set(backend.lanes) == set(LaneKind)


@each
def test_a_weight_that_is_missing_or_has_another_shape_is_named(bert, copied, engine):
    folder = change(copied(bert), lambda tensors: {**tensors, BIAS: torch.zeros(tiny.HIDDEN + 1)})
    with pytest.raises(
        WeightMismatch, match=rf"{folder}.*`{BIAS}`.*\[{tiny.HIDDEN + 1}\].*\[{tiny.HIDDEN}\]"
    ):
        opened(engine, read_spec(folder))
    tiny.without(folder, BIAS)
    with pytest.raises(WeightMismatch, match=rf"{folder}.*`{BIAS}`"):
        opened(engine, read_spec(folder))
