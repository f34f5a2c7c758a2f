"""Texts, and vectors of them side by side."""

from conformance.small import tolerances, vocabulary
from tests.near import near

TEXTS = vocabulary.texts(24)
EVERYTHING = ("dense", "sparse", "multivector", "tokens")


def dense_of(encoder, texts=TEXTS, **options):
    return encoder.encode(texts, **options).dense


def close(ours, theirs, tolerance=tolerances.WEIGHTS["float32"]):
    near(ours, theirs, tolerance)
