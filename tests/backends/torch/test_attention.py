"""Which kernel, from facts alone; always one, always with a reason. It is tried before it is used: one that cannot run here, or
computes something else, is passed over."""

from __future__ import annotations

import logging
from importlib import metadata
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch import attention
from hybridtei.backends.torch.attention import (
    ALL,
    CAUSAL,
    FLASH_2,
    FLASH_3,
    FLASH_4,
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
    present,
    trial,
    why_not,
)
from hybridtei.backends.torch.kernels import Kernel, padded_groups, per_sequence
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
        one = attention._sequences(CPU)
        one.lengths = [sum(sequences.lengths)]
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
    """Facts of a card with everything installed; of the packages, one does not load and one is wrong."""
    loaded = forms(tmp_path, "bert")
    card = Facts("cuda", "float16", 8, (9, 0), {attention.FLASH_2: ALL, attention.FLASH_4: ALL, attention.TORCH_VARLEN: ALL})

    def broken() -> Kernel:
        raise RuntimeError("no kernel image is available for execution on the device")

    openers = {**attention.OPENERS, attention.FLASH_2: broken, attention.FLASH_4: lambda: lambda q, *_, **__: 0 * q}
    monkeypatch.setattr(attention, "facts_of", lambda *_: card)
    monkeypatch.setattr(attention, "OPENERS", {**openers, attention.TORCH_VARLEN: lambda: padded_groups})
    caplog.clear()
    with caplog.at_level(logging.INFO, "hybridtei.backends.torch.attention"):
        assert kernel_for(loaded, torch.float16, CPU)[1] is padded_groups
    told = [record.getMessage() for record in caplog.records]
    assert "flash-attn 4 is refused" in told[0]
    assert "flash-attn 2 is refused, the next is tried: RuntimeError: no kernel image" in told[1]
    assert told[2].startswith("attention by torch varlen_attn:")


def test_the_last_resort_is_not_tried_but_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = forms(tmp_path, "bert")
    monkeypatch.setattr(attention, "facts_of", lambda *_: Facts("cuda", "float32", 8, (9, 0)))
    found, kernel = kernel_for(loaded, torch.float32, CPU)
    assert (found.name, kernel) == (attention.PADDED, padded_groups)
    assert "not float32" in found.why or "not installed" in found.why


EVERYTHING = {FLASH_2: ALL, FLASH_3: ALL, FLASH_4: ALL, TORCH_VARLEN: ALL}
HOPPER, AMPERE, TURING, BLACKWELL = (9, 0), (8, 6), (7, 5), (10, 0)


def facts(capability: tuple[int, int] | None = HOPPER, dtype: str = "float16", head_dim: int = 64, **changes) -> Facts:
    return Facts("cuda", dtype, head_dim, capability, **{"present": EVERYTHING, **changes})


def names(found: list[Choice]) -> list[str]:
    return [one.name for one in found]


def test_on_a_cpu_each_sequence_by_itself_and_nothing_else() -> None:
    (only,) = choices(Facts("cpu", "float32", 64, present=EVERYTHING))
    assert only.name == PER_SEQUENCE
    assert "padding" in only.why


def test_the_order_where_everything_may() -> None:
    assert names(choices(facts())) == [FLASH_3, FLASH_4, FLASH_2, TORCH_VARLEN, PADDED]
    assert names(choices(facts(BLACKWELL))) == [FLASH_4, FLASH_2, TORCH_VARLEN, PADDED]
    assert names(choices(facts(AMPERE))) == [FLASH_2, TORCH_VARLEN, PADDED]


@pytest.mark.parametrize(
    ("given", "first", "why"),
    [
        (facts(present={TORCH_VARLEN: ALL}), TORCH_VARLEN, "flash-attn 4: not installed; flash-attn 2: not installed"),
        (facts(present={FLASH_4: ALL}), FLASH_4, "flash-attn 3: not installed"),
        (facts(AMPERE), FLASH_2, "flash-attn 4: needs compute capability 9.0, this device has 8.6"),
        (facts(BLACKWELL), FLASH_4, "flash-attn 3: needs compute capability 9.0 to 9.9, this device has 10.0"),
        (facts(present={}), PADDED, "torch varlen_attn: this torch has none"),
        (facts(dtype="float32"), PADDED, "not float32"),
        (facts(TURING), PADDED, "needs compute capability 8.0, this device has 7.5"),
        (facts(head_dim=60), PADDED, "not 60"),
        (facts(head_dim=512), PADDED, "not 512"),
        (facts(BLACKWELL, head_dim=160, present={FLASH_4: ALL, TORCH_VARLEN: ALL}), TORCH_VARLEN, "up to 128, not 160"),
        (facts(present={TORCH_VARLEN: ALL - {WINDOW}}, needs=frozenset({WINDOW})), PADDED, "has no windows"),
    ],
)
def test_what_refuses_a_kernel_is_told(given: Facts, first: str, why: str) -> None:
    found = choices(given)[0]
    assert found.name == first
    assert why in found.why


def test_what_is_not_needed_may_be_lacking() -> None:
    given = facts(present={TORCH_VARLEN: ALL - {WINDOW}}, needs=frozenset({CAUSAL}))
    assert choices(given)[0].name == TORCH_VARLEN


@given(
    st.sampled_from(["cuda", "cpu", "mps"]),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1, 600),
    st.one_of(st.none(), st.tuples(st.integers(5, 12), st.integers(0, 9))),
    st.dictionaries(st.sampled_from([FLASH_2, FLASH_3, FLASH_4, TORCH_VARLEN]), st.frozensets(st.sampled_from(sorted(ALL)))),
    st.frozensets(st.sampled_from(sorted(ALL))),
)
def test_there_is_always_one_that_runs_anywhere_and_a_reason(device, dtype, head_dim, capability, installed, needs) -> None:
    given = Facts(device, dtype, head_dim, capability, installed, needs)
    found = choices(given)
    assert found[-1].name in (PADDED, PER_SEQUENCE)
    assert all(one.why for one in found)
    for one in found[:-1]:
        assert why_not(one.name, given) is None
        assert one.name in installed
        assert needs <= installed[one.name]
        assert dtype != "float32"


def test_installed_packages_are_told_apart_by_their_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "flash-attn-4":
            return "4.0"
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(attention.metadata, "version", version)
    monkeypatch.setattr(attention, "find_spec", lambda name: object() if name == "flash_attn" else None)
    assert {*present()} == {FLASH_4, TORCH_VARLEN}
    monkeypatch.setattr(attention, "find_spec", lambda name: object() if name == "flash_attn_interface" else None)
    assert {*present()} == {FLASH_3, TORCH_VARLEN}


def test_this_torch_has_a_kernel_of_its_own_that_takes_everything() -> None:
    assert present()[TORCH_VARLEN] == ALL


def test_the_first_of_torchs_kernels_took_no_scale_and_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None) -> None: ...

    monkeypatch.setattr(varlen, "varlen_attn", of_2_10)
    assert TORCH_VARLEN not in present()
