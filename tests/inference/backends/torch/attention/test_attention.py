"""Which kernel computes attention, by the device, the precision and the layers' heads."""

from types import SimpleNamespace

import pytest
import torch

from hybridtei.inference.backends.torch.kernels import FLASH, PADDED, PER_SEQUENCE, kernel_for
from hybridtei.models.families.ops import Heads

PLAIN = Heads(4, 4, 64), False
GROUPED = Heads(4, 2, 256, causal=True, window=4096), False
AMPERE, TURING = (8, 0), (7, 5)


@pytest.mark.parametrize(
    ("card", "dtype", "forms", "name"),
    [
        (None, torch.float32, [PLAIN], PER_SEQUENCE),
        (AMPERE, torch.float16, [PLAIN, GROUPED], FLASH),
        ((12, 0), torch.bfloat16, [PLAIN], FLASH),
        (TURING, torch.float16, [PLAIN], PADDED),
        (AMPERE, torch.float32, [PLAIN], PADDED),
        (AMPERE, torch.float16, [PLAIN, (Heads(4, 4, 12), False)], PADDED),
        (AMPERE, torch.float16, [(Heads(4, 4, 264), False)], PADDED),
        (AMPERE, torch.float16, [(Heads(4, 4, 64), True)], PADDED),
    ],
)
def test_the_kernel_follows_from_the_card_the_precision_and_the_heads(
    monkeypatch, card, dtype, forms, name
):
    """A card whose capability alone is asked for."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: card)
    assert kernel_for(forms, dtype, SimpleNamespace(type="cuda" if card else "cpu")) == name


def test_torchs_own_kernel_takes_what_layers_ask_of_it():
    """Its schema, in the words of `flash`."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = [argument.name for argument in schema.arguments]
    assert names[3:10] == [
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
    ]
    assert {"scale", "window_size_left", "window_size_right"} <= {*names}
