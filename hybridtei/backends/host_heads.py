"""All of a model's heads on hidden states that lie on the host, for backends whose graph computes the trunk only."""

from __future__ import annotations

import numpy as np

from hybridtei.backends import numpy_heads
from hybridtei.backends.mlm_head import MlmHead
from hybridtei.batch import Head, PackedBatch, kept_tokens
from hybridtei.checkpoint.layers import classifier_layers, dense_layer, lexical_layers, multivector_layer
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.ragged import Ragged


class HostHeads:
    """The heads that `spec` has. `words`: the table of word embeddings, where the lexical head reads it. `mlm`: for SPLADE."""

    def __init__(self, spec: ModelSpec, words: Floats | None = None, mlm: MlmHead | None = None) -> None:
        self.spec = spec
        self._words = words
        self._mlm = mlm
        self._dense_layers = [dense_layer(module) for module in spec.dense_modules]
        self._lexical = () if spec.sparse is None or spec.is_splade else lexical_layers(spec.sparse, spec.hidden_size)
        self._projection = None if spec.multivector is None else multivector_layer(spec.multivector, spec.hidden_size)
        self._before = [] if spec.multivector is None else [dense_layer(module) for module in spec.multivector.before]
        head = spec.classifier
        self._classifier = () if head is None else classifier_layers(head, spec.folder, spec.hidden_size)
        self._special_ids = np.array(sorted(spec.removed_ids), dtype=np.int64)

    def outputs(self, batch: PackedBatch, hidden: Floats, *, wide: bool = False) -> HeadOutputs:
        """What the riders of a batch want, from its hidden states float32[t, h]. `wide`: see `Backend.forward`."""
        sparse, splade = Head.SPARSE in batch.heads, self._mlm
        return HeadOutputs(
            dense=self._dense(batch, hidden) if Head.DENSE in batch.heads else None,
            token_weights=self._token_weights(batch, hidden) if sparse and splade is None else None,
            splade=splade.splade(hidden, batch.cu_seqlens, wide=wide) if sparse and splade is not None else None,
            multivector=self._multivector(batch, hidden) if Head.MULTIVECTOR in batch.heads else None,
            tokens=Ragged(hidden, batch.cu_seqlens) if Head.TOKENS in batch.heads else None,
            scores=self._scores(batch, hidden) if Head.SCORES in batch.heads else None,
            tags=self._tags(batch, hidden) if Head.TAGS in batch.heads else None,
        )

    def _scores(self, batch: PackedBatch, hidden: Floats) -> Floats:
        assert self.spec.classifier is not None
        return numpy_heads.classify(hidden, batch.cu_seqlens, self.spec.classifier.pooling, self._classifier)

    def _tags(self, batch: PackedBatch, hidden: Floats) -> Ragged:
        return Ragged(numpy_heads.tag(hidden, self._classifier), batch.cu_seqlens)

    def _dense(self, batch: PackedBatch, hidden: Floats) -> Floats:
        return numpy_heads.dense(hidden, batch.cu_seqlens, self.spec.pooling, self._dense_layers)

    def _token_weights(self, batch: PackedBatch, hidden: Floats) -> Ragged:
        assert self.spec.sparse is not None
        sources = {"hidden": hidden}
        if self._words is not None:
            sources["embedding"] = numpy_heads.layer_norm(self._words[batch.input_ids])
        inputs = np.concatenate([sources[name] for name in self.spec.sparse.inputs], axis=1)
        return Ragged(numpy_heads.lexical(inputs, self._lexical), batch.cu_seqlens)

    def _multivector(self, batch: PackedBatch, hidden: Floats) -> Ragged:
        assert self.spec.multivector is not None
        assert self._projection is not None
        kept, offsets = kept_tokens(self.spec.multivector.drop, batch.input_ids, batch.cu_seqlens, self._special_ids)
        return Ragged(numpy_heads.through(numpy_heads.tag(hidden[kept], self._before), self._projection), offsets)
