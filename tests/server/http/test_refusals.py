"""Why a body is refused, in TEI's words: the samples of its documentation, and laws."""

from __future__ import annotations

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hybridtei.server.api.openai import OpenAICompatRequest
from hybridtei.server.api.rerank import DocumentsRequest, RerankRequest
from hybridtei.server.api.tei import DecodeRequest, EmbedRequest, PredictRequest, SimilarityRequest, TokenizeRequest
from hybridtei.server.http.body import BodyError
from hybridtei.server.http.decoding import decode, decode_by_field
from hybridtei.server.tei_compat import MAX_BYTES, describe, mistake_in

INPUT = "data did not match any variant of untagged enum Input"
PREDICT = "a string, a pair of strings [string, string] or a batch of mixed strings and pairs [[string], [string, string], ...]"
NO_STRING = "invalid type: integer `1`, expected a string"
DIRECTIONS = "expected one of `Left`, `left`, `Right`, `right`"
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["inputs", "truncate", "dimensions"]), inner),
)
KINDS = [EmbedRequest, OpenAICompatRequest, PredictRequest, RerankRequest, SimilarityRequest, TokenizeRequest, DecodeRequest]


def refusal(kind, body: bytes) -> tuple[int, str]:
    with pytest.raises(BodyError) as caught:
        decode(body, kind)
    return caught.value.status, str(caught.value).removeprefix(caught.value.prefix)


@pytest.mark.parametrize(
    ("kind", "body", "status", "detail"),
    [
        (EmbedRequest, "{}", 422, "missing field `inputs` at line 1 column 2"),
        (EmbedRequest, '{"inputs":5}', 422, f"inputs: {INPUT} at line 1 column 12"),
        (EmbedRequest, '{"inputs":[1,"a"]}', 422, f"inputs: {INPUT} at line 1 column 18"),
        (EmbedRequest, '{"inputs":5 , "truncate":true}', 422, f"inputs: {INPUT} at line 1 column 12"),
        (EmbedRequest, '{\n "inputs": 5\n}', 422, f"inputs: {INPUT} at line 3 column 1"),
        (
            EmbedRequest,
            '{"inputs":"a","truncate":"true"}',
            422,
            'truncate: invalid type: string "true", expected a boolean at line 1 column 31',
        ),
        (
            EmbedRequest,
            '{"inputs":"a","normalize":null}',
            422,
            "normalize: invalid type: null, expected a boolean at line 1 column 30",
        ),
        (
            EmbedRequest,
            '{"inputs":"a","dimensions":-1}',
            422,
            "dimensions: invalid value: integer `-1`, expected usize at line 1 column 29",
        ),
        (
            EmbedRequest,
            '{"inputs":"a","dimensions":128.0}',
            422,
            "dimensions: invalid type: floating point `128.0`, expected usize at line 1 column 32",
        ),
        (
            EmbedRequest,
            '{"inputs":"a","truncation_direction":"up"}',
            422,
            f"truncation_direction: unknown variant `up`, {DIRECTIONS} at line 1 column 41",
        ),
        (
            EmbedRequest,
            '{"inputs":"a","truncation_direction":null}',
            400,
            "truncation_direction: expected value at line 1 column 38",
        ),
        (
            OpenAICompatRequest,
            '{"input":"a","encoding_format":null}',
            400,
            "encoding_format: expected value at line 1 column 32",
        ),
        (
            OpenAICompatRequest,
            '{"input":"a","encoding_format":"int8"}',
            422,
            "encoding_format: unknown variant `int8`, expected `float` or `base64` at line 1 column 37",
        ),
        (EmbedRequest, '{"inputs":"a","inputs":"b"}', 422, "duplicate field `inputs` at line 1 column 22"),
        (EmbedRequest, '{"inputs":"a"', 400, "EOF while parsing an object at line 1 column 13"),
        (EmbedRequest, "", 400, "EOF while parsing a value at line 1 column 0"),
        (EmbedRequest, '{"inputs":"a}', 400, "inputs: EOF while parsing a string at line 1 column 13"),
        (EmbedRequest, '{"inputs":"a",}', 400, "trailing comma at line 1 column 15"),
        (EmbedRequest, "{1:2}", 400, "key must be a string at line 1 column 2"),
        (EmbedRequest, '{"inputs" "a"}', 400, "expected `:` at line 1 column 11"),
        (EmbedRequest, '{"inputs":NaN}', 400, "inputs: expected value at line 1 column 11"),
        (EmbedRequest, '{"inputs":"a","dimensions":1e400}', 400, "dimensions: number out of range at line 1 column 32"),
        (
            RerankRequest,
            '{"query":"q","texts":[1]}',
            422,
            "texts[0]: invalid type: integer `1`, expected a string at line 1 column 23",
        ),
        (EmbedRequest, "null", 422, "invalid type: null, expected struct EmbedRequest at line 1 column 4"),
        (EmbedRequest, "[]", 422, "invalid length 0, expected struct EmbedRequest with 6 elements at line 1 column 2"),
        (
            SimilarityRequest,
            '{"inputs":["a",1]}',
            422,
            "inputs[1]: invalid type: integer `1`, expected a sequence at line 1 column 16",
        ),
        (
            SimilarityRequest,
            '{"inputs":{"source_sentence":"a"}}',
            422,
            "inputs: missing field `sentences` at line 1 column 33",
        ),
        (PredictRequest, '{"inputs": []}', 422, f"inputs: invalid length 0, expected {PREDICT} at line 1 column 13"),
        (
            PredictRequest,
            '{"inputs": [["a", "b", "c"]]}',
            422,
            f"inputs: invalid length 3, expected {PREDICT} at line 1 column 28",
        ),
        (
            PredictRequest,
            '{"inputs":["a",1]}',
            422,
            "inputs[1]: invalid type: integer `1`, expected a string at line 1 column 16",
        ),
        (
            PredictRequest,
            '{"inputs":[["a"],"b"]}',
            422,
            'inputs[1]: invalid type: string "b", expected a sequence at line 1 column 20',
        ),
        (
            DecodeRequest,
            '{"ids":[1,[2]]}',
            422,
            "ids: data did not match any variant of untagged enum InputIds at line 1 column 15",
        ),
        (
            TokenizeRequest,
            '{"inputs":[1]}',
            422,
            "inputs: data did not match any variant of untagged enum TokenizeInput at line 1 column 14",
        ),
    ],
)
def test_words_and_places(kind, body, status, detail):
    assert refusal(kind, body.encode()) == (status, detail)


