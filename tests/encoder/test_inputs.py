"""The inputs that `Encoder` accepts, those that it refuses, and the answers."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
from transformers import AutoTokenizer

from conformance.small import vocabulary
from hybridtei.batch import UNKNOWN
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.encoder import Encoder
from hybridtei.errors import (
    BackendError,
    EmptyInput,
    InvalidDimensions,
    InvalidInput,
    UnsupportedHead,
    UsageError,
)
from hybridtei.inference.tasks.embed import heads_named
from hybridtei.outputs import Cut, Embeddings
from tests.encoder.vectors import EVERYTHING, TEXTS, close, dense_of


def test_asking_for_more_changes_nothing(encoder):
    everything = encoder.encode(TEXTS, EVERYTHING)
    for head in EVERYTHING:
        alone = getattr(encoder.encode(TEXTS, [head]), head)
        together = getattr(everything, head)
        if head == "sparse":
            alone, together = alone.to_dense(), together.to_dense()
        elif head != "dense":
            alone, together = alone.values, together.values
        assert np.array_equal(alone, together)


def test_many_inputs_cost_as_many_passes_as_batches(hybrid):
    encoder = Encoder.load(str(hybrid), engine=EngineConfig(max_batch_requests=5))
    for count, batches in ((1, 1), (5, 1), (6, 2), (23, 5)):
        before = encoder.forwards
        # So few tokens that cores do not share them
        encoder.encode(vocabulary.WORDS[:count], EVERYTHING)
        assert encoder.forwards - before == batches


def test_equal_inputs_are_computed_once(encoder):
    before = encoder.forwards
    found = encoder.encode(["baka bulo", "baka", "baka bulo"], EVERYTHING)
    assert encoder.forwards - before == 1
    assert np.array_equal(found.dense[0], found.dense[2])
    assert np.array_equal(found.tokens.row(0), found.tokens.row(2))


def test_a_pass_holds_as_many_tokens_as_the_budget(hybrid, monkeypatch):
    monkeypatch.setattr(
        "hybridtei.inference.backends.graph.onnx_backend.busy_tokens",
        lambda *_, **__: vocabulary.LONGEST,
    )
    encoder = Encoder.load(str(hybrid))
    before = encoder.forwards
    # 64 tokens each, two a pass
    encoder.encode([f"{word} " + "baka " * 61 for word in vocabulary.WORDS[:6]])
    assert encoder.forwards - before == 3


def test_more_inputs_than_one_chunk_come_back_in_order(encoder):
    texts = [vocabulary.WORDS[i % 7] for i in range(1100)]
    dense = dense_of(encoder, texts)
    seven = dense_of(encoder, vocabulary.WORDS[:7])
    close(dense, seven[np.arange(1100) % 7])


def test_one_text_is_a_list_of_one(encoder):
    assert np.array_equal(dense_of(encoder, "baka bulo"), dense_of(encoder, ["baka bulo"]))


def test_no_texts_are_no_rows_of_the_right_width(encoder):
    before = encoder.forwards
    nothing, something = encoder.encode([], EVERYTHING), encoder.encode(["baka"], EVERYTHING)
    assert encoder.forwards == before + 1
    assert len(nothing) == 0
    for column in EVERYTHING:
        none, some = getattr(nothing, column), getattr(something, column)
        assert len(none) == 0
        if column == "dense":
            assert none.shape[1] == some.shape[1]
        elif column == "sparse":
            assert none.width == some.width
            assert none.to_scipy().shape == (0, some.width)
        else:
            assert none.values.shape[1] == some.values.shape[1]


def test_ids_are_the_tokens_themselves(encoder, hybrid):
    ids = AutoTokenizer.from_pretrained(hybrid)(TEXTS)["input_ids"]
    short = [row for row in ids if len(row) < vocabulary.LONGEST]
    texts = [text for text, row in zip(TEXTS, ids, strict=True) if len(row) < vocabulary.LONGEST]
    close(dense_of(encoder, short), dense_of(encoder, texts))


@pytest.mark.parametrize(
    "wrong", [[None], ["baka", 5], [b"baka"], [("a", "b")], ["baka", {"text": "b"}]]
)
def test_an_input_of_another_kind_is_named_by_its_place(encoder, wrong):
    with pytest.raises(
        InvalidInput, match=rf"texts\[{len(wrong) - 1}\].*{type(wrong[-1]).__name__}"
    ):
        encoder.encode(wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"input_type": "passage"},
            "`input_type` is 'passage': expected one of `document`, `query`",
        ),
        (
            {"query_encoder": "tabel"},
            "`query_encoder` is 'tabel': expected one of `model`, `table`",
        ),
        (
            {"truncation_direction": "middle"},
            "`truncation_direction` is 'middle': expected one of `left`, `right`",
        ),
        ({"dimensions": "3"}, "`dimensions` is '3': expected `int | None`, got `str`"),
        ({"outputs": None}, "`outputs` is None, of type NoneType"),
        ({"texts": {"a": 1}}, "`texts` is {'a': 1}, of type dict; it should be a text or a list"),
        ({"texts": None}, "`texts` is None, of type NoneType; it should be a text or a list"),
    ],
)
def test_a_value_of_another_kind_is_named_with_what_it_should_be(encoder, wrong, message):
    with pytest.raises(InvalidInput, match=message):
        encoder.encode(**{"texts": ["baka"], **wrong})


@pytest.mark.parametrize(
    ("method", "field"), [("classify", "texts"), ("tag", "texts"), ("rerank", "documents")]
)
def test_so_it_is_for_labels_and_ranks(encoder, method, field):
    with pytest.raises(InvalidInput, match=f"`{field}` is None, of type NoneType"):
        getattr(encoder, method)(*(["baka"] if method == "rerank" else []), None)


def test_an_empty_text_is_refused(encoder):
    with pytest.raises(EmptyInput, match=r"^`texts\[1\]` cannot be empty$"):
        encoder.encode(["baka", ""])
    texts = ["baka"] * 1_100
    with pytest.raises(EmptyInput, match=r"^`texts\[1099\]` cannot be empty$"):
        encoder.encode([*texts[:-1], "", *texts])


@pytest.mark.parametrize("names", [["colbert"], ["dense", "Sparse"], "splade", [], ""])
def test_unknown_outputs_are_refused_with_the_known_ones(encoder, names):
    with pytest.raises(InvalidInput, match=r"known: dense, multivector, sparse, tokens"):
        encoder.encode(["baka"], names)


def test_one_name_is_a_list_of_one():
    assert heads_named("sparse") == heads_named(["sparse", "sparse"]) == frozenset({"sparse"})


@pytest.mark.parametrize("head", ["sparse", "multivector"])
def test_an_output_the_model_lacks_is_refused_even_for_no_texts(bert, head):
    encoder = Encoder.load(str(bert))
    for texts in (["baka"], []):
        with pytest.raises(UnsupportedHead, match=f"`{head}`.*dense, tokens"):
            encoder.encode(texts, ["dense", head])


def test_progress_is_shown_when_asked_for(encoder, capsys):
    encoder.encode(TEXTS)
    assert capsys.readouterr().err == ""
    encoder.encode(TEXTS, show_progress=True)
    assert f"{len(TEXTS)}/{len(TEXTS)}" in capsys.readouterr().err


def test_a_closed_encoder_gives_its_memory_back(bert):
    encoder = Encoder.load(config=ModelConfig(model_id=str(bert), backend="torch"))
    weights = weakref.ref(encoder._backend._trunk.model)
    assert weights() is not None
    encoder.close()
    gc.collect()
    assert weights() is None
    encoder.close()
    with pytest.raises(
        BackendError, match=r"freed by `close\(\)`: load it again by `Encoder.load\(\)`"
    ):
        encoder.encode(TEXTS)


@pytest.mark.parametrize("ids", [[-1], [1.5], ["a"], [True], [None], [2**32]])
def test_an_id_is_a_whole_number_in_range(encoder, ids):
    with pytest.raises(InvalidInput, match=r"texts\[1\].*an id is a whole number"):
        encoder.encode(["baka", ids])


def test_too_many_dimensions_are_refused_with_the_width(bert):
    with pytest.raises(InvalidDimensions, match="`dimensions` should be at most 32, the model's"):
        Encoder.load(str(bert)).encode("baka", dimensions=1000)


def test_options_are_fields_of_the_configs(bert):
    encoder = Encoder.load(str(bert), backend="torch", dtype="bfloat16", max_batch_tokens=64)
    assert (encoder.backend_name, encoder.dtype, encoder.max_input_length) == (
        "torch",
        "bfloat16",
        64,
    )


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(TypeError, match="`dtyp`: did you mean `dtype`"):
        Encoder.load(dtyp="bfloat16")


@pytest.mark.parametrize(
    ("option", "message"), [({"dtype": "bf16"}, "bfloat16"), ({"max_batch_tokens": 0}, ">= 1")]
)
def test_an_option_out_of_its_range(option, message):
    with pytest.raises(UsageError, match=message):
        Encoder.load(**option)


def test_coroutines_wait_for_vectors_and_the_loop_goes_on(encoder):
    """Two at once get what each would get alone."""
    texts = ["one two three", "four five"]

    async def scenario():
        turns = 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        both = await asyncio.gather(
            *(encoder.aencode(text, ("dense",), input_type="query") for text in texts)
        )
        counting.cancel()
        return both, turns

    answers, turns = asyncio.run(scenario())
    for text, answer in zip(texts, answers, strict=True):
        expected = encoder.encode(text, input_type="query").dense
        np.testing.assert_array_equal(answer.dense, expected)
    assert turns > 1


def test_texts_that_were_cut_are_listed_with_what_the_model_read(encoder, tmp_path):
    texts = ["baka"] * 1300
    texts[1100] = "baka bulo " * encoder.max_input_length
    vectors = encoder.encode(texts)
    (cut,) = vectors.truncated
    begin, end = cut.characters
    assert (cut.index, begin) == (1100, 0)
    kept = encoder.encode(texts[1100][:end])
    assert kept.truncated == []
    close(kept.dense, vectors.dense[1100:1101])
    assert [other.index for other in vectors.take([0, 1100]).truncated] == [1]
    vectors.save(tmp_path / "vectors")
    assert Embeddings.load(tmp_path / "vectors").truncated == [cut]
    ids = encoder.encode([[5] * 2 * encoder.max_input_length])
    assert ids.truncated == [Cut(0, UNKNOWN)]
    assert encoder.encode([]).truncated == []


def test_a_text_in_windows_has_one_extent(encoder):
    longest = encoder.max_input_length
    long, endless = ("baka bulo " * (longest * times) for times in (3, 70))
    texts = [[5] * 2 * longest, long, "baka", endless]
    vectors = encoder.encode(texts, long_inputs="mean")
    assert vectors.extents.shape == (4, 2)
    ids, cut = vectors.truncated
    assert ids == Cut(0, UNKNOWN)
    assert cut.index == 3
    assert len(long) < cut.characters[1] < len(endless)
