"""What an `Encoder` shows, what of its answers shows, and what it says where it is used as other
libraries are."""

import pickle

import pytest

from conformance.small import vocabulary
from hybridtei import AsyncClient, Client, Encoder, Index
from hybridtei.errors import BackendError
from tests.encoder.vectors import TEXTS


def test_it_closes_itself(hybrid):
    with Encoder.load(str(hybrid)) as encoder:
        assert encoder.encode("baka").dense is not None
    with pytest.raises(BackendError, match="close"):
        encoder.encode("baka")


def test_representations_are_short(encoder):
    assert repr(encoder).endswith(": dense, multivector, sparse, tokens by ort in float32)")
    embedded = encoder.encode(TEXTS, ("dense", "sparse"))
    assert repr(embedded) == f"Embeddings({len(TEXTS)} texts: dense, sparse)"
    client = Client("http://127.0.0.1:1")
    assert repr(client) == "Client(http://127.0.0.1:1)"
    client.close()


def test_what_cannot_be_pickled_says_why(encoder):
    for thing in (encoder, Client("http://127.0.0.1:1"), AsyncClient("http://127.0.0.1:1")):
        with pytest.raises(TypeError, match=r"cannot be pickled, since .* in each process"):
            pickle.dumps(thing)
    with (
        Index(["baka"], encoder) as index,
        pytest.raises(TypeError, match="Index cannot be pickled"),
    ):
        pickle.dumps(index)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("batch_size", "max_batch_tokens"), ("convert_to_tensor", r"torch\.from_numpy")],
)
def test_keywords_of_other_libraries_say_what_to_write(encoder, name, advice):
    with pytest.raises(TypeError, match=rf"`{name}`: .*{advice}"):
        encoder.encode(TEXTS, **{name: 3})


@pytest.mark.parametrize("options", [{}, {"long_inputs": "mean"}, {"spans": [[(0, 4)]] * 60}])
def test_progress_counts_the_texts_that_were_given(encoder, capsys, options):
    """Equal texts are computed once, and long ones in several windows."""
    long = "baka bulo " * 3 * encoder.max_input_length
    texts = [*vocabulary.WORDS[:19], *["baka"] * 40, long]
    encoder.encode(texts, show_progress=True, **options)
    assert "60/60" in capsys.readouterr().err.replace("\r", "\n").splitlines()[-1]
