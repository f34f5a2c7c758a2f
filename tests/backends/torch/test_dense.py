"""Pooling and Dense layers against sentence-transformers' own modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling

from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.backends.torch.parameters import dense_layer
from hybridtei.backends.torch.pooled import POOLINGS, dense
from hybridtei.batch import offsets_of
from hybridtei.checkpoint.modules import DenseModule
from tests import tiny, tolerances

LENGTHS = [5, 1, 40, 2, 17]
MODES = [[mode] for mode in POOLINGS]
LISTS = [["mean", "cls"], ["lasttoken", "max", "weightedmean"], list(POOLINGS)]


def hidden_rows(seed: int = 0) -> tuple[torch.Tensor, PackedLayout]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), tiny.HIDDEN, generator=draw), PackedLayout(offsets_of(LENGTHS))


def padded(hidden: torch.Tensor, side: str) -> dict[str, torch.Tensor]:
    """The same rows as sentence-transformers takes them, with noise for padding."""
    longest = max(LENGTHS)
    rows = torch.full((len(LENGTHS), longest, tiny.HIDDEN), 9.0)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    for i, part in enumerate(torch.split(hidden, LENGTHS)):
        place = slice(0, len(part)) if side == "right" else slice(longest - len(part), longest)
        rows[i, place], mask[i, place] = part, 1
    return {"token_embeddings": rows, "attention_mask": mask}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("modes", [*MODES, *LISTS], ids="+".join)
def test_pooling_equals_sentence_transformers(modes: list[str], side: str) -> None:
    hidden, layout = hidden_rows()
    theirs = Pooling(tiny.HIDDEN, pooling_mode=modes)(padded(hidden, side))["sentence_embedding"]
    torch.testing.assert_close(dense(hidden, layout, modes), theirs, atol=tolerances.WEIGHTS["float32"], rtol=0)


@pytest.mark.parametrize("mode", POOLINGS)
def test_pooled_vectors_of_half_precision_rows_are_single_precision(mode: str) -> None:
    hidden, layout = hidden_rows()
    assert dense(hidden.half(), layout, [mode]).dtype == torch.float32


@pytest.mark.parametrize("name", ["Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_dense_layer_equals_sentence_transformers(tmp_path: Path, name: str, bias: bool) -> None:
    torch.manual_seed(0)
    module = Dense(tiny.HIDDEN, 7, bias=bias, activation_function=getattr(torch.nn, name)())
    module.save(str(tmp_path))
    declared = DenseModule(tmp_path, tiny.HIDDEN, 7, bias, f"torch.nn.modules.activation.{name}")
    hidden, layout = hidden_rows()
    ours = dense(hidden, layout, ["mean"], [dense_layer(declared, torch.device("cpu"))])
    theirs = module({"sentence_embedding": dense(hidden, layout, ["mean"])})["sentence_embedding"]
    torch.testing.assert_close(ours, theirs.detach(), atol=tolerances.WEIGHTS["float32"], rtol=0)


def test_dense_layers_follow_each_other(tmp_path: Path) -> None:
    """As in EmbeddingGemma: a widening layer and a narrowing one, without bias or activation."""
    torch.manual_seed(1)
    modules = [Dense(tiny.HIDDEN, 64, bias=False, activation_function=torch.nn.Identity())]
    modules.append(Dense(64, tiny.HIDDEN, bias=False, activation_function=torch.nn.Identity()))
    layers = []
    for place, module in enumerate(modules):
        (tmp_path / str(place)).mkdir()
        module.save(str(tmp_path / str(place)))
        shape = (64, tiny.HIDDEN) if place else (tiny.HIDDEN, 64)
        layers.append(
            dense_layer(
                DenseModule(tmp_path / str(place), *shape, False, "torch.nn.modules.linear.Identity"), torch.device("cpu")
            )
        )
    hidden, layout = hidden_rows()
    features = {"sentence_embedding": dense(hidden, layout, ["cls"])}
    theirs = torch.nn.Sequential(*modules)(features)["sentence_embedding"]
    ours = dense(hidden, layout, ["cls"], layers)
    torch.testing.assert_close(ours, theirs.detach(), atol=tolerances.WEIGHTS["float32"], rtol=0)
