"""How many tokens a pass gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.inference.backends.base import FEWEST, MOST, busy_tokens, gpu_tokens


@pytest.mark.parametrize(("width", "tokens"), [(32, 512), (512, 512), (768, 256), (2048, 128)])
def test_a_core_is_given_the_tokens_that_the_table_asks_for(width, tokens):
    assert busy_tokens(width) == tokens
    assert busy_tokens(width, cores=4) == 4 * tokens
    assert busy_tokens(width, limit=256) == min(tokens, 256)


@given(st.integers(0, 200_000))
def test_wider_models_are_given_fewer_tokens_within_bounds(width):
    assert FEWEST <= busy_tokens(width + 1) <= busy_tokens(width) <= MOST
    assert busy_tokens(width).bit_count() == 1


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [
        (10_600_000, 32_768),
        (86_000_000, 16_384),
        (303_000_000, 4_096),
        (440_000_000, 4_096),
        (6_950_000_000, 2_048),
        (0, 32_768),
    ],
    ids=["MiniLM", "BERT-base", "BGE-M3", "Qwen3-0.6B", "Qwen3-8B", "no layers"],
)
def test_a_gpus_pass_has_fewer_tokens_for_a_larger_model(parameters, tokens):
    assert gpu_tokens(parameters) == tokens
