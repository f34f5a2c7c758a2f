"""`families.ops.Ops` that write an ONNX graph of a family. Weights are only declared, by name and
shape.

Inputs: `input_ids`, `position_ids` and, if the model has several, `token_type_ids` and
`adapter_ids`, int64[t], texts end to end; `rows` int64[n * s], the token at each place of
attention's rectangle (any token for padding); `places` int64[t], each token's place in it; `seen`
int64[n, s], 1 for keys and 0 for padding. Output: `hidden` float32[t, h]. In causal graphs queries
have their own rectangle: `queries` int64[n, q], the token at each place, and `starts` int64[n], the
place of a row's first query among its keys; `places` are then places of queries.

A graph for one text has only `input_ids`, `position_ids`, `token_type_ids` and `adapter_ids`, and
gathers nothing. It has a second output `pooled` float32[1, h] if pooling is the model's whole dense
head.

A graph for other readers of ONNX files takes a rectangle: `input_ids`, `attention_mask` and
`token_type_ids` int64[n, s], and returns `last_hidden_state` float32[n, s, h].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import Positions
from hybridtei.errors import UnsupportedArchitecture
from hybridtei.inference.backends.graph.writer import (
    BOOL,
    FLOAT,
    INT64,
    Attribute,
    Graph,
    OnnxWriter,
)
from hybridtei.models.checkpoint.hub_layouts import check_code
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.families import run_family
from hybridtei.models.families.ops import Heads, Rotation, Rows, Tables

T = TypeVar("T")
POOLED = "pooled"
# The least finite number of bfloat16. It becomes no infinity in bfloat16, where a sum of it could
# be NaN.
MASKED = -3.3895313892515355e38
# The end of a slice up to the last row
LAST = 1 << 62


def family_graph(spec: ModelSpec, *, rectangle: bool = False, alone: bool = False) -> Graph:
    """Make the graph of a checkpoint's trunk from config.json, in milliseconds. `alone`: the graph
    for one text.

    Raises LoadError, and UnsupportedArchitecture for an unknown family or setting.
    """
    if rectangle and spec.adapters is not None:
        raise UnsupportedArchitecture(
            f"{spec.folder}: has adapters, and files for other readers of ONNX cannot choose one"
        )
    return graph_by(OnnxOps(spec, rectangle=rectangle, alone=alone), spec)


def graph_by(ops: OnnxOps, spec: ModelSpec) -> Graph:
    """Write a checkpoint's family by these operations. Raises the errors of `family_graph`."""
    file = spec.folder / "config.json"
    check_code(spec.config, file)
    adapters = None if spec.adapters is None else spec.adapters.form
    hidden = run_family(
        ops, spec.model_type, spec.config, str(file), adapters, is_native=spec.is_native
    )
    return Graph(ops.model(hidden), ops.weights, matrices=tuple(ops.matrices), causal=ops.causal)


