"""A text whose states become NaN spoils no other text of its batch, in every engine."""

import numpy as np
import pytest

from conformance.families.oracle import ENGINES, open_engine
from conformance.small import tiny
from hybridtei.batch import Encoding
from hybridtei.models.checkpoint.spec import read_spec
from tests.inference.backends.outputs import near, states

POISON = 7
# Finite in float32, as a checkpoint's numbers must be; a product or sum of it is not
LARGE = 3e38
EMBEDDINGS = ("word_embeddings.weight", "embed_tokens.weight", "tok_embeddings.weight")
FAMILIES = ("bert", "mpnet", "deberta-v2", "modernbert", "qwen2", "mistral")
LENGTHS = (20, 40, 3)


def with_poison(tensors):
    """The tensors, changed so that the states of POISON become NaN, and no other token's.

    A layer norm of its embedding overflows. An RMS norm's does not: there, values of the first
    layer overflow by a column that every other token multiplies by zero.
    """
    tensors = dict(tensors)
    name = next(name for name in tensors if name.endswith(EMBEDDINGS))
    embeddings = tensors[name].clone()
    products = next((name for name in tensors if name.endswith("0.self_attn.v_proj.weight")), None)
    if products is None:
        embeddings[POISON] = -LARGE
        embeddings[POISON, 0] = LARGE
    else:
        embeddings[:, 0] = 0
        embeddings[POISON, 0] = 1000
        tensors[products] = tensors[products].clone()
        tensors[products][:, 0] = LARGE
    tensors[name] = embeddings
    return tensors


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_is_nan_spoils_no_other_text(tmp_path, family, engine):
    folder = tiny.write_family(tmp_path / "model", family)
    tiny.change(folder, with_poison)
    spec = read_spec(folder, pooling="mean")
    draw = np.random.default_rng(0)
    clean = [Encoding(draw.integers(10, spec.vocab_size, length)) for length in LENGTHS]
    backend = open_engine(engine, spec)
    expected = states(backend, clean)
    for poisoned_token in (0, 4):
        ids = draw.integers(10, spec.vocab_size, 12)
        ids[poisoned_token] = POISON
        for place in range(len(clean) + 1):
            texts = [*clean[:place], Encoding(ids), *clean[place:]]
            rows = [*states(backend, texts)]
            poisoned = rows.pop(place)
            assert not np.isfinite(poisoned).all()
            for row, alone in zip(rows, expected, strict=True):
                near(row, alone)
    backend.close()
