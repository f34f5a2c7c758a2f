"""Buckets for small batches: a calculation with laws, and the real trunk, to which padding must make no difference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch.backend import TorchBackend
from hybridtei.backends.torch.buckets import LONGEST, SEQUENCES, TOKENS, Bucket, Sizes, padded, sizes
from hybridtei.backends.torch.trunk import PackedTrunk
from hybridtei.batch import Encoding, PackedBatch, Positions, pack
from hybridtei.checkpoint.spec import read_spec
from tests import tiny, tolerances

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=40)


def batch(lengths: list[int], positions: Positions | None = None, vocab_size: int = 500) -> PackedBatch:
    draw = np.random.default_rng(0)
    encodings = [Encoding(draw.integers(5, vocab_size, length), adapter=i % 3) for i, length in enumerate(lengths)]
    return pack(encodings, frozenset(), positions or Positions())


@given(LENGTHS, st.sampled_from([300, 512, 8192]))
def test_a_bucket_holds_its_batch_and_is_one_of_few(lengths: list[int], longest: int) -> None:
    asked = batch(lengths)
    found = Sizes(TOKENS[-1], longest).of(asked)
    if found is None:
        assert sum(lengths) > TOKENS[-1]
        return
    assert found.tokens in TOKENS
    assert found.tokens >= sum(lengths)
    assert found.sequences in SEQUENCES
    assert found.longest >= max(lengths)
    assert found.longest in (*LONGEST, longest, found.tokens)
    assert not any(sum(lengths) <= size < found.tokens for size in TOKENS)


@given(LENGTHS)
def test_a_padded_batch_begins_with_the_batch_and_fills_its_bucket(lengths: list[int]) -> None:
    asked = batch(lengths)
    bucket = Sizes(TOKENS[-1], 512).of(asked)
    if bucket is None:
        return
    bucketed = padded(asked, bucket)
    assert len(bucketed) == bucket.sequences
    assert len(bucketed.input_ids) == len(bucketed.position_ids) == bucketed.cu_seqlens[-1] == bucket.tokens
    np.testing.assert_array_equal(bucketed.input_ids[: len(asked.input_ids)], asked.input_ids)
    np.testing.assert_array_equal(bucketed.position_ids[: len(asked.input_ids)], asked.position_ids)
    np.testing.assert_array_equal(bucketed.cu_seqlens[: len(asked) + 1], asked.cu_seqlens)
    if asked.adapter_ids is not None:
        assert bucketed.adapter_ids is not None
        assert len(bucketed.adapter_ids) == bucket.tokens
        np.testing.assert_array_equal(bucketed.adapter_ids[: len(asked.input_ids)], asked.adapter_ids)
    assert (bucketed.lengths >= 0).all()
    assert bucketed.max_seqlen <= bucket.longest
    assert set(bucketed.position_ids) <= set(asked.position_ids)


def test_a_batch_that_fills_its_bucket_gets_empty_sequences_only() -> None:
    asked = batch([60, 4])
    bucketed = padded(asked, Bucket(64, 4, 64))
    assert bucketed.lengths.tolist() == [60, 4, 0, 0]


@pytest.mark.parametrize("lengths", [[5], [64], [1] * 64, [128] * 16])
def test_few_sizes_for_likely_batches(lengths: list[int]) -> None:
    assert Sizes(2048, 512).of(batch(lengths)) is not None


def test_what_is_too_large_or_has_unseen_tokens_has_no_bucket() -> None:
    assert Sizes(2048, 512).of(batch([512] * 5)) is None
    assert Sizes(64, 512).of(batch([65])) is None
    assert Sizes(0, 512).of(batch([1])) is None
    assert Sizes(2048, 64).of(batch([65])) is None
    expanded = pack([Encoding(np.arange(5, 9), unseen=2)], frozenset(), Positions())
    assert Sizes(2048, 512).of(expanded) is None


def test_the_heavier_a_layer_the_smaller_the_buckets() -> None:
    bert_base, eight_billion = sizes(7_077_888, 512), sizes(193_000_000, 8192)
    assert bert_base.tokens == TOKENS[-1]
    assert 64 <= eight_billion.tokens < 256
    assert sizes(10**12, 512).tokens == 0
    assert sizes(0, 512).tokens == TOKENS[-1]


def states(trunk: PackedTrunk, asked: PackedBatch, bound: int | None = None) -> np.ndarray:
    with torch.inference_mode():
        return trunk.run(trunk.place(asked), trunk.layout(asked, bound=bound)).numpy()


@pytest.mark.parametrize("model_type", sorted(tiny.FAMILIES.keys() - tiny.BIASED))
def test_padding_changes_no_text(tmp_path: Path, model_type: str) -> None:
    backend = TorchBackend(read_spec(tiny.write_family(tmp_path, model_type), pooling="mean"))
    spec = backend.spec
    for lengths in ([7], [1, 30, 2, 19], [64], [100, 3, 61]):
        asked = batch(lengths, spec.positions, spec.vocab_size)
        bucket = sizes(1000, spec.max_input_length).of(asked)
        assert bucket is not None
        bucketed = padded(asked, bucket)
        found = states(backend.trunk, bucketed, bucket.longest)[: len(asked.input_ids)]
        expected = states(backend.trunk, asked)
        np.testing.assert_allclose(found, expected, atol=tolerances.HIDDEN["float32"], rtol=0)
        for start, end in zip(asked.cu_seqlens, asked.cu_seqlens[1:], strict=False):
            ours, theirs = (rows[start:end].mean(0) for rows in (found, expected))
            np.testing.assert_allclose(
                ours / np.linalg.norm(ours), theirs / np.linalg.norm(theirs), atol=tolerances.UNIT["float32"], rtol=0
            )
