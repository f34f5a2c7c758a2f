"""How far two computations of the same thing may differ, by what is compared: absolute, for the models of tests/tiny.py."""

from __future__ import annotations

HIDDEN = {"float32": 1e-5, "bfloat16": 0.15}  # last hidden states, whose values are about 1
UNIT = {"float32": 1e-6, "bfloat16": 2e-2}  # elements of unit vectors
WEIGHTS = {"float32": 1e-5}  # lexical weights, SPLADE weights, raw pooled vectors
COSINE = 0.99999
