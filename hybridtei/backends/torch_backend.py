"""PyTorch: a packed batch to the device, the trunk once, each wanted head once, arrays back."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridtei.batch import Head, PackedBatch, kept_tokens
from hybridtei.checkpoint.classifier_layers import classifier_layers
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.cores import available_cores
from hybridtei.errors import BackendError
from hybridtei.heads.classify import classify, tag
from hybridtei.heads.dense import dense
from hybridtei.heads.multivector import multivector
from hybridtei.heads.parameters import classifier_parameters, dense_layer, lexical_weights, multivector_weights
from hybridtei.heads.sparse import lexical, lexical_inputs
from hybridtei.heads.splade import splade
from hybridtei.lanes import LaneKind, both_lanes
from hybridtei.outputs import HeadOutputs, SparseVectors
from hybridtei.ragged import Ragged
from hybridtei.trunk.layout import PackedLayout
from hybridtei.trunk.pretrained import load_trunk

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Two cores reach their full rate with a few hundred tokens; a GPU needs thousands.
BUSY_TOKENS = {"cpu": 1024, "cuda": 16384}


class TorchBackend:
    """See `backends.base.Backend`."""

    name = "torch"
    fills_cores = True

    def __init__(
        self, spec: ModelSpec, *, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.forwards = 0
        self.busy_tokens = BUSY_TOKENS.get(device, 4096)
        self.lanes = both_lanes(available_cores()) if device == "cpu" else (LaneKind.BULK,)
        self._counting = threading.Lock()
        self._device = torch.device(device)
        number = DTYPES[dtype]
        self._trunk, self._logits_of = load_trunk(spec, dtype=number, device=self._device, trust_remote_code=trust_remote_code)
        self.padded = self._trunk.padded
        self._dense_layers = [dense_layer(module, self._device) for module in spec.dense_modules]
        if spec.sparse is not None and not spec.is_splade:
            self._lexical = lexical_weights(spec.sparse, spec.hidden_size, number, self._device)
        if spec.multivector is not None:
            self._projection = multivector_weights(spec.multivector, spec.hidden_size, number, self._device)
            self._before = [dense_layer(module, self._device) for module in spec.multivector.before]
        if spec.classifier is not None:
            arrays = classifier_layers(spec.classifier, spec.folder, spec.hidden_size)
            self._classifier = classifier_parameters(arrays, self._device)
        self._special_ids = np.array(sorted(spec.removed_ids), dtype=np.int64)

    def forward(self, batch: PackedBatch, *, wide: bool = False) -> HeadOutputs:
        """See `Backend.forward`. Teams of threads cost more than they bring here, so `wide` changes nothing."""
        try:
            with torch.inference_mode():
                return self._forward(batch)
        except Exception as error:  # torch, transformers and a model's own code each raise their own kinds
            raise BackendError(f"the forward pass failed: {error}") from error

    def enter_lane(self, kind: LaneKind) -> None:
        """On a CPU each lane computes alone in its own thread: a team of threads that must meet after each operation
        loses most of its speed as soon as one core has anything else to do (measured: a factor of four)."""
        if self._device.type == "cpu":
            torch.set_num_threads(1)

    def close(self) -> None:
        """Give the weights back."""
        del self._trunk

    def _forward(self, batch: PackedBatch) -> HeadOutputs:
        layout = PackedLayout(batch.cu_seqlens, self._device, batch.unseen)
        hidden = self._trunk(batch, layout)
        with self._counting:
            self.forwards += 1
        return HeadOutputs(
            dense=self._dense(hidden, layout) if Head.DENSE in batch.heads else None,
            token_weights=self._token_weights(batch, hidden) if self._wants_lexical(batch) else None,
            splade=self._splade(hidden, layout) if self.spec.is_splade and Head.SPARSE in batch.heads else None,
            multivector=self._multivector(batch, hidden) if Head.MULTIVECTOR in batch.heads else None,
            tokens=Ragged(_numpy(hidden), batch.cu_seqlens) if Head.TOKENS in batch.heads else None,
            scores=self._scores(hidden, layout) if Head.SCORES in batch.heads else None,
            tags=Ragged(_numpy(tag(hidden, self._classifier)), batch.cu_seqlens) if Head.TAGS in batch.heads else None,
        )

    def _scores(self, hidden: Tensor, layout: PackedLayout) -> NDArray[np.float32]:
        assert self.spec.classifier is not None
        return _numpy(classify(hidden, layout, self.spec.classifier.pooling, self._classifier))

    def _wants_lexical(self, batch: PackedBatch) -> bool:
        return Head.SPARSE in batch.heads and not self.spec.is_splade

    def _dense(self, hidden: Tensor, layout: PackedLayout) -> NDArray[np.float32]:
        return _numpy(dense(hidden, layout, self.spec.pooling, self._dense_layers))

    def _token_weights(self, batch: PackedBatch, hidden: Tensor) -> Ragged:
        assert self.spec.sparse is not None
        names = self.spec.sparse.inputs
        embeddings = self._trunk.word_embeddings(batch) if "embedding" in names else None
        weights = lexical(lexical_inputs(hidden, embeddings, names), self._lexical)
        return Ragged(_numpy(weights), batch.cu_seqlens)

    def _splade(self, hidden: Tensor, layout: PackedLayout) -> SparseVectors:
        assert self._logits_of is not None
        return SparseVectors.from_dense(_numpy(splade(hidden, layout, self._logits_of)))

    def _multivector(self, batch: PackedBatch, hidden: Tensor) -> Ragged:
        assert self.spec.multivector is not None
        kept, offsets = kept_tokens(self.spec.multivector.drop, batch.input_ids, batch.cu_seqlens, self._special_ids)
        rows = tag(hidden, self._before).to(hidden.dtype) if self._before else hidden
        rows = multivector(rows, torch.as_tensor(kept, device=self._device), *self._projection)
        return Ragged(_numpy(rows), offsets)


def _numpy(tensor: Tensor) -> NDArray[np.float32]:
    return tensor.float().cpu().numpy()
