"""Sums of a traced family inside products, for GPUs, where a launch costs more than a query's
arithmetic.

A product that is added to rows is summed into them by its own kernel. Its bias, for which that
kernel has no place, moves into the norm that made the rows, and out of the products that read them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional


def added(
    rows: Tensor,
    weight: Tensor,
    x: Tensor,
) -> Tensor:
    """Add the product of rows and a matrix to `x`, in place."""
    return x.addmm_(rows, weight.t())


# Functions whose result shares memory with no other value
FRESH = (operator.mul, operator.add, added, functional.embedding, functional.layer_norm)


def sum_inside(model: fx.GraphModule) -> None:
    """Change a traced family as above, where nothing reads the rows later. Its results change in
    the last digits."""
    for node in model.graph.nodes:
        if node.target is not operator.add:
            continue
        for product, x in (node.args, node.args[::-1]):
            readers = [reader for reader in getattr(x, "users", ()) if reader is not node]
            is_last = all(reader < node for reader in readers)
            if not (is_product(product) and is_last and x.target in FRESH):
                continue
            rows, weight, bias = product.args
            if bias is None or _move(model, bias, x, readers):
                node.target, node.args = added, (rows, weight, x)
                model.graph.erase_node(product)
                break
    model.recompile()


def is_product(node: Any) -> bool:
    """True for a node that multiplies rows by a matrix of the checkpoint."""
    is_linear = isinstance(node, fx.Node) and node.target is functional.linear
    return is_linear and node.args[1].op == "get_attr"


def _move(
    model: fx.GraphModule,
    bias: Any,
    x: Any,
    readers: Sequence[Any],
) -> bool:
    """Move a bias into the norm that made `x`. False if `x` is made otherwise, or read by others
    than products with a bias."""
    shift = x.kwargs.get("bias")
    if shift is None or not all(is_product(reader) and reader.args[2] for reader in readers):
        return False
    moved = getattr(model, bias.target).float()
    changes = {shift.target: moved}
    for _, weight, own in (reader.args for reader in readers):
        changes[own.target] = -getattr(model, weight.target).float() @ moved
    for name, change in changes.items():
        value = getattr(model, name)
        value = (value.float() + change).to(value.dtype)
        setattr(model, name, nn.Parameter(value, requires_grad=False))
    return True
