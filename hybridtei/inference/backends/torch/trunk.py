"""A loaded encoder: packed batches -> last hidden states, without padding for known families.

`PackedTrunk` runs a module of `ops`. Without a family, `PaddedTrunk` runs transformers' modules on
a padded batch, with their own attention and mask: slower, with transformers' exact results. The
self-test at load checks that a text does not depend on its neighbours.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from hybridtei.batch import PackedBatch, each, pad, seen_mask
from hybridtei.inference.backends.torch.kernels import KERNELS, Form, Kernel, kernel_for
from hybridtei.inference.backends.torch.layout import PackedLayout

if TYPE_CHECKING:
    from hybridtei.models.checkpoint.spec import ModelSpec

# A batch's integers on the device, int64[t] each, by the module's names
Ids = Mapping[str, Tensor]
BLOCKS = "block_sparse"


class PackedTrunk:
    """Runs a family's module. `kernel` computes attention.

    `padded`: a batch costs n * max_seqlen tokens. `causal`: no token attends to a later one, so
    prefixes can be computed once.
    `attention`: the kernel's name.
    """

    padded = False

    def __init__(
        self,
        model: fx.GraphModule,
        forms: frozenset[Form],
        spec: ModelSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        words: str | None = None,
    ) -> None:
        """`forms`: the layers' forms of attention. `words`: the table of word embeddings in
        `model`, if a head reads it."""
        self.model = model
        self.forms = forms
        self.causal = all(heads.causal for heads, _ in forms)
        self._spec = spec
        self._device = device
        self._words = words
        self.attention = kernel_for(forms, dtype, device)
        self.kernel: Kernel = KERNELS[self.attention]

    def __call__(self, batch: PackedBatch, layout: PackedLayout, ids: Ids) -> Tensor:
        """Compute the last hidden states float[t, h], flat for every kind of model. `ids`: the
        batch on the device."""
        hidden: Tensor = self.model(ids, layout)
        return hidden

    def integers(self, batch: PackedBatch) -> dict[str, NDArray[np.int64]]:
        """The integers of `ids`. Zeros for inputs of the model that the batch lacks."""
        integers = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        if self._spec.has_token_types:
            integers["token_type_ids"] = (
                0 * batch.input_ids if batch.token_type_ids is None else batch.token_type_ids
            )
        if self._spec.adapters is not None:
            integers["adapter_ids"] = (
                0 * batch.input_ids if batch.adapter_ids is None else batch.adapter_ids
            )
        return integers

    def layout(self, batch: PackedBatch, offsets: Tensor | None = None) -> PackedLayout:
        """The layout of a batch, with this trunk's attention. `offsets`: as in `PackedLayout`."""
        return PackedLayout(
            batch.cu_seqlens, self._device, batch.unseen, kernel=self.kernel, offsets=offsets
        )

    def word_embeddings(self, ids: Ids) -> Tensor:
        """The rows float[t, h] of the word embedding table, without position or type."""
        assert self._words is not None
        return torch.nn.functional.embedding(ids["input_ids"], getattr(self.model, self._words))


class PaddedTrunk:
    """Runs transformers' modules. A model with a length-dependent rotary embedding takes one
    sequence a pass, so that no text depends on its neighbours; so does BigBird with blocks, which a
    short batch turns off for good."""

    causal = False
    attention = "transformers' own"

    def __init__(self, model: Any, spec: ModelSpec, device: torch.device) -> None:
        self.model = model
        self._spec = spec
        self._device = device
        self._blocks: Lock | None = None
        if getattr(model.config, "attention_type", None) == BLOCKS:
            self._blocks = Lock()
        self._alone = forget_lengths(model) or self._blocks is not None
        self.padded = not self._alone

    def __call__(self, batch: PackedBatch, layout: PackedLayout, ids: Ids) -> Tensor:
        if self._alone and len(batch) > 1:
            return torch.cat([self._run(part) for part in each(batch)])
        return self._run(batch)

    def integers(self, batch: PackedBatch) -> dict[str, NDArray[np.int64]]:
        return {"input_ids": batch.input_ids}

    def layout(self, batch: PackedBatch, offsets: Tensor | None = None) -> PackedLayout:
        return PackedLayout(batch.cu_seqlens, self._device, batch.unseen, offsets=offsets)

    def word_embeddings(self, ids: Ids) -> Tensor:
        return self.model.get_input_embeddings()(ids["input_ids"])  # type: ignore[no-any-return]

    def _run(self, batch: PackedBatch) -> Tensor:
        input_ids, mask = pad(batch.input_ids, batch.cu_seqlens, self._spec.padding_id)
        inputs: dict[str, Any] = {
            "input_ids": self._tensor(input_ids),
            "attention_mask": self._tensor(seen_mask(mask, batch)).long(),
        }
        if self._spec.has_token_types:
            types = batch.token_type_ids
            padded = pad(types, batch.cu_seqlens, 0)[0] if types is not None else 0 * input_ids
            inputs["token_type_ids"] = self._tensor(padded)
        if "use_cache" in self._spec.config:
            inputs["use_cache"] = False
        if self._blocks is None:
            hidden = self.model(**inputs).last_hidden_state
        else:
            with self._blocks:
                self.model.set_attention_type(BLOCKS)
                hidden = self.model(**inputs).last_hidden_state
        states: Tensor = hidden.flatten(0, 1)[self._tensor(np.flatnonzero(mask))]
        return states

    def _tensor(self, array: Any) -> Tensor:
        return torch.as_tensor(array, device=self._device)


Trunk = PackedTrunk | PaddedTrunk


def forget_lengths(model: Any) -> bool:
    """True if a rotary embedding of the model depends on the length. From now on it forgets earlier
    lengths."""
    following = [module for module in model.modules() if _follows_length(module)]
    for module in following:
        module.forward = _Fresh(module)
    return bool(following)


def _follows_length(module: Any) -> bool:
    declared = getattr(module, "rope_type", None)
    # One for all layers, or one for each kind of layer
    kinds = declared.values() if isinstance(declared, dict) else [declared]
    return any(
        isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds
    )


class _Fresh:
    """Calls a fresh copy of the module each time, since longrope writes into the module's
    buffers."""

    def __init__(self, module: Any) -> None:
        self._pristine = _copy(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _copy(self._pristine)(*args, **kwargs)


def _copy(module: Any) -> Any:
    twin = copy.copy(module)
    twin._buffers = {
        name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()
    }
    return twin
