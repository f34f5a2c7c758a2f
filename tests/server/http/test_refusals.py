"""Why a body is refused: status, the field's path, what was found and what was expected; and which
struct a body is read as."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.server.api.embed import EmbedHybridRequest, EmbedMultivectorRequest
from hybridtei.server.api.openai import OpenAICompatRequest
from hybridtei.server.api.rerank import BY_FIELD, DocumentsRequest, RerankRequest
from hybridtei.server.api.tei import (
    DecodeRequest,
    EmbedRequest,
    PredictRequest,
    SimilarityRequest,
    TokenizeRequest,
)
from hybridtei.server.http.body import BodyError, decode, kind_of

DIRECTIONS = "expected one of `Left`, `Right`, `left`, `right`"
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.sampled_from(["inputs", "truncate", "dimensions"]), inner)
    ),
)
KINDS = [
    EmbedRequest,
    OpenAICompatRequest,
    PredictRequest,
    RerankRequest,
    SimilarityRequest,
    TokenizeRequest,
    DecodeRequest,
]


def refusal(kind, body):
    with pytest.raises(BodyError) as caught:
        decode(body, kind)
    return caught.value.status, caught.value.detail


@pytest.mark.parametrize(
    ("kind", "body", "status", "detail"),
    [
        (EmbedRequest, "{}", 422, "missing field `inputs`"),
        (EmbedRequest, '{"inputs":5}', 422, "inputs: expected `str | array`, got `int`"),
        (EmbedRequest, '{"inputs":5', 422, "inputs: expected `str | array`, got `int`"),
        (
            EmbedRequest,
            '{"inputs":"a","truncate":"true"}',
            422,
            "truncate: expected `bool | null`, got `str`",
        ),
        (
            EmbedRequest,
            '{"inputs":"a","normalize":null}',
            422,
            "normalize: expected `bool`, got `null`",
        ),
        (
            EmbedRequest,
            '{"inputs":"a","dimensions":-1}',
            422,
            "dimensions: expected `int` >= 0, got -1",
        ),
        (
            EmbedRequest,
            '{"inputs":["a",4294967296]}',
            422,
            "inputs[1]: expected `int` <= 4294967295, got 4294967296",
        ),
        (EmbedRequest, '{"inputs":"a","dimensions":1e400}', 400, "dimensions: number out of range"),
        (
            EmbedRequest,
            '{"inputs":"a","truncation_direction":"up"}',
            422,
            f"truncation_direction: got 'up', {DIRECTIONS}",
        ),
        (
            EmbedRequest,
            '{"inputs":"a","truncation_direction":null}',
            400,
            f"truncation_direction: got `null`, {DIRECTIONS}",
        ),
        (
            EmbedRequest,
            '{"inputs":"a","truncation_direction":5}',
            400,
            f"truncation_direction: got `int`, {DIRECTIONS}",
        ),
        (
            EmbedHybridRequest,
            '{"inputs":"a","outputs":[]}',
            422,
            "outputs: expected `array` of length >= 1, got []",
        ),
        (EmbedRequest, '{"inputs":"a","inputs":"b"}', 422, "duplicate field `inputs`"),
        (EmbedRequest, '{"inputs":"a"', 400, "it ends too early (byte 13)"),
        (EmbedRequest, "", 400, "it ends too early (byte 0)"),
        (EmbedRequest, '{"inputs":"a",}', 400, "trailing comma in object (byte 14)"),
        (EmbedRequest, '{"inputs":"\\ud800"}', 400, "half of a surrogate pair"),
        (EmbedRequest, '{"inputs":"\\ud83d\\ude42', 400, "it ends too early (byte 23)"),
        (EmbedRequest, "null", 422, "expected `object`, got `null`"),
        (
            SimilarityRequest,
            '{"inputs":{"source_sentence":"a"}}',
            422,
            "inputs: missing field `sentences`",
        ),
        (
            SimilarityRequest,
            '{"inputs":{"source_sentence":"a","sentences":["a",1]}}',
            422,
            "inputs.sentences[1]: expected `str`, got `int`",
        ),
        (PredictRequest, '{"inputs": []}', 422, "inputs: expected `array` of length >= 1, got []"),
        (
            PredictRequest,
            '{"inputs":["a",["b"]]}',
            422,
            "inputs: got texts beside lists, expected one of these alone",
        ),
        (
            PredictRequest,
            '{"inputs":["a","b","c"]}',
            422,
            "inputs: got 3 texts, expected one or two, or lists of one or two",
        ),
        (
            DecodeRequest,
            '{"ids":[1,[2]]}',
            422,
            "ids: got ids beside lists, expected one of these alone",
        ),
    ],
)
def test_the_sentence(kind, body, status, detail):
    assert refusal(kind, body.encode()) == (status, detail)


def test_a_field_that_is_not_known_is_told_with_the_known_ones():
    status, detail = refusal(EmbedMultivectorRequest, b'{"inputs":"a","dimension":4}')
    assert status == 422
    assert detail.startswith("unknown field `dimension`, expected one of `inputs`, `truncate`, ")


def test_of_a_long_value_only_the_beginning_is_shown():
    body = json.dumps({"inputs": [{"text": "a", "spans": []}], "outputs": []}).encode()
    assert refusal(EmbedHybridRequest, body) == (
        422,
        "inputs[0].spans: expected `array` of length >= 1, got []",
    )
    ids = b'{"inputs":[' + b"9" * 100 + b"]}"
    assert (
        refusal(EmbedRequest, ids)[1]
        == "inputs[0]: expected `int` <= 4294967295, got 999999999999...9999999999999"
    )


@given(ANYTHING, st.sampled_from(KINDS))
def test_what_is_refused_is_told_in_a_sentence(value, kind):
    try:
        refused = decode(json.dumps(value).encode(), kind) is None
        told = ""
    except BodyError as error:
        refused, told = True, error.detail
    assert refused == bool(re.search("expected|missing|duplicate|out of range", told))


def by_field(body):
    return decode(body, kind_of(body, BY_FIELD))


@pytest.mark.parametrize(
    "body",
    [
        "null",
        "{",
        "{}",
        '{"query":"q"}',
        '{"documents',
        '{"query":"q","texts":5,"documents":["a"]}',
    ],
)
def test_without_another_field_the_first_struct_says_what_is_wrong(body):
    with pytest.raises(BodyError) as caught:
        by_field(body.encode())
    assert (caught.value.status, caught.value.detail) == refusal(RerankRequest, body.encode())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"query":"q","texts":["a"]}', RerankRequest),
        ('{"query":"q","documents":["a"]}', DocumentsRequest),
        ('{"query":"q","documents":["texts"]}', DocumentsRequest),
        ('{"query":"q","documents":[{"text":"a","texts":[1]}]} and more', DocumentsRequest),
        ('{"query":"q","documents":5,"texts":["a"]}', RerankRequest),
        ('{"query":"documents","texts":["a"]}', RerankRequest),
        ('{"query":"q","\\u0074exts":["a"],"documents":["b"]}', RerankRequest),
        ('{"query":"q","\\u0064ocuments":["b"]}', DocumentsRequest),
    ],
)
def test_the_field_of_a_body_chooses_its_struct(body, kind):
    assert type(by_field(body.encode())) is kind


def test_names_twice_where_nobody_looks_are_fine():
    assert decode(b'{"inputs":"a","other":{"inputs":1,"inputs":2}}', EmbedRequest).inputs == "a"
    assert decode(b'{"inputs":"a","other":1,"other":2}', EmbedRequest).inputs == "a"


@pytest.mark.parametrize("digits", ["-123", "+123", " 123", "1_23", "0x12", "123\xb2"])
def test_only_hexadecimal_digits_make_an_escape(digits):
    """Python would read most of these as a number, some of them as one that is no character."""
    assert refusal(EmbedRequest, b'{"inputs":"\\u' + digits.encode() + b'"}')[0] == 400
