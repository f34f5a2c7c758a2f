"""Lexical weights: BGE-M3's layer and our perceptron against the same in plain torch modules."""

from __future__ import annotations

import torch

from hybridtei.backends.torch.sparse import LexicalWeights, lexical, lexical_inputs
from tests import tiny, tolerances

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
