"""`families.ops.Ops` and `heads.Functions` in torch: rows are tensors [t, width], texts end to end;
the layout computes attention.

`family_module` runs a family once, traced by torch.fx. The result is straight-line code over the
checkpoint's tensors, without branches on settings, in which `fp8` replaces products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.nn import functional

from hybridtei.inference.backends.heads import Functions, Segments
from hybridtei.inference.backends.torch.fusing import sum_inside
from hybridtei.inference.backends.torch.kernels import Form
from hybridtei.inference.backends.torch.layout import AlibiBias, DisentangledBias, DistanceBias
from hybridtei.models.families.ops import Heads, Rotation, Rows, Tables

# (name, shape) -> the checkpoint's tensor on the model's device, in its dtype.
TensorOf = Callable[[str, tuple[int, ...]], Tensor]
# The functions of `checkpoint.layers.ACTIVATIONS` and of the families', whose gelu_tanh is
# gelu_pytorch_tanh here.
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": nn.Identity(),
    "tanh": torch.tanh,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True, slots=True)
class ModuleOptions:
    """`typed`: the model has token types; otherwise all tokens have type 0."""

    dtype: torch.dtype
    device: torch.device
    typed: bool = False
    tanh_gelu: bool = False


def family_module(
    family: Callable[[Any], Rows], tensor_of: TensorOf, options: ModuleOptions
) -> tuple[fx.GraphModule, frozenset[Form]]:
    """(a module `(ids, layout)` -> last hidden states [t, h], the forms of attention that its
    layers need).

    `ids`: int64[t] each, by the names of `Ops.embedding`. `family`: a family with bound settings.
    """
    root = _Root(family, tensor_of, options)
    graph = fx.Tracer().trace(root)
    model = fx.GraphModule(root, graph).eval().requires_grad_(False)
    if options.device.type != "cpu":
        sum_inside(model)
    return model, frozenset(root.forms)


class _Root(nn.Module):
    """Holds the tensors of a family, by their names without dots."""

    def __init__(
        self, family: Callable[[Any], Rows], tensor_of: TensorOf, options: ModuleOptions
    ) -> None:
        super().__init__()
        self.family, self.tensor_of, self.options = family, tensor_of, options
        self.forms = set[Form]()

    def forward(self, ids: Mapping[str, Tensor], layout: Any) -> Tensor:
        hidden: Tensor = self.family(TorchOps(self, ids, layout)).value
        return hidden

    def parameter(
        self,
        name: str,
        shape: tuple[int, ...],
    ) -> Tensor:
        """Register a tensor of the checkpoint once."""
        parameter = self._parameters.get(path_of(name))
        if parameter is None:
            return self.put(name, self.tensor_of(name, shape))
        return parameter

    def put(
        self,
        name: str,
        tensor: Tensor,
    ) -> Tensor:
        """Register a tensor."""
        parameter = nn.Parameter(tensor, requires_grad=False)
        self.register_parameter(path_of(name), parameter)
        return parameter


class TorchOps:
    """Computing `Ops`."""

    def __init__(self, root: _Root, ids: Mapping[str, Tensor], layout: Any) -> None:
        self._root, self._ids, self._layout, self._options = root, ids, layout, root.options

    def embedding(self, name: str, rows: int, width: int, ids: str) -> Rows:
        table = self._root.parameter(name, (rows, width))
        if ids == "token_type_ids" and not self._options.typed:
            return Rows(table[0], width)
        return Rows(functional.embedding(self._ids[ids], table), width)

    def parameter_rows(self, name: str, rows: int, width: int) -> Rows:
        return Rows(self._root.parameter(name, (rows, width)), width, is_parameter=True)

    def linear(self, x: Rows, name: str, width: int, *, bias: bool = True) -> Rows:
        # The product of a parameter is computed here, while the family is traced
        tensor_of = self._root.tensor_of if x.is_parameter else self._root.parameter
        more = tensor_of(f"{name}.bias", (width,)) if bias else None
        value = functional.linear(x.value, tensor_of(f"{name}.weight", (width, x.width)), more)
        return Rows(value, width, x.is_parameter)

    @property
    def joins(self) -> bool:
        """True unless matrices are views of a file, which joining would copy."""
        return self._options.device.type != "cpu"

    def linears(
        self, x: Rows, names: Sequence[str], widths: Sequence[int], *, bias: bool
    ) -> list[Rows]:
        def joined(kind: str, *columns: int) -> Tensor:
            shapes = ((width, *columns) for width in widths)
            tensors = map(self._root.tensor_of, (f"{name}.{kind}" for name in names), shapes)
            return self._root.put(f"{names[0]}.{kind}", torch.cat([*tensors]))

        weight = joined("weight", x.width)
        more = joined("bias") if bias else None
        whole = functional.linear(x.value, weight, more)
        return self.split(Rows(whole, sum(widths)), widths)

    def add(self, x: Rows, y: Rows) -> Rows:
        return Rows(x.value + y.value, x.width)

    def multiply(self, x: Rows, y: Rows) -> Rows:
        return Rows(x.value * y.value, x.width)

    def scale(self, x: Rows, factor: float) -> Rows:
        return Rows(x.value * factor, x.width)

    def scaled_by(self, x: Rows, name: str) -> Rows:
        return Rows(x.value * self._root.parameter(name, (1,)), x.width)

    def split(self, x: Rows, widths: Sequence[int]) -> list[Rows]:
        parts = x.value.split([*widths], 1)
        return [Rows(parts[place], width) for place, width in enumerate(widths)]

    def activate(self, x: Rows, kind: str) -> Rows:
        is_tanh = kind == "gelu_tanh" or (kind == "gelu" and self._options.tanh_gelu)
        return Rows(ACTIVATIONS["gelu_pytorch_tanh" if is_tanh else kind](x.value), x.width)

    def layer_norm(self, x: Rows, name: str, eps: float, *, bias: bool = True) -> Rows:
        more = self._root.parameter(f"{name}.bias", (x.width,)) if bias else None
        normed = functional.layer_norm(
            x.value, (x.width,), self._root.parameter(f"{name}.weight", (x.width,)), more, eps
        )
        return Rows(normed, x.width, x.is_parameter)

    def rms_norm(
        self, x: Rows, name: str | None, eps: float, *, dim: int | None = None, offset: float = 0.0
    ) -> Rows:
        size = (dim or x.width,)
        weight = None if name is None else self._root.parameter(f"{name}.weight", size)
        value = x.value if dim is None else self._heads(x, dim)
        # Near 1, half precision is too coarse for the sum
        if weight is not None and offset:
            normed = functional.rms_norm(value.float(), size, weight.float() + offset, eps).to(
                weight.dtype
            )
        else:
            normed = functional.rms_norm(value, size, weight, eps)
        return Rows(normed if dim is None else normed.flatten(1), x.width)

    def experts(
        self, x: Rows, logits: Rows, name: str, wide: int, *, chosen: int, act: str
    ) -> Rows:
        """Compute all experts, and multiply those that are not chosen by zero, so that no shape
        depends on the choice."""
        count = logits.width
        w1, w2 = (
            self._root.parameter(f"{name}.mlp.{part}", (count * wide, x.width))
            for part in ("w1", "w2")
        )
        largest, places = logits.value.float().softmax(1).topk(chosen, dim=1)
        share = torch.zeros_like(logits.value).scatter(1, places, largest.to(self._options.dtype))
        each = self.activate(Rows(x.value @ w1.T, count * wide), act)
        shared = (self._heads(each, wide) * share[:, :, None]).flatten(1)
        return Rows(
            functional.linear(shared, w2.T, self._root.parameter(f"{name}.bias", (x.width,))),
            x.width,
        )

    def rotation(
        self,
        frequencies: NDArray[np.float32],
        factor: float,
        growth: tuple[float, int] | None = None,
    ) -> Rotation:
        inverse = torch.as_tensor(frequencies, device=self._options.device)
        places = self._ids["position_ids"][:, None].float()
        angles = places * inverse
        scale: Any = factor
        if growth is not None:
            beta, length = growth
            scale = factor * (1 + beta * (places / length).floor().log1p())
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # The sign of `rotate` is in the sines
        cos, sin = (
            torch.cat(pair, 1)[:, None].to(self._options.dtype)
            for pair in ((cos, cos), (-sin, sin))
        )
        return Rotation(cos, sin)

    def rotate(self, x: Rows, rotation: Rotation, dim: int) -> Rows:
        heads = self._heads(x, dim)
        turned = torch.cat((heads[..., dim // 2 :], heads[..., : dim // 2]), 2)
        turned = torch.addcmul(turned * rotation.sin, heads, rotation.cos)
        return Rows(turned.flatten(1), x.width)

    def attention(self, q: Rows, k: Rows, v: Rows, heads: Heads, bias: Any = None) -> Rows:
        self._root.forms.add((heads, bias is not None))
        parts = (self._heads(rows, heads.dim) for rows in (q, k, v))
        return Rows(self._layout.attend(*parts, heads, bias).flatten(1), q.width)

    def convolve(self, x: Rows, name: str) -> Rows:
        weight = self._root.parameter(f"{name}.weight", (x.width, 1, 3))
        return Rows(self._layout.convolve(x.value, weight), x.width)

    def adapter_rows(self, table: NDArray[np.float32]) -> Rows:
        values = torch.as_tensor(table, device=self._options.device, dtype=self._options.dtype)
        return Rows(functional.embedding(self._ids["adapter_ids"], values), table.shape[1])

    def alibi(self, slopes: NDArray[np.float32]) -> AlibiBias:
        return AlibiBias(
            torch.as_tensor(slopes, device=self._options.device, dtype=self._options.dtype)
        )

    def buckets(self, buckets: NDArray[np.int64], name: str, heads: int) -> DistanceBias:
        table = self._root.tensor_of(name, (int(buckets.max()) + 1, heads))
        return DistanceBias(table[torch.as_tensor(buckets, device=table.device)].T.contiguous())

    def disentangled(
        self, q: Rows, k: Rows, heads: Heads, buckets: NDArray[np.int64], tables: Tables
    ) -> DisentangledBias:
        to_position, to_content = (
            None if table is None else self._heads(table, heads.dim) * heads.scale
            for table in tables
        )
        places = torch.as_tensor(buckets, device=self._options.device)
        return DisentangledBias(places, to_position, to_content)

    def _heads(self, x: Rows, dim: int) -> Tensor:
        heads: Tensor = x.value.unflatten(1, (-1, dim))
        return heads


def path_of(name: str) -> str:
    """The attribute path of a checkpoint's tensor in a module."""
    return name.replace(".", "__")


