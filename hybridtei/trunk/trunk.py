"""A loaded encoder at work: packed batches in, last hidden states out, without padding where the family allows it.

A batch is one row of `t` tokens, `input_ids[1, t]`; explicit position ids and the layout, handed in as a keyword
argument that travels down to our attention function, are all that tells the sequences apart. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hybridtei.batch import PackedBatch, pad, seen_mask
from hybridtei.trunk.attention import kernel_for
from hybridtei.trunk.families import is_packed
from hybridtei.trunk.kernels.choice import Choice
from hybridtei.trunk.kernels.sdpa import per_sequence
from hybridtei.trunk.layout import PackedLayout
from hybridtei.trunk.parts import each
from hybridtei.trunk.rope import forget_lengths

if TYPE_CHECKING:
    from hybridtei.checkpoint.spec import ModelSpec

TRANSFORMERS_OWN = Choice("transformers' own", "the family is not known to run packed")


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """A batch's integers on the device, int64[t] each."""

    input_ids: Tensor
    position_ids: Tensor
    token_type_ids: Tensor | None = None

    def first(self, tokens: int) -> Placed:
        """So many from the first on, as views."""
        types = self.token_type_ids
        return Placed(self.input_ids[:tokens], self.position_ids[:tokens], None if types is None else types[:tokens])


Pass = Callable[[Placed, PackedLayout], Tensor]


class Trunk:
    """A loaded encoder: packed batches in, last hidden states out.

    `padded`: a batch costs n * max_seqlen tokens. A model whose rotary embedding follows the length takes one sequence a
    pass, so that no text depends on its neighbours. `attention`: what computes it, and why; `kernel`: that, where packed.
    `instead`: what computes packed passes in the place of transformers' own modules, once there is something faster.
    """

    def __init__(self, model: Any, spec: ModelSpec, device: torch.device) -> None:
        self.model = model
        self._spec = spec
        self._device = device
        self._packed = is_packed(spec.model_type)
        self._alone = forget_lengths(model)
        self.padded = not (self._packed or self._alone)
        self.instead: Pass | None = None
        self.attention, self.kernel = (
            kernel_for(model, model.dtype, device) if self._packed else (TRANSFORMERS_OWN, per_sequence)
        )

    def __call__(self, batch: PackedBatch, layout: PackedLayout, placed: Placed | None = None) -> Tensor:
        """Last hidden states float[t, h], flat whichever way the family runs. `placed`: the batch, if it is there already."""
        if self._alone and len(batch) > 1:
            return torch.cat([self(part, self.layout(part)) for part in each(batch)])
        if self._packed:
            return self.run(placed or self.place(batch), layout)
        return self._run_padded(batch)

    @property
    def packs(self) -> bool:
        """Whether any batch is one packed pass."""
        return self._packed and not self._alone

    def run(self, placed: Placed, layout: PackedLayout) -> Tensor:
        """Last hidden states float[t, h] of a packed pass, by the fastest way there is."""
        instead = self.instead
        return self.eager(placed, layout) if instead is None else instead(placed, layout)

    def eager(self, placed: Placed, layout: PackedLayout) -> Tensor:
        """`run`, by transformers' own modules."""
        return self.model(**self.inputs(placed), layout=layout).last_hidden_state[0]  # type: ignore[no-any-return]

    def inputs(self, placed: Placed) -> dict[str, Any]:
        """What the modules are called with besides the layout."""
        inputs = {"input_ids": placed.input_ids[None], "position_ids": placed.position_ids[None]}
        if self._spec.has_token_types:
            types = placed.token_type_ids
            inputs["token_type_ids"] = (torch.zeros_like(placed.input_ids) if types is None else types)[None]
        return {**inputs, **self._no_cache()}

    def layout(self, batch: PackedBatch, offsets: Tensor | None = None, *, bound: int | None = None) -> PackedLayout:
        """Of a batch, with this trunk's attention. `offsets`, `bound`: see `PackedLayout`."""
        return PackedLayout(batch.cu_seqlens, self._device, batch.unseen, kernel=self.kernel, offsets=offsets, bound=bound)

    def place(self, batch: PackedBatch) -> Placed:
        """A batch's integers, copied one by one."""
        types = None if batch.token_type_ids is None else self._tensor(batch.token_type_ids)
        return Placed(self._tensor(batch.input_ids), self._tensor(batch.position_ids), types)

    def word_embeddings(self, batch: PackedBatch, placed: Placed | None = None) -> Tensor:
        """Rows of the word embedding table, without position or type: float[t, h]."""
        table = self.model.get_input_embeddings()
        return table(self._tensor(batch.input_ids) if placed is None else placed.input_ids)  # type: ignore[no-any-return]

    def _run_padded(self, batch: PackedBatch) -> Tensor:
        input_ids, mask = pad(batch.input_ids, batch.cu_seqlens, self._spec.padding_id)
        inputs = {"input_ids": self._tensor(input_ids), "attention_mask": self._tensor(seen_mask(mask, batch)).long()}
        if self._spec.has_token_types:
            types = batch.token_type_ids
            padded = pad(types, batch.cu_seqlens, 0)[0] if types is not None else 0 * input_ids
            inputs["token_type_ids"] = self._tensor(padded)
        hidden = self.model(**inputs, **self._no_cache()).last_hidden_state
        return hidden.flatten(0, 1)[self._tensor(np.flatnonzero(mask))]  # type: ignore[no-any-return]

    def _no_cache(self) -> Mapping[str, bool]:
        return {"use_cache": False} if "use_cache" in self._spec.config else {}

    def _tensor(self, array: Any) -> Tensor:
        return torch.as_tensor(array, device=self._device)
