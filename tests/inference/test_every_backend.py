"""The same laws on every backend and precision that runs here: one oracle, one tolerance a
precision, one set of refusals."""

from importlib.util import find_spec

import numpy as np
import pytest

from conformance.small import tolerances, vocabulary
from hybridtei.encoder import Encoder
from hybridtei.inference.backends.select import DTYPES, why_not
from hybridtei.models.checkpoint.spec import read_spec
from hybridtei.outputs import Embeddings
from tests.inference.backends.graph.test_int8 import LOOSE
from tests.near import near
from tests.precisions import runs_here

EVERYTHING = ("dense", "sparse", "multivector", "tokens")
COMBINATIONS = [
    (name, dtype)
    for name, dtypes in DTYPES.items()
    for dtype in dtypes
    if dtype != "fp8" and runs_here(name, dtype)
]
TEXTS = vocabulary.texts(64)
BAD = {
    "empty": ([""], {}),
    "no ids": ([[]], {}),
    "an id outside the vocabulary": ([[10**6]], {}),
    "an id that is none": ([[2**40]], {}),
    "a negative id": ([[-1]], {}),
    "a number": ([3], {}),
    "none": ([None], {}),
    "too long": (["baka " * 500], {"truncate": False}),
    "far too long": (["baka " * 20_000], {"truncate": False}),
    "a lone surrogate": (["\ud800"], {}),
    "no output": (["baka"], {"outputs": ()}),
    "an unknown output": (["baka"], {"outputs": ("colour",)}),
    "no dimensions": (["baka"], {"dimensions": 0}),
    "too many dimensions": (["baka"], {"dimensions": 10**6}),
    "an unknown prompt": (["baka"], {"prompt_name": "nobody"}),
    "one bad among good": (["baka", "", "bulo"], {}),
}


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """A cache of graphs that other modules' tests do not see, and a guard that random weights
    pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridtei.inference.backends.graph.int8.Guard", lambda: LOOSE)
        if find_spec("openvino") is not None:
            # Neighbours of random texts are near ties
            patch.setattr("hybridtei.inference.backends.graph.openvino_int8.GUARD", LOOSE)
        patch.setenv("HYBRIDTEI_CACHE", str(tmp_path_factory.mktemp("graphs")))
        yield


@pytest.fixture(scope="module", params=["hybrid", "m3"])
def folder(request, graphs):
    """A checkpoint with every kind of output."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def reference(folder):
    """torch, float32, each text by itself: what test_encoder.py holds against
    sentence-transformers."""
    encoder = Encoder.load(folder, backend="torch")
    return Embeddings.concat([encoder.encode([text], EVERYTHING) for text in TEXTS])


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def encoder(request, folder):
    name, dtype = request.param
    assert why_not(name, dtype, read_spec(folder)) is None
    loaded = Encoder.load(folder, backend=name, dtype=dtype)
    assert (loaded.backend_name, loaded.dtype) == (name, dtype)
    yield loaded
    loaded.close()


def assert_close(one, other, dtype):
    assert other.dense is not None
    near(one.dense, other.dense, tolerances.UNIT[dtype])
    near(one.multivector.values, other.multivector.values, tolerances.MULTIVECTOR[dtype])
    near(one.tokens.values, other.tokens.values, tolerances.HIDDEN[dtype])
    near(one.sparse.to_dense(), other.sparse.to_dense(), tolerances.WEIGHTS[dtype])


def test_every_output_is_the_references(encoder, reference):
    assert_close(encoder.encode(TEXTS, EVERYTHING), reference, encoder.dtype)


def test_a_text_keeps_its_vectors_in_any_company(encoder):
    together = encoder.encode(TEXTS, EVERYTHING)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    shuffled = encoder.encode([TEXTS[i] for i in order], EVERYTHING)
    assert_close(together.take(order), shuffled, encoder.dtype)
    for i in (0, 17, 63):
        assert_close(encoder.encode([TEXTS[i]], EVERYTHING), together.take([i]), encoder.dtype)


@pytest.fixture(scope="module")
def refusals(folder):
    encoder = Encoder.load(folder, backend="torch")
    return {name: refusal_of(encoder, name) for name in BAD}


def refusal_of(encoder, name):
    texts, options = BAD[name]
    with pytest.raises(Exception) as caught:  # noqa: PT011 (which one is what is compared)
        encoder.encode(texts, **options)
    return caught.type, str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_alike_and_harms_nothing(encoder, refusals, name):
    before = encoder.forwards
    assert refusal_of(encoder, name) == refusals[name]
    # Before any work is done
    assert encoder.forwards == before
    assert len(encoder.encode(["baka"])) == 1
