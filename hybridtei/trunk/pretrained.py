"""transformers' own modules, loaded strictly and run without padding where the family allows it.

The surprise: a batch is one row of `t` tokens, `input_ids[1, t]`; explicit position ids and the layout, handed in as a keyword
argument that travels down to our attention function, are all that tells the sequences apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridtei.batch import PackedBatch, pad, seen_mask
from hybridtei.checkpoint import tanh_gelu
from hybridtei.checkpoint.files import require
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.checkpoint.weights import left_over
from hybridtei.errors import LoadError, UnsupportedArchitecture, WeightMismatch
from hybridtei.ragged import offsets_of
from hybridtei.trunk.families import LogitsOf, is_packed, mlm_head
from hybridtei.trunk.interface import register
from hybridtei.trunk.layout import PackedLayout
from hybridtei.trunk.rope import forget_lengths


class Trunk:
    """A loaded encoder: packed batches in, last hidden states out.

    `padded`: a batch costs n * max_seqlen tokens. A model whose rotary embedding follows the length takes one sequence a
    pass, so that no text depends on its neighbours.
    """

    def __init__(self, model: Any, spec: ModelSpec, device: torch.device) -> None:
        self._model = model
        self._spec = spec
        self._device = device
        self._packed = is_packed(spec.model_type)
        self._alone = forget_lengths(model)
        self.padded = not (self._packed or self._alone)

    def __call__(self, batch: PackedBatch, layout: PackedLayout) -> Tensor:
        """Last hidden states float[t, h], flat whichever way the family runs."""
        if self._alone and len(batch) > 1:
            parts = _sequences(batch)
            return torch.cat([self(part, PackedLayout(part.cu_seqlens, self._device, part.unseen)) for part in parts])
        return self._run_packed(batch, layout) if self._packed else self._run_padded(batch)

    def word_embeddings(self, batch: PackedBatch) -> Tensor:
        """Rows of the word embedding table, without position or type: float[t, h]."""
        table = self._model.get_input_embeddings()
        return table(self._tensor(batch.input_ids))  # type: ignore[no-any-return]

    def _run_packed(self, batch: PackedBatch, layout: PackedLayout) -> Tensor:
        inputs = {"input_ids": self._tensor(batch.input_ids)[None], "position_ids": self._tensor(batch.position_ids)[None]}
        if self._spec.has_token_types:
            inputs["token_type_ids"] = self._token_types(batch)[None]
        return self._model(**inputs, **self._no_cache(), layout=layout).last_hidden_state[0]  # type: ignore[no-any-return]

    def _run_padded(self, batch: PackedBatch) -> Tensor:
        input_ids, mask = pad(batch.input_ids, batch.cu_seqlens, self._spec.padding_id)
        inputs = {"input_ids": self._tensor(input_ids), "attention_mask": self._tensor(seen_mask(mask, batch)).long()}
        if self._spec.has_token_types:
            type_ids, _ = pad(self._token_types(batch).cpu().numpy(), batch.cu_seqlens, 0)
            inputs["token_type_ids"] = self._tensor(type_ids)
        hidden = self._model(**inputs, **self._no_cache()).last_hidden_state
        return hidden[self._tensor(mask)]  # type: ignore[no-any-return]

    def _no_cache(self) -> dict[str, bool]:
        return {"use_cache": False} if "use_cache" in self._spec.config else {}

    def _token_types(self, batch: PackedBatch) -> Tensor:
        if batch.token_type_ids is None:
            return torch.zeros(len(batch.input_ids), dtype=torch.long, device=self._device)
        return self._tensor(batch.token_type_ids)

    def _tensor(self, array: Any) -> Tensor:
        return torch.as_tensor(array, device=self._device)


def _sequences(batch: PackedBatch) -> Iterator[PackedBatch]:
    """Each sequence of a batch as a batch of its own."""
    types, unseen = batch.token_type_ids, batch.unseen
    for place, (start, stop) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        yield replace(
            batch,
            input_ids=batch.input_ids[start:stop],
            position_ids=batch.position_ids[start:stop],
            token_type_ids=None if types is None else types[start:stop],
            cu_seqlens=offsets_of([stop - start]),
            unseen=None if unseen is None else unseen[place : place + 1],
        )


def load_trunk(
    spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False
) -> tuple[Trunk, LogitsOf | None]:
    """(trunk, masked-language-model head if the model is a SPLADE). Raises LoadError and its kinds."""
    from transformers import AutoModel, AutoModelForMaskedLM

    auto = AutoModelForMaskedLM if spec.is_splade else AutoModel
    model = _load(auto, spec, dtype, trust_remote_code).to(device).eval()
    if not spec.is_splade:
        return Trunk(model, spec, device), None
    return Trunk(model.base_model, spec, device), mlm_head(model, spec.model_type)


def _load(auto: Any, spec: ModelSpec, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    _weights_file(spec.folder)
    try:
        config = AutoConfig.from_pretrained(spec.folder, local_files_only=True, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, KeyError) as error:
        raise UnsupportedArchitecture(f"{spec.folder / 'config.json'}: {_first_line(error)}") from error
    if spec.tanh_gelu:
        tanh_gelu.in_config(config)
    try:
        with _quiet():
            model, report = auto.from_pretrained(
                spec.folder,
                config=config,
                dtype=dtype,
                attn_implementation=register() if is_packed(spec.model_type) else None,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that `_check` refuses them, by name
                **_without_pooler(auto, config),
            )
    except Exception as error:  # safetensors, pickle, shape and attribute errors, each of another kind
        raise LoadError(f"{spec.folder}: weights cannot be loaded: {_first_line(error)}") from error
    _check(report, spec.folder)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers prints bars and a report of unused keys at each load; what matters of it is checked here instead."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _without_pooler(auto: Any, config: Any) -> dict[str, bool]:
    """BERT-like models build a pooler that embedding checkpoints do not carry; it would be random, so it is left out."""
    from transformers import AutoModel

    if auto is not AutoModel:
        return {}
    try:
        model_class = AutoModel._model_mapping[type(config)]
    except KeyError:
        return {}
    names = inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in names else {}


def _check(report: dict[str, Any], folder: Path) -> None:
    """Every weight of the trunk in its place, none made up and none left over: config.json and weights are of one model."""
    faults = {
        "lack": sorted(name for name in report.get("missing_keys", ()) if "pooler" not in name),
        "have another shape at": sorted(str(entry) for entry in report.get("mismatched_keys", ())),
        "hold what config.json does not": left_over(report.get("unexpected_keys", ())),
    }
    for what, names in faults.items():
        if names:
            raise WeightMismatch(f"{folder}: the weights {what}: {names[:5]}, {len(names)} in all; nothing was made up")


def _weights_file(folder: Path) -> None:
    names = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    found = next((folder / name for name in names if (folder / name).exists()), folder / names[0])
    require(found)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
