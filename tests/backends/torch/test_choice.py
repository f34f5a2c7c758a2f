"""Which kernel, from facts alone; always one, always with a reason."""

from __future__ import annotations

from importlib import metadata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.backends.torch import choice
from hybridtei.backends.torch.choice import (
    ALL,
    CAUSAL,
    FLASH_2,
    FLASH_4,
    PADDED,
    PER_SEQUENCE,
    TORCH_VARLEN,
    WINDOW,
    Choice,
    Facts,
    choices,
    present,
    why_not,
)

EVERYTHING = {FLASH_2: ALL, FLASH_4: ALL, TORCH_VARLEN: ALL}
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
    assert names(choices(facts())) == [FLASH_2, FLASH_4, TORCH_VARLEN, PADDED]
    assert names(choices(facts(AMPERE))) == [FLASH_2, FLASH_4, TORCH_VARLEN, PADDED]


@pytest.mark.parametrize(
    ("given", "first", "why"),
    [
        (facts(present={TORCH_VARLEN: ALL}), TORCH_VARLEN, "flash-attn 2: not installed; flash-attn 4: not installed"),
        (facts(present={FLASH_4: ALL}), FLASH_4, "flash-attn 2: not installed"),
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
    st.dictionaries(st.sampled_from([FLASH_2, FLASH_4, TORCH_VARLEN]), st.frozensets(st.sampled_from(sorted(ALL)))),
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

    monkeypatch.setattr(choice.metadata, "version", version)
    monkeypatch.setattr(choice, "find_spec", lambda _: object())
    assert FLASH_4 in present()
    assert FLASH_2 not in present()


def test_this_torch_has_a_kernel_of_its_own_that_takes_everything() -> None:
    assert present()[TORCH_VARLEN] == ALL


def test_the_first_of_torchs_kernels_took_no_scale_and_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    def of_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None) -> None: ...

    monkeypatch.setattr(varlen, "varlen_attn", of_2_10)
    assert TORCH_VARLEN not in present()
