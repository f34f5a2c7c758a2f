"""A table of token vectors; a text's vector is their mean (StaticEmbedding, Model2Vec). There is no
runtime and no trunk.

Tokenising a text takes longer than looking it up. Vectors are added text by text, which stays in a
core's cache.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hybridtei.batch import Head, PackedBatch, Padding
from hybridtei.inference.backends.base import Backend
from hybridtei.inference.backends.graph.host import HostHeads
from hybridtei.inference.backends.heads import Segments, counts, through
from hybridtei.inference.backends.numpy_functions import NUMPY
from hybridtei.models.checkpoint.layers import static_table, step_layer
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.outputs import HeadOutputs
from hybridtei.system.machine import available_cores, both_lanes


class StaticBackend(Backend):
    """A table's `Backend`."""

    name = "static"
    dtype = "float32"
    padding = Padding.NONE
    busy_tokens = 16_384
    fills_cores = True
    is_table = True

    def __init__(self, spec: ModelSpec) -> None:
        """Raises LoadError."""
        super().__init__(spec)
        self.lanes = both_lanes(available_cores())
        self._table = static_table(spec)
        self._heads = HostHeads(spec)
        self._layers = [step_layer(module) for module in spec.kind.steps]

    def forward(self, batch: PackedBatch, *, use_all_cores: bool = False) -> HeadOutputs:
        """Look up every token in one pass."""
        self.count()
        if batch.heads != {Head.DENSE}:
            return self._heads.outputs(batch, self._table[batch.input_ids])
        means = np.empty((len(batch), self._table.shape[1]), dtype=np.float32)
        for row, (begin, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
            np.add.reduce(self._table[batch.input_ids[begin:end]], axis=0, out=means[row])
        means /= counts(NUMPY, Segments(batch.cu_seqlens, batch.cu_seqlens))
        return HeadOutputs(dense=through(NUMPY, means, self._layers))

    def close(self) -> None:
        """Free the table."""
        del self._table
