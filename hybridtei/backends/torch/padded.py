"""transformers' own modules at work, on a padded batch with their own attention and mask.

Slower than `PackedTrunk`, and as right as transformers is for a padded batch: whether a text depends on its neighbours is
asked by the self-test at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtei.backends.torch.choice import Choice
from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.backends.torch.parts import each
from hybridtei.backends.torch.rope import forget_lengths
from hybridtei.backends.torch.trunk import Ids
from hybridtei.batch import PackedBatch, pad, seen_mask

if TYPE_CHECKING:
    from hybridtei.checkpoint.spec import ModelSpec


class PaddedTrunk:
    """See `trunk.Trunk`. A model whose rotary embedding follows the length takes one sequence a pass, so that no text depends
    on its neighbours."""

    packs = False
    attention = Choice("transformers' own", "there is no file of the family")

    def __init__(self, model: Any, spec: ModelSpec, device: torch.device) -> None:
        self.model = model
        self._spec = spec
        self._device = device
        self._alone = forget_lengths(model)
        self.padded = not self._alone

    def __call__(self, batch: PackedBatch, layout: PackedLayout, ids: Ids | None = None) -> Tensor:
        """See `Trunk`."""
        if self._alone and len(batch) > 1:
            return torch.cat([self._run(part) for part in each(batch)])
        return self._run(batch)

    def integers(self, batch: PackedBatch) -> dict[str, NDArray[np.int64]]:
        """See `Trunk`."""
        return {"input_ids": batch.input_ids}

    def layout(self, batch: PackedBatch, offsets: Tensor | None = None, *, bound: int | None = None) -> PackedLayout:
        """See `Trunk`."""
        return PackedLayout(batch.cu_seqlens, self._device, batch.unseen, offsets=offsets, bound=bound)

    def word_embeddings(self, ids: Ids) -> Tensor:
        """See `Trunk`."""
        return self.model.get_input_embeddings()(ids["input_ids"])  # type: ignore[no-any-return]

    def _run(self, batch: PackedBatch) -> Tensor:
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
