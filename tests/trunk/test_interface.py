"""What transformers' attention modules say of themselves, and how it is understood."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridtei.backends.torch_backend import TorchBackend
from hybridtei.batch import Encoding, offsets_of, pack
from hybridtei.checkpoint.spec import read_spec
from hybridtei.errors import UnsupportedArchitecture
from hybridtei.trunk.families import PACKED
from hybridtei.trunk.interface import NAME, is_causal, register
from hybridtei.trunk.layout import PackedLayout
from tests import tiny


def module(decoder: bool, **config: object) -> SimpleNamespace:
    return SimpleNamespace(is_causal=decoder, config=SimpleNamespace(**config))


@pytest.mark.parametrize(
    ("looks", "back_only"),
    [
        (module(True), True),
        (module(False), False),
        (module(True, is_causal=True), True),
        (module(True, is_causal=False), False),
        (module(True, use_bidirectional_attention=True), False),
        (module(True, use_bidirectional_attention=None), True),
    ],
)
def test_the_configuration_may_take_causality_back(looks: SimpleNamespace, back_only: bool) -> None:
    assert is_causal(looks) is back_only


@pytest.mark.parametrize("feature", ["softcap", "s_aux", "position_bias"])
def test_scores_changed_in_a_way_we_do_not_compute_are_refused(feature: str) -> None:
    from transformers import AttentionInterface

    register()
    attend = AttentionInterface()[NAME]
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedArchitecture, match=feature):
        attend(module(True), x, x, x, None, layout=PackedLayout(offsets_of([3])), **{feature: 30.0})


@pytest.mark.parametrize("model_type", sorted(PACKED))
def test_no_pass_waits_for_the_device_midway(tmp_path: Path, model_type: str) -> None:
    """What reads a number off a tensor makes a host wait for all that it launched, and cannot be recorded as a graph."""
    backend = TorchBackend(read_spec(tiny.write_family(tmp_path, model_type), pooling="mean"))
    batch = pack([Encoding(np.arange(5, 5 + length)) for length in (5, 9)], frozenset(), backend.spec.positions)
    layout, placed = backend.trunk.layout(batch), backend.trunk.place(batch)
    with torch.inference_mode(), Reads() as reads:
        backend.trunk.eager(placed, layout)
    assert reads.found == []


class Reads(TorchDispatchMode):
    """Notes operations that give the host a number, or a size that depends on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function._schema.name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"):
            self.found.append(function._schema.name)
        return function(*arguments, **(keywords or {}))
