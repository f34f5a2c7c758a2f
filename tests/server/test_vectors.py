"""Ranges of the embedded model, which int8 outputs need and nobody has to give."""

from __future__ import annotations

import numpy as np

from hybridtei.encoder import Encoder
from hybridtei.inference.tasks.quantize import BUCKETS, quantized
from hybridtei.server.vectors import EMBEDDED_RANGES, ranges_in

TEXTS = ["The display shows E41.", "Beethoven was born in Bonn.", "def main() -> None: ...", "Tomatoes need six hours of sun."]


def test_the_embedded_models_ranges_hold_what_it_gives() -> None:
    ranges = ranges_in(EMBEDDED_RANGES)
    encoder = Encoder.load(measures=False)
    for width in (64, 128, 192, 256, 384):
        least, most = ranges.get(f"dense_{width}", ranges["dense"])
        dense = encoder.encode(TEXTS, dimensions=width).dense
        assert dense is not None
        places = quantized(dense, "uint8", np.stack([least, most])).astype(np.float32) + 0.5
        again = least + places * (most - least) / BUCKETS
        cosines = (again * dense).sum(1) / np.linalg.norm(again, axis=1)
        assert cosines.min() > 0.99
    assert encoder.spec.multivector is not None
    assert ranges["multivector"].shape == (2, encoder.spec.multivector.dim)
