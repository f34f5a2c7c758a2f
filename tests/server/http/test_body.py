"""Bad input, each kind: a precise refusal in TEI's form; and after each the server answers a fixed
request as ever."""

import asyncio
import json
import socket
import time
from contextlib import suppress
from http.client import HTTPConnection
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.server.api.tei import EmbedRequest, PredictRequest
from hybridtei.server.http import body as module
from hybridtei.server.http.body import BodyError, check_values, decode
from tests.inference.engine import small
from tests.resident import leaving
from tests.server.live import HANG, JSON

SYNTAX = "Failed to parse the request body as JSON: "
SHAPE = "Failed to deserialize the JSON body into the target type: "
TOO_LARGE = "Failed to buffer the request body: length limit exceeded"
NOT_JSON = "Expected request with `Content-Type: application/json`"
DEEP = b"[" * 10_000 + b"]" * 10_000
UNKNOWN_PROMPT = (
    "`default-prompt-name` is set to `nobody` but it was not found in the Sentence Transformers "
    'prompts. Available prompts: ["query", "passage"]'
)
TOO_WIDE = "`dimensions` should be smaller than the maximum embedding dimension."
LAST_ID = f"but the vocabulary ends at {len(small.PIECES) - 1}"
MIXED = "inputs: got ids beside texts or lists, expected ids alone, or texts and lists of ids"


@pytest.fixture
def asked(server):
    """The shared server, which must be well afterwards."""
    yield server
    server.is_well()


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b'\xef\xbb\xbf{"inputs":"a"}', "invalid character (byte 0)"),
        (b'{"inputs":"\xff"}', "a string is not UTF-8: invalid start byte"),
        # A surrogate in UTF-8's form, and as an escape
        (b'{"inputs":"\xed\xa0\x80"}', "a string is not UTF-8: invalid continuation byte"),
        (b'{"inputs":"\\ud800"}', "half of a surrogate pair"),
        (b'{"inputs":"a\0b"}', "invalid character (byte 12)"),
        (b'{"inputs":"a\nb"}', "invalid character (byte 12)"),
        (b'{"inputs":[1e400]}', "inputs[0]: number out of range"),
        (b'{"inputs":[1' + b"0" * 5000 + b"]}", "inputs[0]: integer value out of range"),
        (b'{"inputs":"a","other":' + DEEP + b"}", "arrays and objects are nested too deeply"),
        (b'{"inputs":"a', "it ends too early (byte 12)"),
    ],
)
def test_what_is_not_json_is_400_in_plain_text(asked, body, detail):
    response = asked.post("/embed", body)
    assert response.status_code == 400
    assert response.text == SYNTAX + detail
    assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert "x-compute-type" not in response.headers


@pytest.mark.parametrize(
    ("path", "body", "detail"),
    [
        ("/embed", b"[]", "expected `object`, got `array`"),
        ("/embed", DEEP, "expected `object`"),
        ("/embed", {"inputs": None}, "inputs: "),
        ("/embed", {"inputs": {"text": "a"}}, "inputs: "),
        ("/embed", {"inputs": [1.0]}, "inputs[0]: "),
        ("/embed", {"inputs": [2**63]}, "inputs[0]: "),
        ("/embed", {"inputs": [True]}, "inputs[0]: "),
        ("/embed", {"inputs": ["a", [2**32]]}, "inputs[1][0]: "),
        ("/embed", {"inputs": [["a"]]}, "inputs[0][0]: "),
        ("/embed", {"inputs": [1, "a"]}, MIXED),
        ("/embed", {"inputs": ["a", 1]}, MIXED),
        ("/embed", {"inputs": [[1], 1]}, MIXED),
        ("/embed", b'{"inputs":' + DEEP + b"}", "inputs[0][0]: "),
        ("/embed", b'{"truncate":null,"inputs":"a","truncate":null}', "duplicate field `truncate`"),
        ("/embed", b'{"inputs":"a","inputs":"a","other":"\xff"}', "duplicate field `inputs`"),
        (
            "/embed",
            b'{"inputs":"a","inputs":"a","other":1' + b"0" * 5000 + b"}",
            "duplicate field `inputs`",
        ),
        (
            "/embed",
            b'{"inputs":"a","inputs":"a","other":' + DEEP + b"}",
            "duplicate field `inputs`",
        ),
        ("/", b'{"inputs":"a","inputs":"a"}', "duplicate field `inputs`"),
        ("/embed_hybrid", {"inputs": "a", "outputs": ["vectors"]}, "outputs[0]: "),
        ("/embed_hybrid", {"inputs": "a", "outputs": ["tokens"]}, "outputs[0]: "),
        ("/embed_hybrid", {"inputs": "a", "outputs": "dense"}, "outputs: "),
        ("/embed_hybrid", {"inputs": "a", "sparse_format": "csr"}, "sparse_format: "),
        ("/decode", {"ids": [2**32]}, "ids[0]: "),
        (
            "/similarity",
            {"inputs": {"source_sentence": None, "sentences": ["a"]}},
            "inputs.source_sentence: ",
        ),
        ("/vertex", {"instances": None}, "instances: "),
    ],
)
def test_json_of_another_shape_is_422_in_plain_text_and_names_the_field(asked, path, body, detail):
    response = asked.post(path, body)
    assert response.status_code == 422
    assert response.text.startswith(SHAPE + detail)
    assert response.headers["content-type"] == "text/plain; charset=utf-8"


