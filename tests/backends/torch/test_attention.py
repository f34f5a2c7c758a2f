"""A kernel is tried before it is used: one that cannot run here, or computes something else, is passed over."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from hybridtei.backends.torch import attention, choice
from hybridtei.backends.torch.attention import facts_of, kernel_for, trial
from hybridtei.backends.torch.choice import ALL, CAUSAL, GROUPED, WINDOW, Facts
from hybridtei.backends.torch.load import load_family
from hybridtei.backends.torch.ops import AttentionForm
from hybridtei.backends.torch.sdpa import padded_groups, per_sequence
from hybridtei.backends.torch.sequences import Kernel
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
    card = Facts("cuda", "float16", 8, (9, 0), {choice.FLASH_2: ALL, choice.FLASH_4: ALL, choice.TORCH_VARLEN: ALL})

    def broken() -> Kernel:
        raise RuntimeError("no kernel image is available for execution on the device")

    openers = {**attention.OPENERS, choice.FLASH_2: broken, choice.FLASH_4: lambda: lambda q, *_, **__: 0 * q}
    monkeypatch.setattr(attention, "facts_of", lambda *_: card)
    monkeypatch.setattr(attention, "OPENERS", {**openers, choice.TORCH_VARLEN: lambda: padded_groups})
    caplog.clear()
    with caplog.at_level(logging.INFO, "hybridtei.backends.torch.attention"):
        assert kernel_for(loaded, torch.float16, CPU)[1] is padded_groups
    told = [record.getMessage() for record in caplog.records]
    assert "flash-attn 2 is refused, the next is tried: RuntimeError: no kernel image" in told[0]
    assert "flash-attn 4 is refused" in told[1]
    assert told[2].startswith("attention by torch varlen_attn:")


def test_the_last_resort_is_not_tried_but_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = forms(tmp_path, "bert")
    monkeypatch.setattr(attention, "facts_of", lambda *_: Facts("cuda", "float32", 8, (9, 0)))
    found, kernel = kernel_for(loaded, torch.float32, CPU)
    assert (found.name, kernel) == (choice.PADDED, padded_groups)
    assert "not float32" in found.why or "not installed" in found.why