# Numbers that a GPU thread adds in the time of launching one sum; an estimate
TOKENS_A_LAUNCH = 16
# A vocabulary's threads fill a GPU with a single sequence
MANY_COLUMNS = 1 << 14


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a linear layer in the matrix's precision."""
    return functional.linear(x.to(weight.dtype), weight, bias)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(
        x if weight is None else x.to(weight.dtype), x.shape[-1:], weight, bias, eps
    )


def segment_sum(x: Tensor, at: Segments) -> Tensor:
    """Sum each sequence's rows in float32."""
    return _reduced(x.float(), at, "sum", torch.sum)


def segment_max(x: Tensor, at: Segments) -> Tensor:
    return _reduced(x, at, "max", torch.amax)


def _reduced(x: Tensor, at: Segments, how: str, alone: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Reduce by one launch for all sequences, or one for each. On a CPU a launch is free, so one
    for each."""
    lengths = np.diff(at.cu_seqlens).tolist()
    if x.device.type != "cpu" and reduce_at_once(len(lengths), max(lengths), x.shape[1]):
        return reduced_at_once(x, at, how)
    return torch.stack([alone(part, 0) for part in torch.split(x, lengths)])


def reduced_at_once(x: Tensor, at: Segments, how: str) -> Tensor:
    # A check would wait for the device
    return torch.segment_reduce(x, how, offsets=at.offsets, axis=0, unsafe=True)


def reduce_at_once(
    sequences: int,
    longest: int,
    columns: int,
) -> bool:
    """True if one launch should reduce all sequences: its threads, one a column and sequence, walk
    the tokens."""
    return columns >= MANY_COLUMNS or longest <= TOKENS_A_LAUNCH * sequences


def largest(x: Tensor, count: int) -> Tensor:
    values, places = torch.topk(x, count, dim=1)
    return torch.zeros_like(x).scatter_(1, places, functional.relu(values))


TORCH = Functions(
    library=torch,
    float32=lambda x: x.float(),
    activations=ACTIVATIONS,
    linear=linear,
    layer_norm=layer_norm,
    segment_sum=segment_sum,
    segment_max=segment_max,
    largest=largest,
    repeated=lambda x, at: torch.repeat_interleave(
        x, at.offsets.diff(), output_size=int(at.cu_seqlens[-1])
    ),
    rows=lambda x, places: x[places],
    # 250 MB at v = 30k
    slice_tokens=lambda x: 256 if x.device.type == "cpu" or x.dtype == torch.float32 else 4096,
)


def entries_of(rows: Tensor) -> dict[str, Tensor]:
    """The non-zero entries of float[n, v]. Copying the whole array would take hundreds of
    megabytes. Waits for the device, since only the device knows the number of entries.
    """
    row, column = rows.nonzero(as_tuple=True)
    return {"indices": column, "values": rows[row, column], "lengths": rows.count_nonzero(dim=1)}
