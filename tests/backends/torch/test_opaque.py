"""Attention as one operation: the layout that is meant answers, by thread, and torch's own checks pass."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.backends.torch.opaque import meant, opaque
from hybridtei.batch import offsets_of
from tests.backends.torch import textbook


@pytest.mark.parametrize(("window", "causal"), [(None, False), (3, False), (None, True), (3, True)])
def test_the_layout_that_is_meant_answers(window: int | None, causal: bool) -> None:
    q, k, v = textbook.drawn(textbook.LENGTHS, 2)
    layout = PackedLayout(offsets_of(textbook.LENGTHS))
    with meant(layout):
        found = opaque().attend(q, k, v, scale=0.7, window=window, causal=causal)
    assert torch.equal(found, layout.attend(q, k, v, scale=0.7, window=window, causal=causal))


def test_each_thread_means_its_own() -> None:
    x = torch.randn(6, 1, 4)
    found = {}

    def ask(lengths: tuple[int, ...]) -> None:
        with meant(PackedLayout(offsets_of(lengths))):
            found[lengths] = opaque().attend(x, x, x, scale=1.0, window=None, causal=False)

    with meant(PackedLayout(offsets_of([6]))):
        threads = [Thread(target=ask, args=(lengths,)) for lengths in ((6,), (3, 3), (1, 5))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ours = opaque().attend(x, x, x, scale=1.0, window=None, causal=False)
    assert torch.equal(ours, found[(6,)])
    assert not torch.allclose(found[(3, 3)], found[(1, 5)])


def test_torch_finds_the_operation_well_behaved() -> None:
    opaque()
    q, k, v = textbook.drawn([3, 5], 2)
    with meant(PackedLayout(offsets_of([3, 5]))):
        torch.library.opcheck(torch.ops.hybridtei.attend, (q, k, v), {"scale": 0.7, "window": 0, "causal": False})
