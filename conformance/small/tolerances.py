"""How far two computations of the same thing may differ, by what is compared: absolute, for the
models of conformance/small/tiny.py."""

import platform
from pathlib import Path


def _adds_eight_bits_exactly():
    """Whether ONNX Runtime adds products of eight bits without loss: on x86 without VNNI, sums of
    two of them saturate."""
    facts = Path("/proc/cpuinfo")
    return (
        platform.machine() not in ("x86_64", "AMD64")
        or not facts.exists()
        or "vnni" in facts.read_text()
    )


EXACT_INT8 = _adds_eight_bits_exactly()
INT8 = 1 if EXACT_INT8 else 8
# Last hidden states, whose values are about 1.
HIDDEN = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.15, "int8": 0.2 * INT8}
# Elements of unit vectors
UNIT = {
    "float32": 1e-6,
    "float16": 2e-3,
    "bfloat16": 2e-2,
    "int8": 2e-2 * INT8,
}
# Of a token's, which no mean makes smoother.
MULTIVECTOR = {"float32": 2e-6, "float16": 5e-3, "bfloat16": 4e-2, "int8": 5e-2 * INT8}
# Lexical weights, SPLADE weights, raw pooled vectors.
WEIGHTS = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2, "int8": 0.1 * INT8}
COSINE = 0.99999
# Of classifiers, rerankers and taggers; scores, too
LOGITS = {"float32": 1e-5, "bfloat16": 0.15}
# Times the tolerance for T5, whose scores are not divided by the square root of a head's width:
# softmax is steeper.
UNSCALED = 2
# Least cosine to float32 of a token's state, and of a text's vector, where every number is rounded
# to bfloat16.
ROUNDED_TOKEN, ROUNDED_VECTOR = 0.999, 0.99995
