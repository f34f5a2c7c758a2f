"""Which kernel computes attention. It is tried before it is used: one that cannot run, or is wrong, is refused."""

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hybridtei.inference.backends.torch import kernels
from hybridtei.inference.backends.torch.kernels import (
    PER_SEQUENCE,
    VARLEN,
    Kernel,
    Sequences,
    fault_of,
    kernel_for,
    padded_groups,
    per_sequence,
    trial,
)
from hybridtei.models.families.ops import Heads

CPU = torch.device("cpu")
PLAIN = Heads(4, 4, 8), False
WINDOWED = Heads(4, 4, 8, window=128), False
ALL = [PLAIN, WINDOWED, (Heads(4, 2, 8, causal=True, window=4096), False)]


@pytest.mark.parametrize("kernel", [per_sequence, padded_groups])
def test_a_right_kernel_passes(kernel: Kernel) -> None:
    assert trial(kernel, ALL, torch.float32, CPU) is None


def blind_to_windows(q, k, v, sequences, *, scale, window, causal):
    return per_sequence(q, k, v, sequences, scale=scale, window=None, causal=causal)


def blind_to_causality(q, k, v, sequences, *, scale, window, causal):
    return per_sequence(q, k, v, sequences, scale=scale, window=window, causal=False)


def blind_to_ends(q, k, v, sequences, *, scale, window, causal):
    return per_sequence(
        q,
        k,
        v,
        Sequences([sum(sequences.lengths)], sequences.offsets),
        scale=scale,
        window=window,
        causal=causal,
    )


def nothing(q, k, v, sequences, *, scale, window, causal):
    return torch.full_like(q, torch.nan)


def refusing(q, k, v, sequences, *, scale, window, causal):
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (blind_to_windows, "with a window of 8"),
        (blind_to_causality, "causal: True"),
        (blind_to_ends, "differs from SDPA"),
        (nothing, "nan"),
    ],
)
def test_a_wrong_kernel_is_found_out_by_what_it_gets_wrong(kernel: Kernel, fault: str) -> None:
    assert fault in (trial(kernel, ALL, torch.float32, CPU) or "")


def test_what_no_layer_asks_for_is_not_tried() -> None:
    assert trial(blind_to_windows, [PLAIN], torch.float32, CPU) is None


def test_on_a_cpu_each_sequence_by_itself() -> None:
    assert kernel_for(ALL, torch.float32, CPU) == (PER_SEQUENCE, per_sequence)


@pytest.mark.parametrize(
    ("kernel", "taken", "told"),
    [
        (per_sequence, per_sequence, "attention by torch varlen_attn"),
        (
            lambda q, *_, **__: 0 * q,
            padded_groups,
            "attention by torch varlen_attn is refused: it differs from SDPA",
        ),
        (refusing, padded_groups, "is refused: RuntimeError: no kernel image is available"),
    ],
)
def test_what_cannot_run_on_a_card_is_passed_over_with_a_reason(
    monkeypatch, caplog, kernel, taken, told
):
    """A card whose tensors lie on the CPU."""
    openers: dict[str, Callable[[], Kernel]] = {**kernels.OPENERS, VARLEN: lambda: kernel}
    monkeypatch.setattr(kernels, "OPENERS", openers)
    monkeypatch.setattr(
        kernels, "trial", lambda one, forms, dtype, _: trial(one, forms, dtype, CPU)
    )
    with caplog.at_level(logging.INFO, "hybridtei.inference.backends.torch.kernels"):
        assert kernel_for(ALL, torch.float16, SimpleNamespace(type="cuda"))[1] is taken
    assert told in caplog.text


def test_torchs_own_kernel_does_not_run_on_a_cpu_and_takes_what_layers_ask_of_it() -> None:
    from torch.nn.attention.varlen import varlen_attn

    assert "_flash_attention_forward" in (fault_of(VARLEN, [PLAIN], torch.float16, CPU) or "")
    assert {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys()
