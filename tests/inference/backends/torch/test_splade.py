"""SPLADE against sentence-transformers' SparseEncoder, and against the formula on transformers' own
logits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForMaskedLM

from conformance.families.oracle import alone
from conformance.small import tiny, tolerances
from hybridtei.batch import Encoding, offsets_of
from hybridtei.errors import UnsupportedArchitecture
from hybridtei.inference.backends.heads import Segments, column_maxima
from hybridtei.inference.backends.torch.backend import TorchBackend
from hybridtei.inference.backends.torch.ops import TORCH
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import run
from tests.near import near

# roberta's and camembert's heads are that of xlm-roberta
KNOWN = [
    "bert",
    "distilbert",
    "xlm-roberta",
    "modernbert",
    "mpnet",
    "nomic_bert",
    "gte",
    "jina_embeddings_v3",
    "deberta-v2",
]


def weights_of(folder, encodings):
    return run(TorchBackend(read_spec(folder, pooling="splade")), encodings).splade.to_dense()


def encodings_below(vocab_size):
    draw = np.random.default_rng(0)
    return [Encoding(draw.integers(0, vocab_size, length)) for length in (5, 1, 120, 2, 33)]


def expected_weights(model, encodings):
    """The formula, on the logits of each text alone."""
    logits = alone(model, encodings, "logits")
    return np.stack([np.log1p(np.maximum(part, 0)).max(0) for part in logits])


SETTINGS = [
    ("bert", {"hidden_act": "relu", "layer_norm_eps": 0.1}),
    ("bert", {"tie_word_embeddings": False}),
    ("modernbert", {"classifier_bias": True, "norm_bias": True}),
    ("modernbert", {"decoder_bias": False, "classifier_activation": "relu"}),
]


@pytest.mark.parametrize(("model_type", "settings"), [*((name, {}) for name in KNOWN), *SETTINGS])
def test_weights_equal_the_formula_on_the_logits_of_each_text_alone(tmp_path, model_type, settings):
    folder = tiny.write_family(tmp_path, model_type, task="ForMaskedLM", **settings)
    model = AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    encodings = encodings_below(model.config.vocab_size)
    expected = expected_weights(model, encodings)
    assert 0.05 < (expected > 0).mean() < 0.95
    near(weights_of(folder, encodings), expected, tolerances.WEIGHTS["float32"])


def test_a_head_that_nobody_described_is_refused(tmp_path):
    spec = tiny.family_spec(tmp_path, "eurobert", task="ForMaskedLM", pooling="splade")
    with pytest.raises(UnsupportedArchitecture, match="masked-language-model head of eurobert"):
        TorchBackend(spec)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 20))
def test_slices_of_any_size_give_the_same(lengths, slice_tokens):
    hidden, offsets = (
        torch.randn(sum(lengths), 6, generator=torch.Generator().manual_seed(0)),
        offsets_of(lengths),
    )
    whole = torch.stack([part.max(0).values for part in torch.split(hidden, lengths)])
    sizes = []

    def product(rows):
        sizes.append(len(rows))
        return rows

    functions = replace(TORCH, slice_tokens=lambda _: slice_tokens)
    sliced = column_maxima(functions, hidden, Segments(offsets, torch.as_tensor(offsets)), product)
    assert torch.equal(sliced, whole)
    assert max(sizes) <= slice_tokens
    assert sum(sizes) == sum(lengths)
