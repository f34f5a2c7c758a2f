"""The heads of a model on its device: hidden states in, tensors out, by name; and these, on the host, as `HeadOutputs`.

Everything a request wants of a pass is computed before anything is copied. Loading is `load`'s work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hybridtei.backends.torch.host_copy import Arrays
from hybridtei.backends.torch.layout import PackedLayout
from hybridtei.backends.torch.pooled import DenseLayer, Layer, classify, dense, multivector, rounded, tag
from hybridtei.backends.torch.sparse import LexicalWeights, lexical, lexical_inputs, splade
from hybridtei.batch import Head, Offsets, PackedBatch, Ragged, kept_tokens, offsets_of
from hybridtei.outputs import HeadOutputs, SparseVectors

if TYPE_CHECKING:
    from hybridtei.checkpoint.spec import ModelSpec

LogitsOf = Callable[[Tensor], Tensor]  # hidden states float[t, h] -> logits float[t, v]
KEPT = "kept"  # among a batch's integers: rows of the tokens that have a vector


@dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """The layers of whatever heads a model has, on its device."""

    dense: Sequence[DenseLayer] = ()
    lexical: LexicalWeights | None = None
    projection: tuple[Tensor, Tensor | None] | None = None
    before: Sequence[DenseLayer] = ()
    classifier: Sequence[Layer] = ()
    logits_of: LogitsOf | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """What a batch's heads need besides the batch: integers for the device, and offsets of the multi-vectors."""

    integers: Mapping[str, Offsets] = field(default_factory=dict)
    multivector: Offsets | None = None


def wanted(batch: PackedBatch, spec: ModelSpec) -> Wanted:
    """See `Wanted`."""
    if Head.MULTIVECTOR not in batch.heads or spec.multivector is None:
        return Wanted()
    special = np.array(sorted(spec.removed_ids), dtype=np.int64)
    kept, offsets = kept_tokens(spec.multivector.drop, batch.input_ids, batch.cu_seqlens, special)
    return Wanted({KEPT: np.flatnonzero(kept)}, offsets)


def wants_words(batch: PackedBatch, spec: ModelSpec) -> bool:
    """Whether a head that is wanted sees word embeddings, too."""
    return Head.SPARSE in batch.heads and spec.sparse is not None and "embedding" in spec.sparse.inputs


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """What heads see: hidden states float[t, h], where sequences lie, word embeddings float[t, h], rows that have vectors."""

    hidden: Tensor
    layout: PackedLayout
    embeddings: Tensor | None = None
    kept: Tensor | None = None


def compute(states: States, heads: frozenset[Head], spec: ModelSpec, weights: HeadWeights) -> dict[str, Tensor]:
    """Each head that is wanted, by the name of its column in `HeadOutputs`; SPLADE's vectors in three parts."""
    hidden, layout, found = states.hidden, states.layout, dict[str, Tensor]()
    if Head.DENSE in heads:
        vectors = dense(hidden, layout, spec.pooling, weights.dense)
        found["dense"] = rounded(vectors) if spec.is_rounded else vectors
    if Head.SPARSE in heads and spec.is_splade:
        assert weights.logits_of is not None
        found |= _sparse(splade(hidden, layout, weights.logits_of))
    elif Head.SPARSE in heads:
        assert spec.sparse is not None
        assert weights.lexical is not None
        found["token_weights"] = lexical(lexical_inputs(hidden, states.embeddings, spec.sparse.inputs), weights.lexical)
    if Head.MULTIVECTOR in heads:
        assert states.kept is not None
        assert weights.projection is not None
        rows = tag(hidden, weights.before).to(hidden.dtype) if weights.before else hidden
        found["multivector"] = multivector(rows, states.kept, *weights.projection)
    if Head.TOKENS in heads:
        found["tokens"] = hidden
    if Head.SCORES in heads:
        assert spec.classifier is not None
        found["scores"] = classify(hidden, layout, spec.classifier.pooling, weights.classifier)
    if Head.TAGS in heads:
        found["tags"] = tag(hidden, weights.classifier)
    return found


def outputs_of(arrays: Arrays, batch: PackedBatch, wanted: Wanted, vocab_size: int) -> HeadOutputs:
    """What came to the host, as columns."""
    of_tokens = {name: Ragged(arrays[name], batch.cu_seqlens) for name in ("token_weights", "tokens", "tags") if name in arrays}
    vectors = None
    if "multivector" in arrays:
        assert wanted.multivector is not None
        vectors = Ragged(arrays["multivector"], wanted.multivector)
    entries = None
    if "splade_values" in arrays:
        offsets = offsets_of(arrays["splade_lengths"])
        entries = SparseVectors(arrays["splade_indices"], arrays["splade_values"], offsets, vocab_size)
    return HeadOutputs(dense=arrays.get("dense"), splade=entries, multivector=vectors, scores=arrays.get("scores"), **of_tokens)


def _sparse(rows: Tensor) -> dict[str, Tensor]:
    """The entries of float[n, v] that are not zero: they are few, and all of it would be hundreds of megabytes to copy."""
    row, column = rows.nonzero(as_tuple=True)
    return {
        "splade_indices": column,
        "splade_values": rows[row, column],
        "splade_lengths": torch.bincount(row, minlength=len(rows)),
    }
