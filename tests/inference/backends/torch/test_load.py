"""Layers of heads as tensors, each in its precision. What files hold and what is refused:
checkpoint/test_layers.py."""

import torch

from conformance.small import tiny
from hybridtei.inference.backends.torch.load import load
from hybridtei.models.checkpoint.spec import read_spec


def test_what_reads_tokens_comes_in_the_trunks_precision_and_the_rest_exactly(
    tmp_path,
):
    folder = tiny.write_m3(tmp_path)
    tiny.write_modules(
        folder, pooling=["mean"], dense=[(tiny.HIDDEN, 4, "torch.nn.modules.activation.Tanh")]
    )
    _, heads = load(
        read_spec(folder), dtype=torch.bfloat16, device=torch.device("cpu"), trust_remote_code=False
    )
    layers = {"exact": heads.dense, "half": [*heads.lexical, *heads.multivector]}
    found = {
        name: {one.weight.dtype for one in some} | {one.bias.dtype for one in some}
        for name, some in layers.items()
    }
    assert found == {"exact": {torch.float32}, "half": {torch.bfloat16}}
