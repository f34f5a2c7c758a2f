"""Compares an approximation of a model with its exact form by the vectors of the sample texts of
samples.json: short and long, prose, questions, code, several languages, several on one matter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hybridtei.batch import Encoding, Head, pack
from hybridtei.errors import LoadError
from hybridtei.inference.backends.base import Backend
from hybridtei.models.checkpoint.files import read_json
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.tokenizer import Tokenizer
from hybridtei.outputs import Floats

SAMPLES = Path(__file__).with_name("samples.json")
NEIGHBOURS = 10
SAMPLE_TOKENS = 256
# Beyond 256, where bfloat16 does not have every whole number.
LONG_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Guard:
    """The least fidelity of an approximation: worst and mean cosine of the sample texts' vectors,
    and `overlap`."""

    worst: float = 0.97
    mean: float = 0.99
    overlap: float = 0.0

    def __str__(self) -> str:
        text = f"{self.worst} at worst, {self.mean} on average"
        return f"{text}, {self.overlap:.0%} of neighbours" if self.overlap else text


@dataclass(frozen=True, slots=True)
class Fidelity:
    """The measured fidelity. `overlap`: the share of each text's nearest neighbours that stay the
    same."""

    worst: float
    mean: float
    overlap: float

    def passes(self, guard: Guard) -> bool:
        return (
            self.worst >= guard.worst and self.mean >= guard.mean and self.overlap >= guard.overlap
        )

    def __str__(self) -> str:
        return (
            f"cosine {self.worst:.4f} at worst, {self.mean:.4f} on average; {self.overlap:.1%} of "
            "neighbours kept"
        )


def compare(exact: Backend, approximate: Backend) -> Fidelity:
    """Measure the fidelity of one backend to another one of the same model."""
    return fidelity(sample_vectors(approximate), sample_vectors(exact))


def check(figures: Fidelity, guard: Guard, spec: ModelSpec, what: str) -> None:
    """Raises LoadError with the figures, beginning with `what`, if an approximation is too far
    off."""
    if not figures.passes(guard):
        raise LoadError(f"{spec.folder}: {what} for this model: {figures}; asked for: {guard}")


def fidelity(ours: Floats, theirs: Floats) -> Fidelity:
    """The fidelity of unit vectors float32[n, d] to the exact ones."""
    cosines = (ours * theirs).sum(1)
    neighbours, expected = _neighbours(ours), _neighbours(theirs)
    overlaps = [
        len(set(row) & set(expected_row)) / len(row)
        for row, expected_row in zip(neighbours, expected, strict=True)
    ]
    return Fidelity(float(cosines.min()), float(cosines.mean()), float(np.mean(overlaps)))


def sample_vectors(backend: Backend, *, with_long: bool = False) -> Floats:
    """Unit vectors float32[n, d] of the sample texts, each embedded alone. For a model without text
    vectors, such as a reranker, the means of token states. `with_long`: also of one text of
    `LONG_TOKENS`."""
    spec = backend.spec
    head = Head.TOKENS
    if spec.is_splade:
        head = Head.SPARSE
    elif Head.DENSE in spec.heads:
        head = Head.DENSE
    encodings = sample_encodings(spec)
    if with_long:
        ids = np.concatenate([encoding.input_ids for encoding in encodings])
        encodings.append(Encoding(ids[: min(spec.max_input_length, LONG_TOKENS)]))
    outputs = [
        backend.forward(pack([encoding], frozenset({head}), spec.positions))
        for encoding in encodings
    ]
    rows = [
        output.dense if output.splade is None else output.splade.to_dense() for output in outputs
    ]
    means = [
        output.tokens.values.mean(0, keepdims=True)
        for output in outputs
        if output.tokens is not None
    ]
    vectors = np.concatenate([row for row in rows if row is not None] or means)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, np.float32(1e-12)))


def sample_encodings(spec: ModelSpec) -> list[Encoding]:
    """The encodings of the sample texts. They cycle through the model's adapters."""
    settings = spec.tokenizer_settings
    tokenizer = Tokenizer.load(
        spec.folder / "tokenizer.json", has_token_types=spec.has_token_types, settings=settings
    )
    longest = min(spec.max_input_length, SAMPLE_TOKENS)
    encodings = [
        tokenizer.cut(raw, longest, "right") for raw in tokenizer.encode(read_json(SAMPLES))
    ]
    choices = 1 if spec.adapters is None else 1 + len(spec.adapters.names)
    return [
        replace(encoding, adapter=i % choices)
        for i, encoding in enumerate(encodings)
        if len(encoding)
    ]


def _neighbours(vectors: Floats) -> list[list[int]]:
    similarity = vectors @ vectors.T
    np.fill_diagonal(similarity, -np.inf)
    count = min(NEIGHBOURS, len(vectors) - 1)
    nearest: list[list[int]] = np.argsort(-similarity, axis=1)[:, :count].tolist()
    return nearest