def test_the_shape_of_openais_body_is_told_in_openais_format(asked):
    response = asked.post("/v1/embeddings", {"input": [1, "a"]})
    message = response.json()["error"]["message"]
    assert (response.status_code, response.json()["message"]) == (422, message)
    assert message.startswith(f"{SHAPE}input: got ids beside texts")


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/decode", {"ids": [[1], []]}, "`input_ids` cannot be empty"),
        ("/decode", {"ids": [[5]] * 33}, "batch size 33 > maximum allowed batch size 32"),
        ("/embed", {"inputs": "a", "dimensions": 10**30}, TOO_WIDE),
        ("/tokenize", {"inputs": "a", "prompt_name": "nobody"}, UNKNOWN_PROMPT),
        ("/embed", {"inputs": [[5], [999_999]]}, f"`inputs` holds the id 999999, {LAST_ID}"),
        ("/embed", {"inputs": [2**32 - 1]}, f"`inputs` holds the id 4294967295, {LAST_ID}"),
        (
            "/embed",
            {"inputs": [small.IDS[small.CONTROL]]},
            "`inputs` holds an input that becomes no token at all",
        ),
    ],
)
def test_values_outside_their_limits_in_teis_words(asked, path, body, error):
    """Those that `conformance/wire` does not ask for."""
    response = asked.post(path, body)
    kind, status = ("Empty", 400) if error.endswith("empty") else ("Validation", 422)
    told = error if error.startswith("batch") else f"Input validation error: {error}"
    assert (response.status_code, [*response.json().items()]) == (
        status,
        [("error", told), ("error_type", kind)],
    )
    assert response.headers["content-type"] == "application/json"
    assert "x-compute-type" not in response.headers


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":"a"} and more',
        b'{"inputs":"a"}{"inputs":"b"}',
        b'{"inputs":"a"}\xff',
        b' \n\t{"inputs":"a"}\r\n ',
        b'{"inputs":"a","other":{"inputs":"b","deep":[1,{"inputs":"c"}]}}',
        b'{"inputs":"a","truncate":null,"prompt_name":null,"dimensions":null}',
        b'{"other":"\\"inputs\\":","inputs":"a"}',
    ],
)
@pytest.mark.parametrize("path", ["/embed", "/"])
def test_what_is_allowed(asked, path, body):
    assert asked.post(path, body).json() == asked.post("/embed", {"inputs": "a"}).json()


@pytest.mark.parametrize(
    "text",
    [
        "\0",
        "\0" * 50,
        "a\0b",
        "\u202e",
        "\ufeff",
        "\U0010ffff",
        "🙂" * 20,
        "\x7f\x1b[31m",
        "\r\n",
        " ",
    ],
)
@pytest.mark.parametrize("path", ["/embed_hybrid", "/tokenize"])
def test_odd_text_is_text(asked, path, text):
    assert asked.post(path, {"inputs": text}).status_code == 200


def test_which_content_types_are_jsons(asked):
    for kind in (None, "application/jsonx", "json", "text/json", "a/b; c=json"):
        response = asked.post(
            "/embed", b"not even JSON", headers={} if kind is None else {"content-type": kind}
        )
        assert (response.status_code, response.text) == (415, NOT_JSON)
        assert response.headers["content-type"] == "text/plain; charset=utf-8"
    assert (
        asked.post(
            "/embed", {"inputs": "a"}, headers={"content-type": "application/json;"}
        ).status_code
        == 200
    )


