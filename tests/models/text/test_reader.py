"""Every limit of an input, in TEI's order and words."""

import numpy as np
import pytest

from conformance.small import vocabulary
from hybridtei.errors import EmptyInput, HybridTeiError, InvalidInput, TokenizerError
from hybridtei.models.text.reader import CHARACTERS_PER_TOKEN, TextReader
from hybridtei.models.text.tokenizer import Prompts, Tokenizer

LIMIT = 8
CHARACTERS = LIMIT * CHARACTERS_PER_TOKEN
TABLE = {"query": "baka bake ", "empty": ""}


def reader_of(
    kind="wordpiece",
    *,
    limit=LIMIT,
    vocab_size=None,
    default=None,
):
    tokenizer = Tokenizer(vocabulary.tokenizer(kind)._tokenizer)
    return TextReader(tokenizer, Prompts(TABLE, default), limit, vocab_size or tokenizer.vocab_size)


def ids_of(reader, inputs, **options):
    options = {"truncate": False, **options}
    return [encoding.input_ids.tolist() for encoding in reader.read(inputs, **options)]


def words(reader, *names):
    found = [reader.tokenizer.encode([name], add_special_tokens=False)[0].ids for name in names]
    return [i for ids in found for i in ids]


def refused(reader, inputs, **options):
    with pytest.raises(HybridTeiError) as caught:
        ids_of(reader, inputs, **options)
    return caught.value


def test_texts_come_in_order_with_special_tokens_around():
    reader = reader_of()
    assert ids_of(reader, []) == []
    # A blank is not empty
    assert ids_of(reader, [" "]) == [[2, 3]]
    assert reader.read(["baka"], truncate=True)[0].input_ids.dtype == np.int64
    assert ids_of(reader, ["baka", "bulo dura"]) == [
        [2, *words(reader, "baka"), 3],
        [2, *words(reader, "bulo", "dura"), 3],
    ]


def test_as_many_tokens_as_the_limit_pass_one_more_does_not():
    reader = reader_of()
    assert len(ids_of(reader, ["baka " * (LIMIT - 2)])[0]) == LIMIT
    error = refused(reader, ["baka " * (LIMIT - 1)])
    assert type(error) is InvalidInput
    assert str(error) == f"`inputs` must have less than {LIMIT} tokens. Given: {LIMIT + 1}"


def test_as_many_characters_as_the_limit_pass_one_more_does_not():
    reader = reader_of()
    # One unknown word
    assert len(ids_of(reader, ["x" * CHARACTERS])[0]) == 3
    error = refused(reader, ["x" * (CHARACTERS + 1)])
    assert type(error) is InvalidInput
    assert (
        str(error)
        == f"`inputs` must have less than {CHARACTERS} characters. Given: {CHARACTERS + 1}"
    )


@pytest.mark.parametrize(("direction", "name"), [("right", "baka"), ("left", "dura")])
def test_a_long_text_is_cut_on_the_side_asked_for(direction, name):
    reader = reader_of()
    ids = ids_of(
        reader, ["baka" + " bulo" * CHARACTERS + " dura"], truncate=True, direction=direction
    )[0]
    assert len(ids) == LIMIT
    assert (ids[0], ids[-1]) == (2, 3)
    assert ids[1 if direction == "right" else -2] == words(reader, name)[0]


def test_a_prompt_stands_before_its_text_and_counts():
    reader = reader_of()
    assert ids_of(reader, ["bulo"], prompt_name="query") == [
        [2, *words(reader, "baka", "bake", "bulo"), 3]
    ]
    assert ids_of(reader, ["bulo"], prompt_name="empty") == ids_of(reader, ["bulo"])
    assert ids_of(reader_of(default="baka "), ["bulo"]) == ids_of(reader, ["baka bulo"])
    assert "tokens. Given: 9" in str(refused(reader, ["bulo " * 5], prompt_name="query"))


def test_an_unknown_prompt_is_refused_after_emptiness():
    assert "Available prompts" in str(refused(reader_of(), ["baka"], prompt_name="none"))
    assert type(refused(reader_of(), [""], prompt_name="none")) is EmptyInput


@pytest.mark.parametrize("kind", ["wordpiece", "unigram", "roberta", "bytes"])
def test_ids_are_the_text_they_stand_for_without_more_special_tokens(kind):
    reader = reader_of(kind, limit=20)
    whole = ids_of(reader, ["baka bulo dura"])[0]
    # Side by side with texts
    assert ids_of(reader, [whole, "baka bulo dura", whole[1:-1]])[:2] == [
        whole,
        whole,
    ]


