"""Embedding: texts or ids in; dense, sparse and multi-vectors, or token states, out.

Everything in which two requests may differ without needing two forward passes (cut, normalisation) happens in `finish`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridtei.batch import Encoding, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import InvalidDimensions, UnsupportedHead
from hybridtei.outputs import Embeddings, Floats, HeadOutputs, SparseVectors
from hybridtei.postprocess.sparse import strongest
from hybridtei.postprocess.vectors import cut, unit
from hybridtei.ragged import Ragged, offsets_of
from hybridtei.text.reader import Input, TextReader
from hybridtei.text.tokenizer import Direction


@dataclass(frozen=True, slots=True)
class Model:
    """What tasks need to know of a loaded model."""

    spec: ModelSpec
    reader: TextReader


@dataclass(frozen=True, slots=True)
class Embed:
    """Embed `inputs`; `dimensions` cuts dense vectors, and multi-vectors where they are wider."""

    inputs: Sequence[Input]
    heads: frozenset[Head]
    truncate: bool = True
    direction: Direction = "right"
    prompt_name: str | None = None
    normalize: bool = True
    dimensions: int | None = None

    def check(self, spec: ModelSpec) -> None:
        """Raises UnsupportedHead or InvalidInput for what can be told without reading the inputs."""
        missing = self.heads - spec.heads
        if missing:
            raise UnsupportedHead(f"Model has no {_listed(missing)} output. It has: {', '.join(sorted(spec.heads))}")
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidDimensions("`dimensions` should be positive")

    def prepare(self, model: Model) -> list[Encoding]:
        """Tokenise. Raises RequestError."""
        encodings = model.reader.read(
            self.inputs, truncate=self.truncate, direction=self.direction, prompt_name=self.prompt_name
        )
        if self.dimensions is not None and self.dimensions > self._width(model.spec):
            raise InvalidDimensions("`dimensions` should be smaller than the maximum embedding dimension.")
        return encodings

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Embeddings:
        """Cut, normalise and merge what the pass computed for this task."""
        outputs = outputs.only(self.heads)
        return Embeddings(
            dense=self._dense(outputs.dense),
            sparse=_sparse(model.spec, encodings, outputs),
            multivector=self._multivector(outputs.multivector),
            tokens=outputs.tokens,
        )

    def _width(self, spec: ModelSpec) -> int:
        if Head.MULTIVECTOR in self.heads and Head.DENSE not in self.heads and spec.multivector is not None:
            return spec.multivector.dim
        return spec.dense_width

    def _dense(self, dense: Floats | None) -> Floats | None:
        if dense is None:
            return None
        dense = cut(dense, self.dimensions)
        return unit(dense) if self.normalize else np.ascontiguousarray(dense)

    def _multivector(self, multivector: Ragged | None) -> Ragged | None:
        if multivector is None:
            return None
        return Ragged(unit(cut(multivector.values, self.dimensions)), multivector.offsets)


def _sparse(spec: ModelSpec, encodings: Sequence[Encoding], outputs: HeadOutputs) -> SparseVectors | None:
    if outputs.token_weights is None:
        return outputs.splade
    input_ids = np.concatenate([encoding.input_ids for encoding in encodings])
    cu_seqlens = offsets_of([len(encoding) for encoding in encodings])
    return strongest(input_ids, outputs.token_weights.values, cu_seqlens, spec.removed_ids, spec.vocab_size)


def _listed(heads: frozenset[Head]) -> str:
    return ", ".join(f"`{head}`" for head in sorted(heads))
