"""Pooling and Dense layers against sentence-transformers' own modules; which tokens keep a vector.
Lexical weights and multi-vectors against their formulas: test_backend.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.base.modules import Dense
from sentence_transformers.sentence_transformer.modules import Pooling

from conformance.small import tiny, tolerances
from hybridtei.batch import kept_tokens, offsets_of
from hybridtei.inference.backends.heads import POOLINGS, Segments, dense, lexical, pooled
from hybridtei.inference.backends.torch.load import to_tensors
from hybridtei.inference.backends.torch.ops import TORCH
from hybridtei.models.checkpoint.classifiers import LinearLayer
from hybridtei.models.checkpoint.layers import dense_layer
from hybridtei.models.checkpoint.modules import DenseModule
from tests.near import near
from tests.sampled import paired

LENGTHS = [5, 1, 40, 2, 17]
MODES = [[mode] for mode in POOLINGS]
LISTS = [["mean", "cls"], ["lasttoken", "max", "weightedmean"], list(POOLINGS)]


def hidden_rows(seed=0):
    draw, offsets = torch.Generator().manual_seed(seed), offsets_of(LENGTHS)
    return torch.randn(sum(LENGTHS), tiny.HIDDEN, generator=draw), Segments(
        offsets, torch.as_tensor(offsets)
    )


def padded(hidden, side):
    """The same rows as sentence-transformers takes them, with noise for padding."""
    longest = max(LENGTHS)
    rows = torch.full((len(LENGTHS), longest, tiny.HIDDEN), 9.0)
    mask = torch.zeros(len(LENGTHS), longest, dtype=torch.long)
    for i, part in enumerate(torch.split(hidden, LENGTHS)):
        place = slice(0, len(part)) if side == "right" else slice(longest - len(part), longest)
        rows[i, place], mask[i, place] = part, 1
    return {"token_embeddings": rows, "attention_mask": mask}


@pytest.mark.parametrize(("modes", "side"), paired([*MODES, *LISTS], ["right", "left"]))
def test_pooling_equals_sentence_transformers(modes, side):
    hidden, at = hidden_rows()
    theirs = Pooling(tiny.HIDDEN, pooling_mode=modes)(padded(hidden, side))["sentence_embedding"]
    near(pooled(TORCH, hidden, at, modes), theirs, tolerances.WEIGHTS["float32"])


@pytest.mark.parametrize(
    ("name", "bias"), paired(["Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"], [True, False])
)
def test_a_dense_layer_equals_sentence_transformers(tmp_path, name, bias):
    torch.manual_seed(0)
    module = Dense(tiny.HIDDEN, 7, bias=bias, activation_function=getattr(torch.nn, name)())
    module.save(str(tmp_path))
    declared = DenseModule(tmp_path, tiny.HIDDEN, 7, bias, f"torch.nn.modules.activation.{name}")
    hidden, at = hidden_rows()
    layers = to_tensors([dense_layer(declared)], torch.float32, torch.device("cpu"))
    ours = dense(TORCH, hidden, at, ["mean"], layers)
    theirs = module({"sentence_embedding": pooled(TORCH, hidden, at, ["mean"])})[
        "sentence_embedding"
    ]
    near(ours, theirs.detach(), tolerances.WEIGHTS["float32"])


SPECIAL = np.array([0, 2])
SEQUENCES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=8)


def flat(sequences):
    return np.array([token for sequence in sequences for token in sequence]), offsets_of(
        [len(s) for s in sequences]
    )


@given(SEQUENCES)
def test_which_tokens_have_a_vector(sequences):
    """All but the first, all but special ones wherever they stand, or all."""
    laws = {
        "first": lambda place, _: place > 0,
        "specials": lambda _, token: token not in SPECIAL,
        "none": lambda *_: True,
    }
    for drop, law in laws.items():
        kept, offsets = kept_tokens(drop, *flat(sequences), SPECIAL)
        expected = [
            [law(place, token) for place, token in enumerate(sequence)] for sequence in sequences
        ]
        assert kept.tolist() == [one for row in expected for one in row]
        assert np.diff(offsets).tolist() == [sum(row) for row in expected]


def test_inputs_of_lexical_weights_are_joined_in_the_order_named():
    states, words = (
        torch.randn(50, tiny.HIDDEN, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 2)
    )
    first, second = torch.ones(2, tiny.HIDDEN)
    normed = torch.nn.functional.layer_norm(words, words.shape[-1:])
    for inputs, parts in (
        (("hidden", "embedding"), (states, normed)),
        (("embedding", "hidden"), (normed, states)),
    ):
        layer = LinearLayer(torch.cat([first, 2 * second])[None])
        expected = torch.relu(parts[0].sum(1) + 2 * parts[1].sum(1))
        torch.testing.assert_close(lexical(TORCH, states, words, inputs, [layer]), expected)
    alone = lexical(TORCH, states, None, ("hidden",), [LinearLayer(first[None])])
    torch.testing.assert_close(alone, torch.relu(states.sum(1)))