def test_compressed_bodies_are_refused(asked):
    for coding in ("gzip", "zstd, gzip", "br"):
        response = asked.post("/embed", b"\x1f\x8b", headers={**JSON, "content-encoding": coding})
        assert (response.status_code, response.text) == (
            415,
            f"Expected a body without `content-encoding`. Given: {coding}",
        )
    assert (
        asked.post(
            "/embed", {"inputs": "a"}, headers={**JSON, "content-encoding": "identity"}
        ).status_code
        == 200
    )


def test_a_chunked_body_over_the_limit(asked):
    chunks = (b"a" * 100_000 for _ in range(100))
    response = asked.client.post("/embed", content=chunks, headers=JSON)
    assert (response.status_code, response.text) == (413, TOO_LARGE)


def test_a_chunked_body_under_the_limit(asked):
    response = asked.client.post(
        "/embed", content=iter([b'{"inp', b'uts":', b'"a"}']), headers=JSON
    )
    assert response.json() == asked.post("/embed", {"inputs": "a"}).json()


@pytest.mark.parametrize(
    "data",
    [
        # A TLS hello
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST /embed HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /embed HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
        b"POST /embed HTTP/1.1\r\nhost",
    ],
)
def test_what_is_not_http_or_ends_early_harms_nobody(asked, data):
    with socket.create_connection(("127.0.0.1", asked.port), timeout=HANG) as raw:
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        answer = raw.recv(4096)
    assert not answer.startswith(b"HTTP/1.1 2")


def decoded(body, kind):
    """The decoded request, or the refusal."""
    try:
        return decode(body, kind)
    except BodyError as refusal:
        return refusal


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"inputs":"a","truncation_direction":"null"}', 422),
        (b'{"inputs":"a","truncation_direction":"out of range"}', 422),
        (b'{"\\u0069nputs":"a","inputs":"b"}', 422),
    ],
)
def test_what_a_value_says_decides_no_status(asked, body, status):
    assert asked.post("/embed", body).status_code == status


def test_rules_hold_within_nested_objects(asked):
    twice = b'{"inputs":{"source_sentence":"a","source_sentence":"b","sentences":["c"]}}'
    null = b'{"inputs":{"source_sentence":"a","sentences":["c"]},"parameters":{"truncation_direction":null}}'
    assert [asked.post("/similarity", body).status_code for body in (twice, null)] == [422, 400]


LONG = b'{"a":1},' * 1000


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/embed", b'{"x":[%b{}],"\\u0069nputs":"a","inputs":"b"}', 422),
        ("/embed", b'{"x":[%b{}],"inputs":"a","inputs":"b"} trailing', 422),
        ("/embed", b'{"x":[%b{"inputs":1,"\\u0069nputs":2}],"inputs":"b","other":"inputs"}', 200),
        (
            "/similarity",
            b'{"x":[%b{}],"inputs":{"source_sentence":"a","source_sentence":"b","sentences":["c"]}}',
            422,
        ),
        (
            "/similarity",
            b'{"x":[%b{}],"inputs":{"source_sentence":"a","sentences":["c"]},"parameters":null,"y":"inputs"}',
            200,
        ),
    ],
)
def test_a_field_given_twice_in_a_long_body(asked, path, body, status):
    answered = asked.post(path, body % LONG)
    assert answered.status_code == status
    assert status == 200 or "duplicate field `" in answered.text


def test_a_long_body_is_not_read_key_by_key_in_search_of_a_field_given_twice(monkeypatch):
    """It would take the event loop for as long as a pass takes: objects without end, and escapes
    that name nothing."""
    read = []
    monkeypatch.setattr(json.JSONDecoder, "raw_decode", lambda *_: read.append(1))
    body = b'{"inputs":"a","x":[%b{}],%b"y":"\\u0069"}' % (LONG, b'"k":0,' * 100_000)
    assert decoded(body, EmbedRequest).inputs == "a"
    assert not read


@pytest.mark.parametrize("value", [b"5,", b'"a",', b'"a, b, c",', b"[7],", b'"\\"",', b'{"a":1},'])
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(asked, value):
    body = b'{"input":[%b]}' % (value * 300_001)
    answered = asked.post("/v1/embeddings", body)
    assert answered.status_code == 413
    assert "more than 300000 values" in answered.json()["message"]
    if len(body) < 2_000_000:
        answered = asked.post("/embed", body)
        assert (answered.status_code, "more than 300000 values" in answered.text) == (413, True)


