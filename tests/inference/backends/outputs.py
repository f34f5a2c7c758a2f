"""Texts for the backends of tiny models, what comes out for each of them, and how near two backends
are."""

import numpy as np
import pytest
import torch

from conformance.small import tolerances
from hybridtei.batch import Encoding, Head, pack

# Some longer than every window, some on its edges
LENGTHS = (
    7,
    1,
    120,
    2,
    64,
    17,
    16,
    33,
    3,
    15,
    120,
)


def on_gpu(test):
    return pytest.mark.gpu(
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")(test)
    )


def random_encodings(spec, lengths=LENGTHS):
    """Ids of the whole vocabulary, padding and other special ids among them; token types where the
    model has them."""
    draw = np.random.default_rng(0)
    return [
        Encoding(
            draw.integers(0, spec.vocab_size, length),
            draw.integers(0, 2, length) if spec.has_token_types else None,
        )
        for length in lengths
    ]


def sixty_four(vocab_size):
    """Texts of 1 to 120 tokens."""
    draw = np.random.default_rng(3)
    return [Encoding(draw.integers(0, vocab_size, int(120 ** draw.random()))) for _ in range(64)]


def run(backend, encodings, heads=None, **how):
    """One pass, of all heads that the model has unless others are named."""
    return backend.forward(
        pack(encodings, heads or backend.spec.heads, backend.spec.positions), **how
    )


def states(backend, encodings, **how):
    """The last hidden states of each text, of one pass."""
    return run(backend, encodings, frozenset({Head.TOKENS}), **how).tokens


def columns_of(outputs, i):
    """All that came out for sequence i."""
    ragged = {
        "token_weights": outputs.token_weights,
        "multivector": outputs.multivector,
        "tokens": outputs.tokens,
    }
    columns = {name: column.row(i) for name, column in ragged.items() if column is not None}
    if outputs.dense is not None:
        columns["dense"] = outputs.dense[i]
    if outputs.splade is not None:
        columns["splade"] = outputs.splade.take([i]).to_dense()[0]
    return columns


def same(ours, theirs, rows, dtype="float32"):
    """Every column of the first rows in float32, and as near as the precision allows: relative to a
    row's largest value, where that is above 1."""
    for i in range(rows):
        found, expected = columns_of(ours, i), columns_of(theirs, i)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name].dtype == np.float32
            scale = max(1.0, float(np.abs(values).max(initial=0)))
            np.testing.assert_allclose(
                found[name], values, atol=scale * tolerances.HIDDEN[dtype], rtol=0, err_msg=name
            )


def near(one, other):
    """Arrays of numbers of about 1, equal to the last digits of float32."""
    np.testing.assert_allclose(one, other, atol=tolerances.HIDDEN["float32"], rtol=0)