def test_ids_with_a_prompt_are_a_text_like_any():
    reader = reader_of()
    assert ids_of(reader, [words(reader, "bulo")], prompt_name="query") == ids_of(
        reader, ["bulo"], prompt_name="query"
    )


def test_ids_that_stand_for_no_text_are_refused():
    reader = reader_of("unigram")
    blank = reader.tokenizer.encode([" "], add_special_tokens=False)[0].ids
    assert blank == [reader.tokenizer.id_of("▁")]
    error = refused(reader, [blank])
    assert type(error) is InvalidInput
    assert "no token at all" in str(error)


def test_a_token_that_the_model_does_not_know_is_refused_before_it_fails_a_batch():
    reader = reader_of(vocab_size=10)
    error = refused(reader, ["baka dura"])
    assert type(error) is InvalidInput
    assert "10" in str(error)
    assert str(max(words(reader, "baka", "dura"))) in str(error)


@pytest.mark.parametrize(
    ("inputs", "kind", "part"),
    [
        (["baka " * 50, ""], InvalidInput, "tokens"),
        (["", "baka " * 50], EmptyInput, "empty"),
        (["x" * (CHARACTERS + 1), ""], InvalidInput, "characters"),
        (["baka", "", "x" * (CHARACTERS + 1)], EmptyInput, "empty"),
        ([[9999], "baka " * 50], InvalidInput, "9999"),
        (["baka " * 50, [9999]], InvalidInput, "tokens"),
        ([[5] * 50, "baka " * 61], InvalidInput, "Given: 50"),
        (["baka " * 61, [5] * 50], InvalidInput, "Given: 63"),
        (["\ud800", "baka " * 50], TokenizerError, ""),
    ],
)
def test_the_first_input_that_breaks_a_rule_is_the_one_reported(inputs, kind, part):
    error = refused(reader_of(), inputs)
    assert type(error) is kind
    assert part in str(error)


def test_tokens_are_never_cut_and_may_have_a_prompt():
    reader = reader_of()
    tokens = [*reader.tokens("baka " * 20, add_special_tokens=True, prompt_name="query")]
    assert len(tokens) == 24
    assert tokens[1].text == "baka"
    with pytest.raises(EmptyInput):
        reader.tokens("", add_special_tokens=True, prompt_name=None)


class Counting(Tokenizer):
    """Notes how many characters it is given at once."""

    most = 0

    def encode(self, texts, **settings):
        self.most = max(self.most, sum(map(len, texts)))
        return super().encode(texts, **settings)


def counting(limit):
    tokenizer = Counting(vocabulary.tokenizer("wordpiece")._tokenizer)
    return TextReader(tokenizer, Prompts(TABLE, None), limit, tokenizer.vocab_size), tokenizer


def test_long_texts_are_tokenised_some_at_a_time_and_come_out_as_alone():
    reader, tokenizer = counting(100)
    texts = [f"{'baka bulo ' * 2_000}{'dura ' * place}" for place in range(12)]
    together = ids_of(reader, texts, truncate=True, direction="left")
    assert together == [
        ids_of(reader, [text], truncate=True, direction="left")[0] for text in texts
    ]
    assert len({*map(tuple, together)}) == len(texts)
    assert tokenizer.most <= 65_536


@pytest.mark.parametrize("direction", ["left", "right"])
def test_what_ids_stand_for_is_bounded_as_a_text_is(direction):
    reader, tokenizer = counting(LIMIT)
    ids = words(reader, "baka", "bulo") * (CHARACTERS // 4)
    assert len(reader.tokenizer.text_of(ids)) > CHARACTERS
    cut = ids_of(reader, [ids], truncate=True, direction=direction)
    assert tokenizer.most <= CHARACTERS
    assert cut == [(ids[-LIMIT:] if direction == "left" else ids[:LIMIT])]
    assert f"less than {CHARACTERS} characters" in str(refused(reader, [ids]))


def test_a_text_is_cut_to_so_many_tokens_and_what_no_input_can_hold_is_never_read(
    monkeypatch,
):
    reader = reader_of()
    read = []
    encode = Tokenizer.encode

    def counted(self, texts, **options):
        read.extend(map(len, texts))
        return encode(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    assert reader.cut_to(["baka bake bulo", "baka", ""], 2) == ["baka bake", "baka", ""]
    assert reader.cut_to(["baka " * 100_000], 2) == ["baka baka"]
    assert reader.cut_to(["baka " * 100_000], 10**9) == [("baka " * 100_000)[:CHARACTERS]]
    assert max(read) == CHARACTERS
