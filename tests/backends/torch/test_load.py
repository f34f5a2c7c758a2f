"""Layers of heads as tensors, in the trunk's precision. What files hold and what is refused: checkpoint/test_layers.py."""

from __future__ import annotations

from pathlib import Path

import torch

from hybridtei.backends.torch.load import dense_layer, lexical_weights, multivector_weights
from hybridtei.checkpoint.heads import find_multivector_head, find_sparse_head
from hybridtei.checkpoint.modules import DenseModule
from tests import tiny

CPU = torch.device("cpu")
F32 = torch.float32


def test_a_linear_head_comes_in_the_trunks_precision(tmp_path: Path) -> None:
    tiny.write_linear(tmp_path / "sparse_linear.pt", 1)
    tiny.write_linear(tmp_path / "colbert_linear.pt", 5)
    sparse, many = find_sparse_head(tmp_path, tiny.HIDDEN), find_multivector_head(tmp_path, tiny.HIDDEN)
    assert sparse is not None
    assert many is not None
    weights = lexical_weights(sparse, tiny.HIDDEN, torch.bfloat16, CPU)
    matrix, bias = multivector_weights(many, tiny.HIDDEN, torch.bfloat16, CPU)
    assert (weights.out_weight.shape, weights.hidden_weight, matrix.shape) == ((1, tiny.HIDDEN), None, (5, tiny.HIDDEN))
    assert bias is not None
    assert {weights.out_weight.dtype, weights.out_bias.dtype, matrix.dtype, bias.dtype} == {torch.bfloat16}


def test_our_own_file_holds_both_heads(tmp_path: Path) -> None:
    written = tiny.write_own_heads(tmp_path)
    sparse, many = find_sparse_head(tmp_path, tiny.HIDDEN), find_multivector_head(tmp_path, tiny.HIDDEN)
    assert sparse is not None
    assert many is not None
    weights = lexical_weights(sparse, tiny.HIDDEN, F32, CPU)
    assert weights.hidden_weight is not None
    assert torch.equal(weights.hidden_weight, written["sparse.hidden.weight"])
    assert torch.equal(weights.out_bias, written["sparse.out.bias"])
    matrix, bias = multivector_weights(many, tiny.HIDDEN, F32, CPU)
    assert torch.equal(matrix, written["multivector.weight"])
    assert bias is None


def test_a_dense_layer_has_its_bias_where_it_says_so(tmp_path: Path) -> None:
    tiny.write_dense(tmp_path, 4, 3)
    for bias in (True, False):
        layer = dense_layer(DenseModule(tmp_path, 4, 3, bias, "torch.nn.modules.activation.Tanh"), CPU)
        assert (layer.weight.shape, layer.bias is not None) == ((3, 4), bias)
