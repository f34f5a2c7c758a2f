"""Operations of some checkpoints on pooled vectors, besides Dense modules: Perplexity's rounding,
Qwen3's own projection."""

import numpy as np
import pytest
import torch

from conformance.families.oracle import open_engine, reference, texts_of
from conformance.small import published, tiny, tolerances
from hybridtei.batch import Head
from hybridtei.errors import WeightMismatch
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import run
from tests.models.refused import listed
from tests.near import near, same

WIDTH = 12


def vectors(engine, spec):
    """Dense vectors of the common texts, in one batch."""
    return run(open_engine(engine, spec), texts_of(spec), frozenset({Head.DENSE})).dense


def means(folder, spec):
    texts = texts_of(spec)
    rows = np.split(reference(folder, texts), np.cumsum([len(text) for text in texts])[:-1])
    return np.stack([one.mean(0) for one in rows])


@pytest.mark.parametrize("engine", ["ort", "torch"])
def test_perplexitys_vectors_are_whole_numbers(tmp_path, engine):
    folder = tiny.write_family(tmp_path, "qwen3", is_causal=False)
    exact = 127 * np.tanh(means(folder, read_spec(folder, pooling="mean")))
    spec = read_spec(published.as_pplx(folder))
    assert (spec.kind.is_rounded, spec.pooling) == (True, ("mean",))
    ours = vectors(engine, spec)
    same(ours, np.round(ours))
    # The nearest whole number
    assert np.abs(ours - exact).max() <= 0.5 + 1e-3
    assert np.ptp(ours) > 100


def test_the_module_says_so_too(tmp_path):
    folder = tiny.write_modules(tiny.write_family(tmp_path, "bert"), pooling="mean")
    assert not read_spec(folder).kind.is_rounded
    quantizer = ("st_quantize.FlexibleQuantizer", "2_FlexibleQuantizer")
    listed(folder, ("Transformer", ""), ("Pooling", "1_Pooling"), quantizer)
    assert read_spec(folder).kind.is_rounded


@pytest.mark.parametrize("engine", ["ort", "torch"])
def test_qwen3s_projection_follows_the_pooling(tmp_path, engine):
    folder = tiny.write_family(tmp_path, "qwen3")
    plain = read_spec(folder, pooling="mean")
    expected = means(folder, plain)
    matrix = np.random.default_rng(1).standard_normal((WIDTH, tiny.HIDDEN), np.float32)
    added = {"linear.weight": torch.from_numpy(matrix)}
    tiny.change(folder, lambda tensors: {**tensors, **added})
    # Without `num_labels` as in TEI
    assert read_spec(folder, pooling="mean").dense_width == tiny.HIDDEN
    tiny.configured(folder, num_labels=WIDTH)
    spec = read_spec(folder, pooling="mean")
    assert spec.dense_width == WIDTH
    near(vectors(engine, spec), expected @ matrix.T, 20 * tolerances.HIDDEN["float32"])
    tiny.configured(folder, num_labels=WIDTH + 1)
    with pytest.raises(
        WeightMismatch, match=r"`linear.weight` has shape \[12, 32\], the model needs \[13, 32\]"
    ):
        vectors(engine, read_spec(folder, pooling="mean"))
