"""A causal model computes the common prefix of a request's texts once, and this changes no
output."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.families.oracle import open_engine
from conformance.small import tiny, tolerances
from hybridtei.batch import (
    MIN_SHARED,
    Encoding,
    Head,
    Positions,
    computed_once,
    pack,
    with_shared_prefix,
)
from hybridtei.encoder import Encoder
from hybridtei.inference.backends.graph.host import end_to_end
from hybridtei.inference.backends.torch.kernels import padded_groups, per_sequence
from hybridtei.inference.backends.torch.layout import PackedLayout
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.models.families.ops import Heads
from tests.near import near, same
from tests.sampled import paired

TOKENS = frozenset({Head.TOKENS})
PREFIX = 20
CAUSAL = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma3_text": {"sliding_window": 7},
}
lengths = st.lists(st.integers(1, 9), min_size=2, max_size=6)


def encodings(own, prefix=PREFIX):
    """Encodings with these numbers of tokens after a common prefix."""
    return [
        Encoding(
            np.concatenate([np.arange(5, 5 + prefix), 5 + (7 * i + np.arange(n)) % 40]).astype(
                np.int64
            )
        )
        for i, n in enumerate(own)
    ]


@given(lengths, st.integers(0, 40))
def test_texts_share_what_all_of_them_begin_with_and_keep_a_token_of_their_own(own, prefix):
    texts = encodings(own, prefix)
    found = {one.shared for one in with_shared_prefix(texts)}
    ids = [one.input_ids.tolist() for one in texts]
    common = 0
    while all(len(one) > common + 1 for one in ids) and len({one[common] for one in ids}) == 1:
        common += 1
    assert found == {common if common >= MIN_SHARED else 0}


def test_typed_and_expanded_texts_and_a_text_alone_share_nothing():
    for texts in (
        encodings([3]),
        [Encoding(one.input_ids, np.zeros_like(one.input_ids)) for one in encodings([3, 4])],
        [Encoding(one.input_ids, unseen=2) for one in encodings([3, 4])],
    ):
        assert all(not one.shared for one in with_shared_prefix(texts))


@given(lengths)
def test_a_prefix_is_computed_once(own):
    batch, fed = pack(encodings(own), TOKENS, Positions(), PREFIX), []
    once = computed_once(batch)
    assert len(once.computed) == PREFIX + sum(own)
    for values in (batch.input_ids, batch.position_ids):
        same(values[once.computed][once.rows], values)

    def run(feed):
        fed.append(feed)
        return feed["input_ids"][:, None].astype(np.float32)

    states = end_to_end(batch, frozenset({"position_ids", "queries"}), run)
    same(states[:, 0], batch.input_ids)
    (feed,) = fed
    assert len(feed["input_ids"]) == PREFIX + sum(own)


@pytest.mark.parametrize(("family", "name"), paired([*CAUSAL], ["ort", "openvino", "torch"]))
def test_states_are_those_of_whole_texts(tmp_path, family, name):
    tiny.write_family(tmp_path, family, **CAUSAL[family])
    tiny.write_own_heads(tmp_path)
    spec = read_spec(tmp_path, pooling="last-token")
    backend = open_engine(name, spec)
    assert backend.shares_prefixes
    texts, heads = (
        encodings([3, 30, 1, 7]),
        spec.heads & {Head.TOKENS, Head.DENSE, Head.MULTIVECTOR},
    )
    shared = backend.forward(pack(texts, heads, spec.positions, PREFIX))
    whole = backend.forward(pack(texts, heads, spec.positions))
    tolerance = tolerances.HIDDEN["float32"]
    near(shared.dense, whole.dense, tolerance)
    for one, other in ((shared.tokens, whole.tokens), (shared.multivector, whole.multivector)):
        same(one.offsets, other.offsets)
        near(one.values, other.values, tolerance)


@pytest.mark.parametrize("window", [None, 6])
def test_kernels_that_know_of_no_prefix_get_whole_texts(window):
    batch, draw = (
        pack(encodings([3, 9, 1]), TOKENS, Positions(), PREFIX),
        torch.Generator().manual_seed(0),
    )
    once = computed_once(batch)
    q, k, v = (torch.randn(len(once.computed), heads, 8, generator=draw) for heads in (4, 2, 2))
    form = Heads(4, 2, 8, factor=0.3, causal=True, window=window)
    kept, rows = torch.as_tensor(once.computed), torch.as_tensor(once.rows)
    found = []
    for kernel in (padded_groups, per_sequence):
        layout = PackedLayout(batch.cu_seqlens, kernel=kernel)
        layout.once = kept, rows
        found.append(layout.attend(q, k, v, form))
    whole = PackedLayout(batch.cu_seqlens).attend(q[rows], k[rows], v[rows], form)
    for one in found:
        near(one[rows], whole, 1e-6)


@pytest.mark.parametrize("name", ["ort", "openvino", "torch"])
def test_a_family_that_sees_both_ways_shares_nothing(tmp_path, name):
    spec = tiny.family_spec(tmp_path, "bert")
    assert not open_engine(name, spec).shares_prefixes


def test_instructed_texts_have_the_vectors_that_they_have_alone(tmp_path):
    tiny.write_family(tmp_path, "qwen3")
    encoder = Encoder.load(tmp_path, pooling="last-token")
    texts = [f"{'bake lolo ' * MIN_SHARED}{own}" for own in ("mo", "naku ba", "bulo bulo bulo")]
    together = encoder.encode(texts).dense
    before = encoder.forwards
    for text, row in zip(texts, together, strict=True):
        near(encoder.encode(text).dense[0], row, tolerances.UNIT["float32"])
    assert encoder.forwards - before == len(texts)
