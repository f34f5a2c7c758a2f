"""Which kernel, from facts alone; always one, always with a reason. It is tried before it is used: one that cannot run here, or
computes something else, is passed over."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch import attention
from hybridtei.backends.torch.attention import (
    ALL,
    CAUSAL,
    FLASH_3,
    GROUPED,
    PADDED,
    PER_SEQUENCE,
    TORCH_VARLEN,
    WINDOW,
    Choice,
    Facts,
    choices,
    facts_of,
    kernel_for,
    trial,
    why_not,
)
from hybridtei.backends.torch.kernels import Kernel, Sequences, padded_groups, per_sequence
from hybridtei.backends.torch.load import load_family
from hybridtei.backends.torch.ops import AttentionForm
from hybridtei.checkpoint.spec import read_spec
from tests import tiny

CPU = torch.device("cpu")
ALL_NEEDED = Facts("cpu", "float32", 8, needs=ALL)


def forms(folder: Path, model_type: str, **settings) -> frozenset[AttentionForm]:
    spec = read_spec(tiny.write_family(folder, model_type, **settings), pooling="mean")
    return load_family(spec, torch.float32, CPU)[0].forms


@pytest.mark.parametrize(
    ("model_type", "needs"),
    [
        ("bert", set()),
        ("modernbert", {WINDOW}),
        ("qwen3", {CAUSAL, GROUPED}),
        ("mistral", {CAUSAL, GROUPED, WINDOW}),
        ("eurobert", {GROUPED}),
    ],
)
def test_what_a_family_asks_of_a_kernel(tmp_path: Path, model_type: str, needs: set[str]) -> None:
    found = facts_of(forms(tmp_path, model_type), torch.float16, CPU)
    assert (found.device, found.dtype, found.head_dim, found.needs) == ("cpu", "float16", 8, needs)


@pytest.mark.parametrize("kernel", [per_sequence, padded_groups])
def test_a_right_kernel_passes(kernel: Kernel) -> None:
    assert trial(kernel, ALL_NEEDED, CPU) is None


def test_a_wrong_kernel_is_found_out_by_what_it_gets_wrong() -> None:
    def blind_to_windows(q, k, v, sequences, *, scale, window, causal):
        return per_sequence(q, k, v, sequences, scale=scale, window=None, causal=causal)

    def blind_to_ends(q, k, v, sequences, *, scale, window, causal):
        one = Sequences([sum(sequences.lengths)], sequences.offsets)
        return per_sequence(q, k, v, one, scale=scale, window=window, causal=causal)

    def nothing(q, k, v, sequences, *, scale, window, causal):
        return torch.full_like(q, torch.nan)

    assert "window of 8" in (trial(blind_to_windows, ALL_NEEDED, CPU) or "")
    assert trial(blind_to_windows, Facts("cpu", "float32", 8), CPU) is None  # nobody needs them
    assert "differs from SDPA" in (trial(blind_to_ends, Facts("cpu", "float32", 8), CPU) or "")
    assert "nan" in (trial(nothing, Facts("cpu", "float32", 8), CPU) or "")


def test_what_cannot_run_here_is_passed_over_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Facts of a card with everything installed: one does not load, one is wrong, and the last resort is taken."""
    loaded = forms(tmp_path, "bert")

    def broken() -> Kernel:
        raise RuntimeError("no kernel image is available for execution on the device")

    monkeypatch.setattr(attention, "facts_of", lambda *_: facts(head_dim=8))
    openers = {**attention.OPENERS, FLASH_3: broken, TORCH_VARLEN: lambda: lambda q, *_, **__: 0 * q}
    monkeypatch.setattr(attention, "OPENERS", openers)
    caplog.clear()  # of what opening the model said, where an earlier test has set the level
    with caplog.at_level(logging.INFO, "hybridtei.backends.torch.attention"):
        assert kernel_for(loaded, torch.float16, CPU)[1] is padded_groups
        monkeypatch.setattr(attention, "OPENERS", {**openers, TORCH_VARLEN: lambda: per_sequence})
        assert kernel_for(loaded, torch.float16, CPU)[1] is per_sequence
    told = [record.getMessage() for record in caplog.records]
    assert "flash-attn 3 is refused, the next is tried: RuntimeError: no kernel image" in told[0]
    assert "torch varlen_attn is refused, the next is tried: it differs from SDPA" in told[1]
    assert told[2].startswith("attention by SDPA on padded groups:")
    assert told[4].startswith("attention by torch varlen_attn:")


HOPPER, AMPERE, TURING, BLACKWELL = (9, 0), (8, 6), (7, 5), (10, 0)


def facts(capability: tuple[int, int] | None = HOPPER, dtype: str = "float16", head_dim: int = 64, **changes) -> Facts:
    return Facts("cuda", dtype, head_dim, capability, **{"has_flash_3": True, **changes})


def names(found: list[Choice]) -> list[str]:
    return [one.name for one in found]


def test_on_a_cpu_each_sequence_by_itself_and_nothing_else() -> None:
    (only,) = choices(Facts("cpu", "float32", 64, has_flash_3=True))
    assert only.name == PER_SEQUENCE
    assert "padding" in only.why


def test_the_order_where_everything_may() -> None:
    assert names(choices(facts())) == [FLASH_3, TORCH_VARLEN, PADDED]
    assert names(choices(facts(BLACKWELL))) == names(choices(facts(AMPERE))) == [TORCH_VARLEN, PADDED]


@pytest.mark.parametrize(
    ("given", "first", "why"),
    [
        (facts(has_flash_3=False), TORCH_VARLEN, "flash-attn 3: not installed"),
        (facts(AMPERE), TORCH_VARLEN, "flash-attn 3: needs compute capability 9.0 to 9.9, this device has 8.6"),
        (facts(BLACKWELL), TORCH_VARLEN, "flash-attn 3: needs compute capability 9.0 to 9.9, this device has 10.0"),
        (facts(dtype="float32"), PADDED, "not float32"),
        (facts(TURING), PADDED, "needs compute capability 8.0 to 99.9, this device has 7.5"),
        (facts(head_dim=60), PADDED, "not 60"),
        (facts(head_dim=512), PADDED, "not 512"),
    ],
)
def test_what_refuses_a_kernel_is_told(given: Facts, first: str, why: str) -> None:
    found = choices(given)[0]
    assert found.name == first
    assert why in found.why


@given(
    st.sampled_from(["cuda", "cpu", "mps"]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 600),
    st.one_of(st.none(), st.tuples(st.integers(5, 12), st.integers(0, 9))),
    st.booleans(),
)
def test_there_is_always_one_that_runs_anywhere_and_a_reason(device, dtype, head_dim, capability, installed) -> None:
    given = Facts(device, dtype, head_dim, capability, installed)
    found = choices(given)
    assert found[-1].name in (PADDED, PER_SEQUENCE)
    assert all(one.why for one in found)
    for one in found[:-1]:
        assert why_not(one.name, given) is None
        assert installed or one.name != FLASH_3
        assert dtype != "float32"


def test_torchs_own_kernel_takes_what_layers_ask_of_it() -> None:
    from torch.nn.attention.varlen import varlen_attn

    assert {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys()
