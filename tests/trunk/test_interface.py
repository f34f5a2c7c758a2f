"""What transformers' attention modules say of themselves, and how it is understood."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hybridtei.errors import UnsupportedArchitecture
from hybridtei.ragged import offsets_of
from hybridtei.trunk.interface import NAME, is_causal, register
from hybridtei.trunk.layout import PackedLayout


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
