"""`torch.compile` of what lies between the products of a packed pass and its attention, before the model serves.

A pass is cut where a matrix product or attention is: those stay the kernels that were chosen for them. What is left are a few
small functions, the same in every layer (add and norm, gated activation, norm and rotation, norm and quantisation in fp8), each
of several operations that move the same numbers again and again. Each becomes one kernel, compiled once for any number of
tokens. What was made is compared with the modules; whatever fails or differs leaves them there, with one line in the log.

Off unless on a GPU: on a CPU nearly all time goes into products. What is ready is never compiled again: a batch that it has no
code for (of one token) is computed as it was.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from hybridtei.backends.torch import fp8
from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.backends.torch.memory import is_out_of_memory
from hybridtei.backends.torch.trunk import Ids, PackedTrunk
from hybridtei.batch import PackedBatch

log = logging.getLogger(__name__)

# How far states may be from those of the modules themselves, relative to the largest: another order of sums, fewer roundings.
NEAR = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 0.1, "fp8": 0.3}
# The same kernels on the same numbers: what differs is at most the order of a sum.
SAME = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2, "fp8": 4e-2}
MAX_LETTERS = 300  # of a reason; compilers add pages
PRODUCTS = {functional.linear, functional.embedding, fp8.product, operator.matmul}
VIEWS = {"split", "unflatten", "flatten", operator.getitem}

Compiler = str | Callable[..., Any]


def compile_pass(
    trunk: PackedTrunk, probes: Sequence[PackedBatch], *, dtype: str, compiler: Compiler = "inductor"
) -> str | None:
    """Put compiled functions into a trunk's passes; why not, or None. `probes`: batches to compile with and to compare on, at
    least two, of several tokens each."""
    began = time.monotonic()
    try:
        with torch.inference_mode():
            model, pieces = cut(trunk.model)
            for piece in pieces:
                piece.compile_with(compiler, len(probes[0].input_ids))
            worst = _checked(trunk, model, probes, NEAR[dtype])
    except Exception as error:  # compilers, and the libraries they call, each raise their own kinds
        return _refused(error)
    trunk.instead = _guarded(trunk, model)
    log.info(
        "torch.compile: %d functions in %.0f s; states differ by %.2g from those of the modules, relative to the largest",
        *(len(pieces), time.monotonic() - began, worst),
    )
    return None


class Piece(nn.Module):
    """Operations of a pass between two products: rows float[t, ...] and parameters in, a tuple of tensors out."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        code = graph.python_code("self")
        space: dict[str, Any] = dict(code.globals)
        exec(code.src, space)  # a function of its own: torch keeps what it compiled by code object
        self._function: Callable[..., Any] = space["forward"]
        self._call = self._function

    def forward(self, *tensors: Tensor) -> Any:
        return self._call(None, *tensors)

    def compile_with(self, compiler: Compiler, tokens: int) -> None:
        """Compile at the first call, which is of so many tokens."""
        made = torch.compile(self._function, fullgraph=True, backend=compiler)

        def first(none: None, *tensors: Tensor) -> Any:
            for rows in tensors:
                if rows.shape[0] == tokens:
                    torch._dynamo.mark_dynamic(rows, 0)
            out = made(none, *tensors)
            self._call = torch._dynamo.run(self._function)  # uses what was compiled, and compiles no more
            return out

        self._call = first


def cut(model: fx.GraphModule) -> tuple[fx.GraphModule, list[Piece]]:
    """(the same pass with pieces in place of their operations, the pieces, each once however many layers have it)."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(model.graph, {}))
    found, made = fx.GraphModule(model, graph), dict[Any, Piece]()
    for run in _runs(found):
        _replace(found, run, made)
    found.recompile()
    return found.eval(), [*made.values()]


def _runs(model: fx.GraphModule) -> list[list[fx.Node]]:
    """Operations that follow each other without a product or attention between them, where that are two or more."""
    runs: list[list[fx.Node]] = [[]]
    for node in model.graph.nodes:
        if _stays(node):
            runs.append([])
        elif node.op != "get_attr":
            runs[-1].append(node)
    return [run for run in runs if sum(_cost(node) for node in run) > 1]


def _cost(node: fx.Node) -> int:
    """Kernels that an operation is, about."""
    return 4 if node.target is fp8.quantised else int(node.target not in VIEWS)


def _stays(node: fx.Node) -> bool:
    """Whether an operation is none of a piece: a product, attention, the batch and what is read of it."""
    if node.op in ("placeholder", "output", "call_module") or node.target in PRODUCTS:
        return True
    return any(isinstance(one, fx.Node) and one.op == "placeholder" for one in node.args)


def _replace(model: fx.GraphModule, run: Sequence[fx.Node], made: dict[Any, Piece]) -> None:
    inputs = [*dict.fromkeys(one for node in run for one in node.all_input_nodes if one not in run)]
    outputs = [node for node in run if any(user not in run for user in node.users)]
    graph, names = fx.Graph(), dict[fx.Node, fx.Node]()
    for place, one in enumerate(inputs):
        names[one] = graph.placeholder(f"x{place}")
    for place, node in enumerate(run):
        arguments = fx.map_arg((node.args, node.kwargs), names.__getitem__)
        names[node] = graph.create_node(node.op, node.target, *arguments, name=f"y{place}")
    graph.output(tuple(names[node] for node in outputs))
    key = tuple((node.op, node.target, str(node.args), str(node.kwargs)) for node in graph.nodes)
    if key not in made:
        made[key] = Piece(graph)
        model.add_submodule(f"piece_{len(made)}", made[key])
    name = f"piece_{[*made].index(key) + 1}"
    with model.graph.inserting_after(run[-1]):
        call = model.graph.call_module(name, tuple(inputs))
    with model.graph.inserting_after(call):
        parts = [model.graph.call_function(operator.getitem, (call, place)) for place in range(len(outputs))]
    for node, part in zip(outputs, parts, strict=True):
        node.replace_all_uses_with(part)
    for node in reversed(run):
        model.graph.erase_node(node)


def _checked(trunk: PackedTrunk, model: fx.GraphModule, probes: Sequence[PackedBatch], tolerance: float) -> float:
    """How far states are from those of the modules. Raises whatever the compiler does; RuntimeError if too far."""
    worst = 0.0
    for probe in probes:
        ids, layout = trunk.place(probe), trunk.layout(probe)
        worst = max(worst, deviation(model(ids, layout), trunk.model(ids, layout)))
        if not worst <= tolerance:  # NaN fails too
            raise RuntimeError(f"what it made differs by {worst:.2g} from the modules, relative to the largest state")
    return worst


def _guarded(trunk: PackedTrunk, model: fx.GraphModule) -> Callable[[Ids, PackedLayout], Tensor]:
    def guarded(ids: Ids, layout: PackedLayout) -> Tensor:
        try:
            return model(ids, layout)  # type: ignore[no-any-return]
        except Exception as error:
            if is_out_of_memory(error):
                raise
            trunk.instead = None
            _refused(error)
            return trunk.run(ids, layout)

    return guarded


def _refused(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    reason = words if len(words) <= MAX_LETTERS else f"{words[:MAX_LETTERS]} …"
    log.warning("torch.compile: the modules serve on: %s", reason)
    return reason


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest value of the second."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