class OnnxOps:
    """Graph-writing `Ops`. `weights`: the shape of each tensor that the graph needs; `matrices`:
    the tensors it multiplies by.
    `causal`: no token attends to a later one."""

    def __init__(self, spec: ModelSpec, *, rectangle: bool = False, alone: bool = False) -> None:
        self.writer = OnnxWriter()
        self.weights: dict[str, tuple[int, ...]] = {}
        self.matrices: list[str] = []
        self.causal = True
        self._tanh_gelu = spec.tanh_gelu
        self._is_rectangle, self._is_alone = rectangle, alone
        pools = (
            alone
            and not (spec.kind.steps or spec.kind.is_rounded)
            and spec.pooling in (("mean",), ("cls",), ("lasttoken",))
        )
        self._pooling = spec.pooling[0] if pools else None
        self._values: dict[Any, Any] = {}
        types = ["token_type_ids"] if spec.has_token_types else []
        if rectangle:
            for name in ("input_ids", "attention_mask", *types):
                self.writer.input(name, ["n", "s"])
            self._seen = "attention_mask"
            self._ids = {
                name: self._node("Reshape", name, self._list(-1)) for name in ("input_ids", *types)
            }
            self._ids["position_ids"] = self._counted_positions(spec.positions)
        else:
            self._ids = {
                name: self.writer.input(name, ["t"])
                for name in ("input_ids", "position_ids", *types)
            }
            self._seen = "input_ids"
            if not alone:
                self.writer.input("places", ["t"])
                self.writer.input("rows", ["r"])
                self._seen = self.writer.input("seen", ["n", "s"])

    def model(self, hidden: Rows) -> bytes:
        """The ModelProto whose output is these rows."""
        if not self._is_rectangle:
            if self._pooling is not None:
                self.writer.output(self._pooled(hidden), POOLED, [1, hidden.width])
            return self.writer.model(hidden.value, "hidden", ["t", hidden.width])
        n, s = self._sides()
        shape = self._node("Concat", n, s, self._list(hidden.width), axis=0)
        return self.writer.model(
            self._node("Reshape", hidden.value, shape),
            "last_hidden_state",
            ["n", "s", hidden.width],
        )

    def _pooled(self, hidden: Rows) -> str:
        if self._pooling == "mean":
            return self._node("ReduceMean", hidden.value, self._list(0), keepdims=1)
        return self._node("Gather", hidden.value, self._list(0 if self._pooling == "cls" else -1))

    def embedding(self, name: str, rows: int, width: int, ids: str) -> Rows:
        table = self._weight(name, (rows, width))
        # Without types: type 0
        return Rows(self._node("Gather", table, self._ids.get(ids) or self._int(0)), width)

    def parameter_rows(self, name: str, rows: int, width: int) -> Rows:
        return Rows(self._weight(name, (rows, width)), width, is_parameter=True)

    def adapter_rows(self, table: NDArray[np.float32]) -> Rows:
        ids = self.writer.input("adapter_ids", ["t"])
        return Rows(self._node("Gather", self.writer.constant(table), ids), table.shape[1])

    def linear(self, x: Rows, name: str, width: int, *, bias: bool = True) -> Rows:
        weight = self._weight(f"{name}.weight", (width, x.width))
        # Otherwise the product is a constant
        if not x.is_parameter:
            self.matrices.append(weight)
        values = [x.value, weight]
        if bias:
            values.append(self._weight(f"{name}.bias", (width,)))
        return Rows(self._node("Gemm", *values, transB=1), width, x.is_parameter)

    def add(self, x: Rows, y: Rows) -> Rows:
        return Rows(self._node("Add", x.value, y.value), x.width)

    def multiply(self, x: Rows, y: Rows) -> Rows:
        return Rows(self._node("Mul", x.value, y.value), x.width)

    def scale(self, x: Rows, factor: float) -> Rows:
        return Rows(self._node("Mul", x.value, self._float(factor)), x.width)

    def scaled_by(self, x: Rows, name: str) -> Rows:
        return Rows(self._node("Mul", x.value, self._weight(name, (1,))), x.width)

    def split(self, x: Rows, widths: Sequence[int]) -> list[Rows]:
        parts = self.writer.node("Split", x.value, self._list(*widths), outputs=len(widths), axis=1)
        return [Rows(part, width) for part, width in zip(parts, widths, strict=True)]

    def activate(self, x: Rows, kind: str) -> Rows:
        if kind in ("gelu", "gelu_tanh"):
            form = "tanh" if self._tanh_gelu or kind == "gelu_tanh" else "none"
            return Rows(self._node("Gelu", x.value, approximate=form), x.width)
        if kind == "silu":
            return Rows(self._node("Mul", x.value, self._node("Sigmoid", x.value)), x.width)
        return Rows(self._node({"relu": "Relu", "tanh": "Tanh"}[kind], x.value), x.width)

    def layer_norm(self, x: Rows, name: str, eps: float, *, bias: bool = True) -> Rows:
        values = [x.value, self._weight(f"{name}.weight", (x.width,))]
        if bias:
            values.append(self._weight(f"{name}.bias", (x.width,)))
        normed = self._node("LayerNormalization", *values, epsilon=eps, axis=-1)
        return Rows(normed, x.width, x.is_parameter)

    def rms_norm(
        self, x: Rows, name: str | None, eps: float, *, dim: int | None = None, offset: float = 0.0
    ) -> Rows:
        value = x.value if dim is None else self._heads(x, dim)
        mean = self._node("ReduceMean", self._node("Mul", value, value), self._list(-1), keepdims=1)
        size = self._node("Sqrt", self._node("Add", mean, self._float(eps)))
        normed = self._node("Div", value, size)
        if name is not None:
            weight = self._weight(f"{name}.weight", (dim or x.width,))
            if offset:
                weight = self._node("Add", weight, self._float(offset))
            normed = self._node("Mul", normed, weight)
        return Rows(normed if dim is None else self._node("Flatten", normed, axis=1), x.width)

    def experts(
        self, x: Rows, logits: Rows, name: str, wide: int, *, chosen: int, act: str
    ) -> Rows:
        """Compute all experts in two products, and multiply those that are not chosen by zero."""
        count = logits.width
        w1, w2 = (
            self._weight(f"{name}.mlp.{part}", (count * wide, x.width)) for part in ("w1", "w2")
        )
        bias = self._weight(f"{name}.bias", (x.width,))
        chances = self._node("Softmax", logits.value, axis=1)
        largest, places = self.writer.node("TopK", chances, self._list(chosen), outputs=2, axis=1)
        nothing = self._node("Mul", chances, self._float(0))
        share = self._node("ScatterElements", nothing, places, largest, axis=1)
        each = self.activate(Rows(self._node("Gemm", x.value, w1, transB=1), count * wide), act)
        shared = self._node(
            "Mul", self._heads(each, wide), self._node("Unsqueeze", share, self._list(2))
        )
        return Rows(self._node("Gemm", self._node("Flatten", shared, axis=1), w2, bias), x.width)

    def rotation(
        self,
        frequencies: NDArray[np.float32],
        factor: float,
        growth: tuple[float, int] | None = None,
    ) -> Rotation:
        places = self._node(
            "Unsqueeze", self._node("Cast", self._ids["position_ids"], to=FLOAT), self._list(1)
        )
        angles = self._node("Mul", places, self.writer.constant(frequencies[None]))
        both = self._node("Unsqueeze", self._node("Concat", angles, angles, axis=1), self._list(1))
        cos, sin = self._node("Cos", both), self._node("Sin", both)
        if factor != 1:
            cos, sin = (self._node("Mul", value, self._float(factor)) for value in (cos, sin))
        if growth is not None:
            beta, length = growth
            steps = self._node("Floor", self._node("Div", places, self._float(length)))
            logarithm = self._node("Log", self._node("Add", steps, self._float(1)))
            grown = self._node(
                "Add", self._node("Mul", logarithm, self._float(beta)), self._float(1)
            )
            grown = self._node("Unsqueeze", grown, self._list(1))
            cos, sin = (self._node("Mul", value, grown) for value in (cos, sin))
        return Rotation(cos, sin)

    def rotate(self, x: Rows, rotation: Rotation, dim: int) -> Rows:
        heads = self._heads(x, dim)
        first, second = self.writer.node(
            "Split", heads, self._list(dim // 2, dim // 2), outputs=2, axis=2
        )
        turned = self._node("Concat", self._node("Neg", second), first, axis=2)
        rotated = self._node(
            "Add", self._node("Mul", heads, rotation.cos), self._node("Mul", turned, rotation.sin)
        )
        return Rows(self._node("Flatten", rotated, axis=1), x.width)

    def attention(self, q: Rows, k: Rows, v: Rows, heads: Heads, bias: Any = None) -> Rows:
        self.causal &= heads.causal
        apart = heads.causal and not (self._is_rectangle or self._is_alone)
        mask = self._mask(heads.causal, heads.window, apart=apart)
        if bias is not None:
            biased = partial(self._node, "Where", mask, bias, self._float(MASKED))
            mask = self._once(("bias", bias, mask), biased) if mask else bias
        attended = self._node(
            "Attention",
            self._node("Gather", q.value, self._queries()[0]) if apart else self._rectangle(q),
            *(self._rectangle(rows) for rows in (k, v)),
            mask,
            q_num_heads=heads.count,
            kv_num_heads=heads.key_count,
            scale=float(heads.scale),
        )
        return self._flat(attended, q.width)

    def convolve(self, x: Rows, name: str) -> Rows:
        self.causal = False
        weight = self._weight(f"{name}.weight", (x.width, 1, 3))
        rows = self._rectangle(x)
        if not self._is_alone:
            seen = self._node("Cast", self._seen, to=FLOAT)
            rows = self._node("Mul", rows, self._node("Unsqueeze", seen, self._list(2)))
        padded = self._node("Pad", rows, self._list(0, 1, 0, 0, 1, 0))
        turned = self._node("Transpose", weight, perm=[2, 1, 0])
        factors = self.writer.node("Split", turned, self._list(1, 1, 1), outputs=3, axis=0)
        products = []
        # The token before, the token itself and the next one
        for place, end in enumerate((-2, -1, LAST)):
            part = self._node("Slice", padded, *map(self._list, (place, end, 1)))
            products.append(self._node("Mul", part, factors[place]))
        return self._flat(reduce(partial(self._node, "Add"), products), x.width)

    def _flat(self, rectangle: str, width: int) -> Rows:
        """float[n, s, width] -> [t, width]."""
        flat = self._node("Reshape", rectangle, self._list(-1, width))
        if not (self._is_rectangle or self._is_alone):
            flat = self._node("Gather", flat, "places")
        return Rows(flat, width)

    def alibi(self, slopes: NDArray[np.float32]) -> str:
        distance = self._node("Cast", self._node("Abs", self._distance()), to=FLOAT)
        return self._node("Mul", self.writer.constant(-slopes[None, :, None, None]), distance)

    def buckets(self, buckets: NDArray[np.int64], name: str, heads: int) -> str:
        table = self._weight(name, (int(buckets.max()) + 1, heads))
        chosen = self._node(
            "Gather", table, self._bucket(buckets, self._node("Neg", self._distance()))
        )
        return self._node(
            "Unsqueeze", self._node("Transpose", chosen, perm=[2, 0, 1]), self._list(0)
        )

    def disentangled(
        self, q: Rows, k: Rows, heads: Heads, buckets: NDArray[np.int64], tables: Tables
    ) -> str:
        content_to_position, position_to_content = tables
        chosen = self._bucket(buckets, self._distance())
        n, s = self._sides()
        square = self._node("Concat", n, self._list(heads.count), s, s, axis=0)
        parts = []
        if content_to_position is not None:
            places = self._node("Expand", chosen, square)
            parts.append(
                self._node(
                    "GatherElements", self._against(q, content_to_position, heads), places, axis=3
                )
            )
        if position_to_content is not None:
            places = self._node("Expand", self._node("Transpose", chosen, perm=[1, 0]), square)
            scores = self._node(
                "GatherElements", self._against(k, position_to_content, heads), places, axis=3
            )
            parts.append(self._node("Transpose", scores, perm=[0, 1, 3, 2]))
        total = parts[0] if len(parts) == 1 else self._node("Add", *parts)
        return self._node("Mul", total, self._float(heads.scale))

    def _against(self, x: Rows, table: Rows, heads: Heads) -> str:
        """Products of each token's heads with their parts of each row of a table: float[n, heads,
        s, rows]."""
        rectangle = self._node(
            "Reshape", self._rectangle(x), self._list(0, 0, heads.count, heads.dim)
        )
        rows = self._node("Reshape", table.value, self._list(-1, heads.count, heads.dim))
        tokens = self._node("Transpose", rectangle, perm=[0, 2, 1, 3])
        return self._node("MatMul", tokens, self._node("Transpose", rows, perm=[1, 2, 0]))

    def _bucket(self, buckets: NDArray[np.int64], distance: str) -> str:
        longest = len(buckets) // 2
        distance = self._node("Clip", distance, self._int(-longest), self._int(longest))
        return self._node(
            "Gather", self.writer.constant(buckets), self._node("Add", distance, self._int(longest))
        )

    def _rectangle(self, x: Rows) -> str:
        """float[t, width] -> [n, s, width]."""
        if self._is_alone:
            return self._node("Unsqueeze", x.value, self._list(0))
        n, s = self._sides()
        shape = self._once(
            ("shape", x.width), lambda: self._node("Concat", n, s, self._list(x.width), axis=0)
        )
        return self._node(
            "Reshape",
            x.value if self._is_rectangle else self._node("Gather", x.value, "rows"),
            shape,
        )

    def _sides(self) -> tuple[str, str]:
        """The batch's `n` and `s`, int64[1] each."""
        if self._is_alone:
            return self._list(1), self._once("s", lambda: self._node("Shape", "input_ids"))
        n = self._once("n", lambda: self._node("Shape", self._seen, start=0, end=1))
        return n, self._once("s", lambda: self._node("Shape", self._seen, start=1, end=2))

    def _counted_positions(self, positions: Positions) -> str:
        """Position ids of a rectangle int64[n * s], by the rule of `batch.Positions`."""
        if positions.padding_id is None:
            n, s = self._sides()
            places = self._range(s)
            return self._node(
                "Reshape",
                self._node("Expand", places, self._node("Concat", n, s, axis=0)),
                self._list(-1),
            )
        is_padding = self._node("Equal", "input_ids", self._int(positions.padding_id))
        counts = self._node("Cast", self._node("Not", is_padding), to=INT64)
        places = self._node("Mul", self._node("CumSum", counts, self._int(1)), counts)
        return self._node(
            "Reshape", self._node("Add", places, self._int(positions.padding_id)), self._list(-1)
        )

    def _distance(self, *, apart: bool = False) -> str:
        """Query minus key: int64[s, s], or int64[n, 1, q, s] if queries have their own rectangle
        (`apart`)."""

        def make() -> str:
            keys = self._range(self._sides()[1])
            if not apart:
                return self._node("Sub", self._node("Unsqueeze", keys, self._list(1)), keys)
            queries, starts = self._queries()
            places = self._range(self._node("Shape", queries, start=1, end=2))
            first = self._node("Unsqueeze", starts, self._list(1, 2, 3))
            return self._node(
                "Sub",
                self._node("Add", first, self._node("Unsqueeze", places, self._list(1))),
                keys,
            )

        return self._once(("distance", apart), make)

    def _mask(self, causal: bool, window: int | None, *, apart: bool) -> str:
        """The mask bool[n, 1, q, s] of keys that each query attends to; "" if a single text attends
        to all of itself."""

        def make() -> str:
            masks = [] if self._is_alone else [self._keys(apart)]
            if causal:
                masks.append(
                    self._node("GreaterOrEqual", self._distance(apart=apart), self._int(0))
                )
            if window is not None:
                masks.append(
                    self._node(
                        "Less", self._node("Abs", self._distance(apart=apart)), self._int(window)
                    )
                )
            return reduce(lambda a, b: self._node("And", a, b), masks) if masks else ""

        return self._once(("mask", causal, window), make)

    def _keys(self, apart: bool) -> str:
        """The mask of keys: bool[n, 1, s, s], or bool[n, 1, 1, s], which a mask of queries `apart`
        broadcasts."""
        keys = self._node("Unsqueeze", self._node("Cast", self._seen, to=BOOL), self._list(1, 2))
        if apart:
            return keys
        n, s = self._sides()
        return self._node("Expand", keys, self._node("Concat", n, self._list(1), s, s, axis=0))

    def _queries(self) -> tuple[str, str]:
        return self._once(
            "queries",
            lambda: (self.writer.input("queries", ["n", "q"]), self.writer.input("starts", ["n"])),
        )

    def _range(self, size: str) -> str:
        """The whole numbers below a size int64[1]."""
        return self._node("Range", self._int(0), self._node("Squeeze", size), self._int(1))

    def _heads(self, x: Rows, dim: int) -> str:
        return self._node("Reshape", x.value, self._list(0, x.width // dim, dim))

    def _weight(self, name: str, shape: tuple[int, ...]) -> str:
        self.weights[name] = shape
        return name

    def _once(self, key: Any, make: Callable[[], T]) -> T:
        if key not in self._values:
            self._values[key] = make()
        value: T = self._values[key]
        return value

    def _node(self, kind: str, *inputs: str, domain: str = "", **attributes: Attribute) -> str:
        (output,) = self.writer.node(kind, *inputs, outputs=1, domain=domain, **attributes)
        return output

    def _int(self, value: int) -> str:
        return self.writer.constant(np.array(value, dtype=np.int64))

    def _list(self, *values: int) -> str:
        return self.writer.constant(np.array(values, dtype=np.int64))

    def _float(self, value: float) -> str:
        return self.writer.constant(np.array(value, dtype=np.float32))