@given(ANYTHING, st.sampled_from(KINDS))
def test_what_is_accepted_is_no_mistake_and_what_is_refused_is_told(value, kind):
    body = json.dumps(value).encode()
    assume(len(body) <= MAX_BYTES)  # longer ones are not looked at
    refused = ""
    try:
        decode(body, kind)
    except BodyError as error:
        refused = str(error)
    assert (mistake_in(body, kind) is not None) == (" at line 1 column " in refused) == bool(refused)


@given(st.binary(max_size=60), st.sampled_from(KINDS))
def test_places_lie_within_the_body(body, kind):
    mistake = mistake_in(body, kind)
    assert mistake is None or 0 <= mistake.at <= len(body)
    assert mistake is None or describe(mistake, body).count(" at line ") >= 1


def test_a_long_body_is_not_read_again():
    body = b'{"inputs":5,"other":"' + b"a" * MAX_BYTES + b'"}'
    assert mistake_in(body, EmbedRequest) is None
    assert refusal(EmbedRequest, body)[0] == 422


def by_field(body: bytes) -> object:
    return decode_by_field(body, "texts", RerankRequest, {"documents": DocumentsRequest})


@pytest.mark.parametrize(
    "body", ["null", "{", "{}", '{"query":"q"}', '{"documents', '{"query":"q","texts":5,"documents":["a"]}']
)
def test_without_another_field_the_first_struct_says_what_is_wrong(body):
    with pytest.raises(BodyError) as caught:
        by_field(body.encode())
    assert (caught.value.status, str(caught.value).removeprefix(caught.value.prefix)) == refusal(RerankRequest, body.encode())


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ('{"query":"q","texts":["a"]}', RerankRequest),
        ('{"query":"q","documents":["a"]}', DocumentsRequest),
        ('{"query":"q","documents":["texts"]}', DocumentsRequest),
        ('{"query":"q","documents":[{"text":"a","texts":[1]}]}', DocumentsRequest),
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


@pytest.mark.parametrize("digits", ["-123", "+123", " 123", "1_23", "0x12", "123\xb2"])
def test_only_hexadecimal_digits_make_an_escape(digits):
    """Python would read most of these as a number, some of them as one that is no character."""
    status, detail = refusal(EmbedRequest, b'{"inputs":"\\u' + digits.encode() + b'"}')
    assert (status, detail) == (400, "inputs: invalid escape at line 1 column 17")
