"""Our truncation against the library's own, offsets in bytes, ids that are none, and many
threads."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.small import vocabulary
from hybridtei.errors import InvalidInput, LoadError, TokenizerError
from hybridtei.models.text.tokenizer import Tokenizer, shares
from tests.near import same
from tests.sampled import paired

KINDS = ["wordpiece", "unigram", "roberta", "bytes"]


@pytest.fixture(scope="module", params=KINDS)
def raw(request):
    return vocabulary.tokenizer(request.param)._tokenizer


def ours(raw, *, has_token_types=False):
    return Tokenizer(copy.deepcopy(raw), has_token_types=has_token_types)


@pytest.mark.parametrize(
    ("longest", "special", "direction"),
    paired([2, 3, 4, 7, 30, 1000], [True, False], ["left", "right"]),
)
def test_truncation_equals_the_librarys_own(raw, direction, special, longest):
    theirs = copy.deepcopy(raw)
    theirs.enable_truncation(longest, direction=direction)
    tokenizer = ours(raw)
    texts = [
        *vocabulary.texts(20),
        "ba",
        "baka bake",
        "zzz ??? ünbekannt",
        "a" * 50,
        "bulo [CLS] boka <s> </s> duna <|endoftext|> dura",
    ]
    if raw.token_to_id("[CLS]") is None:
        texts = [text.replace("[CLS]", "") for text in texts]
    for text, whole in zip(texts, tokenizer.encode(texts, add_special_tokens=special), strict=True):
        cut = tokenizer.cut(whole, longest, direction)
        assert cut.input_ids.tolist() == theirs.encode(text, add_special_tokens=special).ids, text
        assert cut.token_type_ids is None
        assert len(cut) <= longest


@pytest.mark.parametrize(
    ("longest", "direction"), paired([4, 5, 6, 9, 30, 1000], ["left", "right"])
)
def test_pairs_are_cut_as_the_library_cuts_them(raw, direction, longest):
    theirs = copy.deepcopy(raw)
    theirs.enable_truncation(longest, strategy="longest_first", direction=direction)
    tokenizer = ours(raw, has_token_types=True)
    texts = ["", "ba", "baka bake", "a" * 50, *vocabulary.texts(6)]
    pairs = [(one, other) for one in texts for other in texts if one or other]
    for pair, whole in zip(pairs, tokenizer.encode(pairs), strict=True):
        cut, expected = tokenizer.cut(whole, longest, direction), theirs.encode(*pair)
        assert cut.input_ids.tolist() == expected.ids, pair
        assert cut.token_type_ids.tolist() == expected.type_ids, pair


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_both_sides_of_a_pair_have_a_fair_share(first, second, room):
    one, other = (
        min(given, share)
        for given, share in zip((first, second), shares(first, second, room), strict=True)
    )
    # No room is wasted
    assert one + other == min(first + second, room)
    # Cut is the longer side, or both, to alike
    assert one == first or other == second or abs(one - other) <= 1


def test_a_located_token_is_where_its_text_is(raw):
    tokenizer = ours(raw)
    text = "baka  é bulo 東京 bake"
    (whole,) = tokenizer.encode([text], offsets=True)
    located = tokenizer.cut_located(whole, text, 100, "right")
    assert located.input_ids.tolist() == whole.ids
    words = {text[start:end].strip() for start, end in located.offsets[~located.special].tolist()}
    assert {"baka", "bulo", "bake"} <= words
    shifted = tokenizer.cut_located(whole, text, 100, "right", shift=7)
    same(shifted.offsets[~located.special], located.offsets[~located.special] + 7)
    assert (shifted.offsets[located.special] == 0).all()


def test_what_looks_like_a_command_is_spelled_out(raw):
    tokenizer = ours(raw)
    special = next(iter(raw.get_added_tokens_decoder().values())).content
    both = (tokenizer, tokenizer.literal)
    trusted, anyones = (
        one.encode([f"baka {special} bake"], add_special_tokens=False)[0] for one in both
    )
    assert raw.token_to_id(special) in trusted.ids
    assert raw.token_to_id(special) not in anyones.ids
    plain = [one.encode(["baka bake"], add_special_tokens=False)[0].ids for one in both]
    assert plain[0] == plain[1]
    assert tokenizer.around_specials(f"a{special}b") == [
        ("a", False),
        (special, True),
        ("b", False),
    ]


def test_a_tokenizer_that_comes_with_truncation_and_padding_is_used_without():
    raw = vocabulary.tokenizer("wordpiece")._tokenizer
    raw.enable_truncation(4)
    raw.enable_padding(length=9)
    lengths = [len(encoding) for encoding in Tokenizer(raw).encode(["baka", "baka bake balo bamo"])]
    assert lengths == [3, 6]


TEXTS = st.text(
    st.sampled_from([*"abdeiklmnoprtu", " ", "é", "漢", "🦆", "ß", "?"]), min_size=1, max_size=20
)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_tokens_tell_their_place_in_utf8_bytes(kind, text):
    tokenizer = (
        Tokenizer(vocabulary.tokenizer(kind)._tokenizer) if kind not in CACHE else CACHE[kind]
    )
    CACHE[kind] = tokenizer
    data = text.encode()
    place = 0
    for token in tokenizer.tokens(text, add_special_tokens=True):
        if token.special:
            assert token.start is None
            assert token.stop is None
            continue
        assert token.start is not None
        assert token.stop is not None
        assert 0 <= token.start <= token.stop <= len(data)
        # Never half a character
        assert token.text == data[token.start : token.stop].decode()
        # Tokens of one character's bytes share its place
        assert token.start >= place - 4
        place = token.start


CACHE = {}


def test_tokens_of_a_text_of_words():
    tokens = Tokenizer(vocabulary.tokenizer("wordpiece")._tokenizer).tokens(
        "baka é? 漢 bulo", add_special_tokens=True
    )
    assert [(token.text, token.special, token.start, token.stop) for token in tokens] == [
        ("[CLS]", True, None, None),
        ("baka", False, 0, 4),
        ("é", False, 5, 7),
        ("?", False, 7, 8),
        ("漢", False, 9, 12),
        ("bulo", False, 13, 17),
        ("[SEP]", True, None, None),
    ]


@pytest.mark.parametrize("text", ["\ud800", "baka \udfff bake"])
def test_a_lone_surrogate_is_a_tokenizer_error(raw, text):
    tokenizer = ours(raw)
    with pytest.raises(TokenizerError):
        tokenizer.encode(["baka", text])
    with pytest.raises(TokenizerError):
        next(tokenizer.tokens(text, add_special_tokens=True))


def test_ids_become_the_text_they_stand_for(raw):
    tokenizer = ours(raw)
    ids = raw.encode("baka bulo dura", add_special_tokens=False).ids
    assert tokenizer.text_of(ids).strip() == "baka bulo dura"
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "baka bulo dura"


def test_an_id_beyond_the_vocabulary_is_named(raw):
    tokenizer = ours(raw)
    with pytest.raises(
        InvalidInput, match=rf"\b{tokenizer.vocab_size}\b.*\b{tokenizer.vocab_size - 1}$"
    ):
        tokenizer.text_of([4, tokenizer.vocab_size, 10**9])
    assert tokenizer.decode([10**6], skip_special_tokens=False) == ""


def test_no_two_ids_share_a_spelling(raw):
    tokenizer = ours(raw)
    pieces = tokenizer.pieces(np.arange(tokenizer.vocab_size + 2))
    assert len(set(pieces)) == tokenizer.vocab_size + 2


def test_threads_share_a_tokenizer(raw):
    tokenizer = ours(raw)
    batches = [vocabulary.texts(8, seed=seed) for seed in range(24)]

    def work(texts):
        whole = tokenizer.encode(texts)
        return [tokenizer.cut(encoding, 9, "left").input_ids.tolist() for encoding in whole]

    expected = [work(texts) for texts in batches]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, batches)) == expected


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\x00\xff"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=str(path)):
        Tokenizer.load(path)