@pytest.mark.parametrize("text", ["," * 400_000, '\\" ,[' * 200_000, "a, {b\\", "\\" * 9])
def test_marks_in_texts_are_no_values(text):
    body = json.dumps({"inputs": [text] * 3}).encode()
    check_values(body, 10)
    with pytest.raises(BodyError):
        check_values(body, 2)


@pytest.mark.parametrize("value", [b'"a"', b'["a"]', b'["a, [", "b"]'])
def test_a_list_of_too_many_items_is_told_its_limit(asked, value):
    one = value + b","
    answered = asked.post("/predict", b'{"inputs":[%b%b]}' % (one * 89_999, value))
    assert answered.status_code == 422
    assert answered.text.startswith(f"{SHAPE}inputs: expected `array` of length <= 20000, got [")


@given(st.lists(st.sampled_from(['"', ",", "[", "a", "{", "]"])), st.integers(1, 9))
def test_marks_outside_of_texts_are_counted_in_windows(characters, window):
    """A text may begin in one window and end in another."""
    plain = "".join(characters).encode()
    expected = sum(
        piece.count(mark) for piece in plain.split(b'"')[::2] for mark in (b",", b"[", b"{")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_BYTES", window)
        assert module._outside(plain, 10**9) == expected


def test_a_list_in_a_text_is_no_list():
    request = decoded(b'{"inputs":"[%b"}' % (b"a, " * 60_000), PredictRequest)
    assert len(request.inputs) == 180_001


def test_a_long_table_with_escapes_has_no_fields_to_be_given_twice():
    body = b'{"model_id":"a","dtype":"%b"}' % (b"\\u00df" * 1000)
    assert decoded(body, dict[str, Any]) == {"model_id": "a", "dtype": "ß" * 1000}


ESCAPES = [rb"\ud83d", rb"\uDE00", rb"\\", rb"\u0041", rb"\"", b"u", b"d83d"]


@given(st.lists(st.sampled_from(ESCAPES)), st.integers(1, 9))
def test_halves_of_pairs_are_found_window_by_window(pieces, window):
    """One search of a body of 32 MB takes half a second, in which no other thread runs."""
    body = b"".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WINDOW_BYTES", window)
        spans = [half.span() for half in module._halves(body)]
    assert spans == [half.span() for half in module.HALF.finditer(body)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"input":"'.encode("utf-16-le") + b"\0\xd8" * 9, "it is not utf-16-le"),
        (b'{"input":"a","encoding_format":"%b"}' % (b"a" * 90_000), "encoding_format: got 'aaa"),
    ],
)
def test_what_is_refused_is_told_without_its_megabytes(asked, body, message):
    answered = asked.post("/v1/embeddings", body)
    assert answered.status_code in (400, 422)
    assert message in answered.json()["message"]
    assert len(answered.text) < 5_000


def test_the_event_loop_makes_a_pass_between_the_bodies_of_several_clients():
    """So a small request waits for one large body, not for those of all clients."""
    steps = []

    async def send(number):
        body = bytes(module.TURN_BYTES + 1)
        with suppress(BodyError):
            await module.in_turn(body, fail if number % 2 else steps.append, "body")

    def fail(step):
        steps.append(step)
        raise BodyError("malformed")

    async def watch():
        clients = asyncio.gather(*map(send, range(8)))
        while not clients.done():
            steps.append("pass")
            await asyncio.sleep(0)

    asyncio.run(watch())
    assert steps.count("body") == 8
    assert ("body", "body") not in pairwise(steps)


def test_one_of_the_largest_bodies_is_decoded_at_a_time():
    """Each holds the interpreter's lock for much of the time."""
    inside, counts = [], set()

    def step():
        inside.append(None)
        counts.add(len(inside))
        time.sleep(0.001)
        inside.pop()

    async def send():
        body = bytes(module.PART_BYTES + 1)
        await asyncio.gather(*(module.in_turn(body, step) for _ in range(8)))

    asyncio.run(send())
    assert counts == {1}


def test_no_answer_and_no_error_leaves_its_body(server):
    text = "one " * 2_000_000
    more = {"well": {}, "too wide": {"dimensions": -1}, "no number": {"dimensions": "one"}}
    bodies = [json.dumps({"input": text, **fields}) for fields in more.values()]

    def statuses():
        for body in bodies:
            client = HTTPConnection("127.0.0.1", server.port)
            client.request("POST", "/v1/embeddings", body, JSON)
            yield client.getresponse().status
            client.close()

    assert [*statuses()] == [200, 422, 422]
    with leaving(24_000_000):
        for _ in range(2):
            assert len([*statuses()]) == 3
