"""`hybridtei compare` over real servers: a planted difference ends an index, and backends in
float32 agree."""

import base64
import json
import shutil
from contextlib import ExitStack

import httpx
import numpy as np
import pytest
import torch

from conformance.small import tiny
from hybridtei import cli
from hybridtei.errors import InvalidInput
from hybridtei.models.checkpoint.files import embedded_model
from hybridtei.retrieval.evaluate.compare import (
    MAX_SEARCHED,
    SAMPLES,
    Endpoint,
    read_vectors,
    replay,
)
from tests.server.live import commanded
from tests.stand_in import answering

PROMPTS = {"question": "Find what answers this question: ", "text": "A text of the collection: "}
PROMPTED = {"prompts": PROMPTS, "default_prompt_name": "question"}


def write(folder, **modules):
    """A tiny BERT with the words of the embedded model."""
    tiny.write_family(folder, "bert", vocab_size=30522)
    source, _ = embedded_model()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    return tiny.write_modules(folder, layout="old", **{"max_seq_length": tiny.LONGEST, **modules})


def rewriting(url, **changes):
    """A server in front of another that sets fields of every request: what a wrong client or proxy
    does."""

    def answer(method, path, body):
        passed = httpx.request(
            method, url + path, json={**json.loads(body), **changes} if body else None, timeout=60
        )
        return passed.status_code, {}, passed.content

    return answering(answer)


def other_weights(tensors):
    draw = torch.Generator().manual_seed(3)
    return {
        name: tensor + 0.05 * tensor.std() * torch.randn(tensor.shape, generator=draw)
        for name, tensor in tensors.items()
    }


def of_commands(folder, stack, *flags):
    return stack.enter_context(commanded("--model-id", str(folder), "--auto-truncate", *flags))


def report_of(capsys, a, b):
    capsys.readouterr()
    status = cli.main(["compare", a, b, "--json"])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder and the server of A."""
    folder = write(tmp_path_factory.mktemp("plain"), **PROMPTED)
    with ExitStack() as stack:
        yield folder, of_commands(folder, stack)


def test_the_facts_that_differ_stand_side_by_side(plain, capsys):
    folder, a = plain
    with ExitStack() as stack:
        b = of_commands(folder, stack, "--default-prompt-name", "question")
        status, report = report_of(capsys, a, b)
        assert cli.main(["compare", a, b]) == status == 3
    assert "hybridtei.fingerprint.id" in report["info"]
    assert len(report["info"]) < 10
    assert "hybridtei.fingerprint.id" in capsys.readouterr().out
    assert not report["keeps_index"]


def test_another_truncation_and_another_width_end_an_index(plain, capsys):
    _, a = plain
    with rewriting(a, truncation_direction="left") as b:
        status, report = report_of(capsys, a, b)
    assert (status, report["least_cosine"], report["info"]) == (3, 1.0, {})
    assert report["long_cosine"] < 0.999
    with rewriting(a, dimensions=20) as b:
        status, report = report_of(capsys, a, b)
    assert (status, report["widths"], report["median_cosine"]) == (3, [32, 20], None)
    with rewriting(a, normalize=False) as b:
        status, report = report_of(capsys, a, b)
    assert (status, report["keeps_index"]) == (0, True)


def row(numbers, **fields):
    return {"embedding": numbers, **fields}


@pytest.mark.parametrize(
    "answer",
    [
        [[1.0, 2.0], [3.0, 4.0]],
        {"data": [row([3.0, 4.0], index=1), row([1.0, 2.0], index=0)]},
        {"data": [row([1.0, 2.0]), row([3.0, 4.0])]},
        {
            "data": [
                row(base64.b64encode(np.float32(numbers).tobytes()).decode())
                for numbers in ([1, 2], [3, 4])
            ]
        },
    ],
)
def test_vectors_are_read_of_answers_of_tei_and_openai(answer):
    assert read_vectors(answer).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        [[]],
        [[1.0], [1.0, 2.0]],
        [["a"]],
        [[float("nan")]],
        {"error": "no"},
        {"data": [1]},
        {"data": [row("%%%")]},
        {"data": [row([1.0], index=None), row([1.0], index=1)]},
    ],
)
def test_what_holds_no_vectors_is_refused(answer):
    with pytest.raises(ValueError, match=r"."):
        read_vectors(answer)


class Recorded(Endpoint):
    """A server of these vectors, by their place."""

    def __init__(self, rows):
        self._rows = rows
        self.info = {}

    def replay(self, path, body):
        return self._rows[body["at"]][None]


def test_a_recording_of_any_length_has_one_verdict():
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((3 * MAX_SEARCHED, 16))
    lines = [json.dumps({"path": "/embed", "body": {"at": at}}) for at in range(len(rows))]
    same, _ = replay(Recorded(rows), Recorded(rows), lines)
    assert (same.texts, same.least_cosine, same.overlap, same.keeps_index) == (
        len(rows),
        1.0,
        1.0,
        True,
    )
    odd = rows.copy()
    # One text, which is not among the last
    odd[0, 0] += 1.0
    far, _ = replay(Recorded(rows), Recorded(odd), lines)
    assert (far.median_cosine, far.overlap, far.keeps_index) == (1.0, 1.0, False)
    wide, _ = replay(Recorded(rows), Recorded(np.hstack([rows, rows])), lines)
    assert (wide.widths, wide.keeps_index) == ((16, 32), False)
    with pytest.raises(InvalidInput, match="1 different texts are too few"):
        replay(Recorded(rows), Recorded(rows), lines[:1] * 100)


def test_recorded_requests_are_replayed_on_both_servers(tmp_path, capsys):
    right, wrong = write(tmp_path / "right"), tiny.change(write(tmp_path / "wrong"), other_weights)
    bodies = [{"inputs": [text, f"{text} again"]} for text in SAMPLES]
    # As nginx logs a body
    entries = [{"path": "/embed", "body": json.dumps(body)} for body in bodies]
    entries += [
        {"path": "/v1/embeddings", "body": {"input": SAMPLES[0], "encoding_format": "base64"}},
        {"path": "/health", "body": ""},
    ]
    # Refused by both
    entries += [{"path": "/embed", "body": {"inputs": ""}}]
    recorded = tmp_path / "access.jsonl"
    recorded.write_text("\n".join(map(json.dumps, entries)))

    def told(a, b, status):
        assert cli.main(["compare", a, b, "--from", str(recorded)]) == status
        return "".join(capsys.readouterr())

    with ExitStack() as stack:
        a, b = of_commands(right, stack), of_commands(wrong, stack)
        same = told(a, a, 0)
        assert same.split("\n")[0].split() == ["texts", "81"]
        for words in ("least       1.0000000", "keep the index", "refused: 1"):
            assert words in same
        assert "embed again" in told(a, b, 3)
        recorded.write_text(json.dumps(entries[0]))
        assert "2 different texts are too few" in told(a, b, 1)
        recorded.write_text('{"path": "/embed"}')
        assert "line 1" in told(a, b, 1)
