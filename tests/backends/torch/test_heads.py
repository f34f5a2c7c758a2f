"""Pooling and Dense layers against sentence-transformers' own modules; which tokens keep a vector, and what it is; lexical
weights: BGE-M3's layer and our perceptron against the same in plain torch modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling

from hybridtei.backends.torch.heads import POOLINGS, LexicalWeights, dense, lexical, lexical_inputs, multivector
from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.backends.torch.load import dense_layer
from hybridtei.batch import kept_tokens, offsets_of
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


SPECIAL = np.array([0, 2])
SEQUENCES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8)


def flat(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([token for sequence in sequences for token in sequence]), offsets_of([len(s) for s in sequences])


@given(SEQUENCES)
def test_the_first_token_has_no_vector_the_closing_one_does(sequences: list[list[int]]) -> None:
    kept, offsets = kept_tokens("first", *flat(sequences), SPECIAL)
    assert kept.tolist() == [place > 0 for sequence in sequences for place in range(len(sequence))]
    assert np.diff(offsets).tolist() == [len(sequence) - 1 for sequence in sequences]


@given(SEQUENCES)
def test_special_tokens_have_no_vector_wherever_they_stand(sequences: list[list[int]]) -> None:
    kept, offsets = kept_tokens("specials", *flat(sequences), SPECIAL)
    assert kept.tolist() == [token not in (0, 2) for sequence in sequences for token in sequence]
    assert np.diff(offsets).tolist() == [sum(token not in (0, 2) for token in sequence) for sequence in sequences]


@given(SEQUENCES)
def test_nothing_is_dropped_where_nothing_should_be(sequences: list[list[int]]) -> None:
    kept, offsets = kept_tokens("none", *flat(sequences), SPECIAL)
    assert kept.all()
    assert offsets.tolist() == flat(sequences)[1].tolist()


def test_a_sequence_of_one_token_has_no_vectors() -> None:
    kept, offsets = kept_tokens("first", *flat([[5], [0, 7, 2], [6]]), SPECIAL)
    assert offsets.tolist() == [0, 0, 2, 2]
    rows = multivector(torch.ones(5, 3), torch.as_tensor(kept), torch.ones(4, 3), None)
    assert rows.shape == (2, 4)


def test_no_vector_at_all_is_an_empty_array_of_the_right_width() -> None:
    kept, offsets = kept_tokens("first", *flat([[5], [6]]), SPECIAL)
    assert offsets.tolist() == [0, 0, 0]
    assert multivector(torch.ones(2, 3), torch.as_tensor(kept), torch.ones(4, 3), None).shape == (0, 4)


@pytest.mark.parametrize("bias", [True, False])
def test_kept_tokens_go_through_one_layer(bias: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 4, bias=bias)
    hidden, kept = torch.randn(9, 6), torch.arange(9) % 3 > 0
    ours = multivector(hidden, kept, layer.weight, layer.bias)
    torch.testing.assert_close(ours, layer(hidden)[kept], atol=tolerances.WEIGHTS["float32"], rtol=0)
    assert ours.dtype == torch.float32


TOKENS = 50


def rows(width: int = tiny.HIDDEN, seed: int = 0) -> torch.Tensor:
    return torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(seed))


def test_the_linear_form_is_relu_of_one_layer() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(tiny.HIDDEN, 1)
    ours = lexical(rows(), LexicalWeights(layer.weight, layer.bias))
    assert (ours >= 0).all()
    assert 0 < (ours > 0).sum() < TOKENS  # some weights are cut off, some are not
    torch.testing.assert_close(ours, torch.relu(layer(rows())).squeeze(1), atol=tolerances.WEIGHTS["float32"], rtol=0)


def test_the_perceptron_sees_state_and_normed_embedding() -> None:
    torch.manual_seed(0)
    hidden, out, norm = torch.nn.Linear(2 * tiny.HIDDEN, 8), torch.nn.Linear(8, 1), torch.nn.LayerNorm(tiny.HIDDEN)
    states, embeddings = rows(seed=1), 3 + rows(seed=2)
    head = LexicalWeights(out.weight, out.bias, hidden.weight, hidden.bias, torch.nn.functional.gelu)
    ours = lexical(lexical_inputs(states, embeddings, ("hidden", "embedding")), head)
    joined = torch.cat([states, norm(embeddings)], 1)
    theirs = torch.relu(out(torch.nn.functional.gelu(hidden(joined)))).squeeze(1)
    torch.testing.assert_close(ours, theirs, atol=tolerances.WEIGHTS["float32"], rtol=0)


def test_inputs_are_joined_in_the_order_named() -> None:
    states, embeddings = rows(seed=1), rows(seed=2)
    one = lexical_inputs(states, embeddings, ("hidden", "embedding"))
    other = lexical_inputs(states, embeddings, ("embedding", "hidden"))
    assert torch.equal(one, torch.cat([other[:, tiny.HIDDEN :], other[:, : tiny.HIDDEN]], 1))
    assert torch.equal(lexical_inputs(states, None, ("hidden",)), states)


def test_weights_are_single_precision_whatever_the_trunk() -> None:
    head = LexicalWeights(torch.ones(1, tiny.HIDDEN, dtype=torch.float16), torch.zeros(1, dtype=torch.float16))
    assert lexical(rows().half(), head).dtype == torch.float32
