"""A trunk as its graph's inputs see it: what the exporter traces, with an example of a batch.

Where the family allows it, texts lie end to end, and padding is met by attention alone: each layer gathers its rows into a
rectangle, and back. The other families take a padded rectangle as a whole, as everybody else's ONNX files do.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.trunk.families import is_packed
from hybridtei.trunk.interface import register

BIDIRECTIONAL = frozenset({"bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta"})  # without windows
Sizes = dict[int, Any]


class Traced(nn.Module):
    """A module over a trunk; an example of each of its inputs by name, in the order of `forward`, and which of their sizes are
    free."""

    trunk: Any
    example: dict[str, Tensor]
    sizes: dict[str, Sizes]


def traced(spec: ModelSpec, *, rectangle: bool = False) -> Traced:
    """The module to trace for a checkpoint. `rectangle`: whatever the family allows."""
    from transformers import AutoModel

    packed = is_packed(spec.model_type) and not rectangle
    how = {"attn_implementation": register()} if packed else {}
    trunk = AutoModel.from_pretrained(spec.folder, local_files_only=True, dtype=torch.float32, **how).eval()
    return EndToEnd(trunk, spec) if packed else Rectangle(trunk, spec)


class Rectangle(Traced):
    """Padded ids and mask in, hidden states out.

    What many families would cut from buffers as long as their table of positions is computed instead: a graph without those
    serves every length of table.
    """

    def __init__(self, trunk: Any, spec: ModelSpec) -> None:
        super().__init__()
        self.trunk = trunk
        self._gives_types = _cuts_types(trunk)
        self._everything_sees_everything = trunk.config.model_type in BIDIRECTIONAL
        accepted = inspect.signature(trunk.forward).parameters
        self._gives_positions = "position_ids" in accepted and "position_ids" in _buffers(trunk) and spec.positions.offset == 0
        ids = torch.arange(10, dtype=torch.long).reshape(2, 5) % (spec.vocab_size - 8) + 4
        mask = torch.ones_like(ids)
        mask[1, 3:] = 0
        self.example = {"input_ids": ids, "attention_mask": mask}
        if spec.has_token_types:
            self.example["token_type_ids"] = torch.zeros_like(ids)
        self.sizes = {name: {0: torch.export.Dim("n"), 1: torch.export.Dim("s")} for name in self.example}

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        given = {}
        if token_type_ids is not None or self._gives_types:
            given["token_type_ids"] = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        if self._gives_positions:
            given["position_ids"] = torch.arange(input_ids.shape[1])[None]
        if self._everything_sees_everything:  # transformers would compute the same in twenty operators
            attention_mask = (attention_mask != 0)[:, None, None, :].expand(-1, 1, input_ids.shape[1], -1)
        hidden: Tensor = self.trunk(input_ids=input_ids, attention_mask=attention_mask, **given).last_hidden_state
        return hidden


class EndToEnd(Traced):
    """Ids int64[t] in, hidden states float32[t, h] out.

    `rows` int64[n * s]: the token at each place of the rectangle, any where there is none. `places` int64[t]: where each token
    lies there. `seen` int64[n, s]: which places are keys, as 0 and 1.
    """

    def __init__(self, trunk: Any, spec: ModelSpec) -> None:
        super().__init__()
        self.trunk = trunk
        self._gives_types = _cuts_types(trunk)
        ids = torch.arange(8, dtype=torch.long) % (spec.vocab_size - 8) + 4
        self.example = {"input_ids": ids, "position_ids": torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]) + spec.positions.offset}
        self.example |= {
            "rows": torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 0]),
            "places": torch.arange(8),
            "seen": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        }
        if spec.has_token_types:
            self.example["token_type_ids"] = torch.zeros_like(ids)
        self.sizes = {name: {0: torch.export.Dim("t")} for name in self.example}
        self.sizes |= {"rows": {0: torch.export.Dim.AUTO}, "seen": {0: torch.export.Dim("n"), 1: torch.export.Dim("s")}}

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        rows: Tensor,
        places: Tensor,
        seen: Tensor,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        given: dict[str, Any] = {}
        if token_type_ids is not None or self._gives_types:
            given["token_type_ids"] = (torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids)[None]
        if "use_cache" in inspect.signature(self.trunk.forward).parameters:
            given["use_cache"] = False
        layout = _Gathered(rows, places, seen != 0)
        hidden: Tensor = self.trunk(
            input_ids=input_ids[None], position_ids=position_ids[None], layout=layout, **given
        ).last_hidden_state
        return hidden[0]


class _Gathered:
    """The `Layout` of a traced batch: see `EndToEnd`."""

    def __init__(self, rows: Tensor, places: Tensor, seen: Tensor) -> None:
        self._rows = rows
        self._places = places
        self._seen = seen
        self._masks: dict[tuple[int | None, bool], Tensor] = {}  # one in the graph for all layers alike

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, causal: bool) -> Tensor:
        """See `Layout.attend`. Heads stay side by side in a row, which spares the graph their transposition."""
        heads = q.shape[1]
        if k.shape[1] != heads:
            k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        queries, keys, values = (self._rectangle(x) for x in (q, k, v))
        attended = torch.onnx.ops.attention(
            queries, keys, values, self._mask(window, causal), q_num_heads=heads, kv_num_heads=heads, scale=scale
        )[0]
        return attended.flatten(0, 1).index_select(0, self._places).view(-1, heads, v.shape[2])

    def _rectangle(self, x: Tensor) -> Tensor:
        n, s = self._seen.shape
        return x.flatten(1).index_select(0, self._rows).reshape(n, s, x.shape[1] * x.shape[2])

    def _mask(self, window: int | None, causal: bool) -> Tensor:
        key = (window, causal)
        if key not in self._masks:
            n, s = self._seen.shape
            mask = self._seen[:, None, None, :].expand(n, 1, s, s)
            if window is not None or causal:
                places = torch.arange(s)
                distance = places[:, None] - places[None, :]
                if window is not None:
                    mask = mask & (distance.abs() < window)
                if causal:
                    mask = mask & (distance >= 0)
            self._masks[key] = mask
        return self._masks[key]


def _buffers(trunk: nn.Module) -> frozenset[str]:
    return frozenset(name.rsplit(".", 1)[-1] for name, _ in trunk.named_buffers())


def _cuts_types(trunk: Any) -> bool:
    """Whether token types that are not given come from a buffer as long as a table."""
    return "token_type_ids" in inspect.signature(trunk.forward).parameters and "token_type_ids" in _buffers(trunk)
