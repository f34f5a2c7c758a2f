"""How close an approximation of a model is to its exact form, by the vectors of sample texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from hybridtei.backends.sample_texts import SAMPLE
from hybridtei.batch import Encoding, Head, PackedBatch, pack
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.errors import LoadError
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.text.tokenizer import Tokenizer

NEIGHBOURS = 10
SAMPLE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Guard:
    """How close an approximation must be: cosines of the vectors of sample texts, the worst and on average, and `overlap`."""

    worst: float = 0.97
    mean: float = 0.99
    overlap: float = 0.0

    def __str__(self) -> str:
        asked = f"{self.worst} at worst, {self.mean} on average"
        return f"{asked}, {self.overlap:.0%} of neighbours" if self.overlap else asked


@dataclass(frozen=True, slots=True)
class Fidelity:
    """How close it is. `overlap`: share of each text's nearest neighbours among the others that are the same."""

    worst: float
    mean: float
    overlap: float

    def passes(self, guard: Guard) -> bool:
        return self.worst >= guard.worst and self.mean >= guard.mean and self.overlap >= guard.overlap

    def __str__(self) -> str:
        return f"cosine {self.worst:.4f} at worst, {self.mean:.4f} on average; {self.overlap:.1%} of neighbours kept"


class Forward(Protocol):
    """What computes a batch, as `backends.base.Backend` does."""

    @property
    def spec(self) -> ModelSpec: ...

    def forward(self, batch: PackedBatch) -> HeadOutputs: ...


def compare(exact: Forward, approximate: Forward) -> Fidelity:
    """How close two backends of one model are, by the same texts."""
    return fidelity(sample_vectors(approximate), sample_vectors(exact))


def check(found: Fidelity, guard: Guard, spec: ModelSpec, what: str) -> None:
    """Raise LoadError with the figures, beginning with `what`, where an approximation is too far off."""
    if not found.passes(guard):
        raise LoadError(f"{spec.folder}: {what} for this model: {found}; asked for: {guard}")


def fidelity(ours: Floats, theirs: Floats) -> Fidelity:
    """Of unit vectors float32[n, d] to the exact ones."""
    cosines = (ours * theirs).sum(1)
    found, expected = _neighbours(ours), _neighbours(theirs)
    kept = [len(set(one) & set(other)) / len(one) for one, other in zip(found, expected, strict=True)]
    return Fidelity(float(cosines.min()), float(cosines.mean()), float(np.mean(kept)))


def sample_vectors(backend: Forward) -> Floats:
    """Unit vectors float32[n, d] of the sample texts, each alone."""
    spec = backend.spec
    head = Head.SPARSE if spec.is_splade else Head.DENSE
    outputs = [backend.forward(pack([one], frozenset({head}), spec.positions)) for one in sample_encodings(spec)]
    rows = [one.dense if one.splade is None else one.splade.to_dense() for one in outputs]
    vectors = np.concatenate([row for row in rows if row is not None])
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12)))


def sample_encodings(spec: ModelSpec, texts: Sequence[str] = SAMPLE) -> list[Encoding]:
    """The sample texts in tokens, of every adapter in turn."""
    tokenizer = Tokenizer.load(spec.folder / "tokenizer.json", has_token_types=spec.has_token_types)
    longest = min(spec.max_input_length, SAMPLE_TOKENS)
    encodings = [tokenizer.cut(raw, longest, "right") for raw in tokenizer.encode(texts)]
    choices = 1 if spec.adapters is None else 1 + len(spec.adapters.names)
    return [replace(encoding, adapter=i % choices) for i, encoding in enumerate(encodings) if len(encoding)]


def _neighbours(vectors: Floats) -> list[list[int]]:
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    nearest: list[list[int]] = np.argsort(-similarity, axis=1)[:, : min(NEIGHBOURS, len(vectors) - 1)].tolist()
    return nearest
