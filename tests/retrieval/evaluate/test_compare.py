"""`hybridtei compare` over real servers: a planted fault is named, and backends in float32 differ in nothing."""

import base64
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from hybridtei import cli
from hybridtei.errors import InvalidInput
from hybridtei.models.checkpoint.files import embedded_model
from hybridtei.retrieval.evaluate.compare import (
    MAX_KEPT_TEXTS,
    SAMPLES,
    Server,
    read_vectors,
    replay,
)
from tests import tiny
from tests.server.live import commanded
from tests.stand_in import Answer, answering

PROMPTS = {"question": "Find what answers this question: ", "text": "A text of the collection: "}
PROMPTED = {"prompts": PROMPTS, "default_prompt_name": "question"}
DENSE = ((tiny.HIDDEN, tiny.HIDDEN, "torch.nn.modules.activation.Tanh"),)


def write(folder: Path, *, cased: bool = True, **modules: Any) -> Path:
    """A tiny BERT with the words of the embedded model."""
    tiny.write_family(folder, "bert", vocab_size=30522)
    source, _ = embedded_model()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    words = json.loads((folder / "tokenizer.json").read_text())
    words["normalizer"]["lowercase"] = not cased
    tiny.write_json(folder / "tokenizer.json", words)
    tiny.edit_json(folder / "tokenizer_config.json", do_lower_case=not cased)
    return tiny.write_modules(folder, layout="old", **{"max_seq_length": tiny.LONGEST, **modules})


def rewriting(url: str, **changes: Any) -> AbstractContextManager[str]:
    """A server in front of another that sets fields of every request: what a wrong client or proxy does."""

    def answer(method: str, path: str, body: bytes) -> Answer:
        passed = httpx.request(
            method, url + path, json={**json.loads(body), **changes} if body else None, timeout=60
        )
        return passed.status_code, {}, passed.content

    return answering(answer)


def other_weights(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {
        name: tensor + 0.05 * tensor.std() * torch.randn(tensor.shape, generator=draw)
        for name, tensor in tensors.items()
    }


def of_commands(folder: Path, stack: ExitStack, *flags: str) -> str:
    return stack.enter_context(commanded("--model-id", str(folder), "--auto-truncate", *flags))


def report_of(capsys: pytest.CaptureFixture[str], a: str, b: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = cli.main(["compare", a, b, "--json"])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


NAMED = "--default-prompt-name"
# name: (modules of A, modules of B or None for A's, changes of requests to B, flags of A, flags of B, the cause named)
Fault = tuple[
    Mapping[str, Any],
    Mapping[str, Any] | None,
    Mapping[str, Any],
    tuple[str, ...],
    tuple[str, ...],
    str,
]
FAULTS: Mapping[str, Fault] = {
    "gelu": ({}, None, {}, (), ("--gelu", "tanh"), "activation: "),
    "prompt left out": (
        PROMPTED,
        {},
        {},
        (NAMED, "question"),
        (),
        "prompt: B leaves out 'Find what",
    ),
    "another prompt": (
        PROMPTED,
        None,
        {},
        (NAMED, "question"),
        (NAMED, "text"),
        "prompt: B puts what A names `text`",
    ),
    "first token": (
        {},
        None,
        {},
        (),
        ("--pooling", "cls"),
        "pooling: A takes the mean, B the first token",
    ),
    "no normalisation": ({}, None, {"normalize": False}, (), (), "normalisation: B does not"),
    "shorter": ({}, {"max_seq_length": 64}, {}, (), (), "truncation: B is cut shorter"),
    "from the left": (
        {},
        None,
        {"truncation_direction": "left"},
        (),
        (),
        "truncation: B cuts texts from the left",
    ),
    "uncased": ({}, {"cased": False}, {}, (), (), "tokenizer: that of B is uncased"),
    "int8": ({}, None, {}, (), ("--dtype", "int8"), "dtype: float32 of A, int8 of B"),
    "another revision": ({}, None, {}, (), (), "weights: another revision"),
    "cut dimension": (
        {},
        None,
        {"dimensions": 20},
        (),
        (),
        "dimensions: B has the first 20 of the 32",
    ),
    "no Dense module": ({"dense": DENSE}, {}, {}, (), (), "weights: another revision"),
}
QUICK = "prompt left out"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder and the server of most faults' A."""
    folder = write(tmp_path_factory.mktemp("plain"))
    with ExitStack() as stack:
        yield folder, of_commands(folder, stack)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_planted_fault_is_named(name, plain, tmp_path, capsys, monkeypatch):
    modules, others, changes, flags_a, flags_b, cause = FAULTS[name]
    first = second = write(tmp_path / "a", **modules) if modules else plain[0]
    if others is not None or name == "another revision":
        second = write(tmp_path / "b", **(modules if others is None else others))
    if name == "another revision":
        tiny.change(second, other_weights)
    if name == "int8":
        monkeypatch.setenv("HYBRIDTEI_CACHE", str(tmp_path))  # its graph is kept
    with ExitStack() as stack:
        a = of_commands(first, stack, *flags_a) if modules else plain[1]
        b = (
            stack.enter_context(rewriting(a, **changes))
            if changes
            else of_commands(second, stack, *flags_b)
        )
        status, report = report_of(capsys, a, b)
    assert [found[: len(cause)] for found in report["causes"]] == [cause], report
    assert status == (0 if report["keeps_index"] else 3)
    if name not in ("gelu", "no normalisation", "int8"):
        assert not report["keeps_index"]


@pytest.mark.parametrize("backend", ["openvino", pytest.param("torch", marks=pytest.mark.slow)])
def test_backends_in_float32_agree(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "a", dense=DENSE, **PROMPTED)
    with ExitStack() as stack:
        a = of_commands(folder, stack, "--backend", "ort", "--dtype", "float32")
        b = of_commands(folder, stack, "--backend", backend, "--dtype", "float32")
        status, report = report_of(capsys, a, b)
    assert (status, report["causes"], report["overlap"]) == (0, [], 1.0)


def row(numbers: list[float], **fields: Any) -> dict[str, Any]:
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
def test_vectors_are_read_of_answers_of_tei_and_openai(answer: Any) -> None:
    assert read_vectors(answer).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "answer",
    [
        *(
            None,
            [],
            [[]],
            [[1.0], [1.0, 2.0]],
            [1.0],
            [["a"]],
            [[float("nan")]],
            {"error": "no"},
            {"data": [1]},
        ),
        *(
            {"data": []},
            {"data": [row("%%%")]},
            {"data": [row([1.0], index=None), row([1.0], index=1)]},
        ),
    ],
)
def test_what_holds_no_vectors_is_refused(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_vectors(answer)


class Recorded(Server):
    """A server of these vectors, by their place."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def replay(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._rows[body["at"]][None]


def test_a_recording_of_any_length_has_one_verdict() -> None:
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((3 * MAX_KEPT_TEXTS, 16))
    lines = [json.dumps({"path": "/embed", "body": {"at": at}}) for at in range(len(rows))]
    same, _ = replay(Recorded(rows), Recorded(rows), lines)
    assert (same.texts, same.least_cosine, same.overlap, same.keeps_index) == (
        len(rows),
        1.0,
        1.0,
        True,
    )
    odd = rows.copy()
    odd[0, 0] += 1.0  # one text, which is not among the last
    far, _ = replay(Recorded(rows), Recorded(odd), lines)
    assert (far.median_cosine, far.overlap, far.keeps_index) == (1.0, 1.0, False)
    wide, _ = replay(Recorded(rows), Recorded(np.hstack([rows, rows])), lines)
    assert (wide.causes, wide.keeps_index) == (
        ("dimensions: A has the first 16 of the 32 of B",),
        False,
    )
    with pytest.raises(InvalidInput, match="1 different texts are too few"):
        replay(Recorded(rows), Recorded(rows), lines[:1] * 100)


def test_recorded_requests_are_replayed_on_both_servers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = write(tmp_path / "right"), tiny.change(write(tmp_path / "wrong"), other_weights)
    bodies = [{"inputs": [text, f"{text} again"]} for text in SAMPLES]
    entries = [
        {"path": "/embed", "body": json.dumps(body)} for body in bodies
    ]  # as nginx logs a body
    entries += [
        {"path": "/v1/embeddings", "body": {"input": SAMPLES[0], "encoding_format": "base64"}},
        {"path": "/health", "body": ""},
    ]
    entries += [{"path": "/embed", "body": {"inputs": ""}}]  # refused by both
    recorded = tmp_path / "access.jsonl"
    recorded.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    with ExitStack() as stack:
        a, b = of_commands(right, stack), of_commands(wrong, stack)
        assert cli.main(["compare", a, a, "--from", str(recorded)]) == 0
        seen = capsys.readouterr()
        assert seen.out.split("\n")[0].split() == ["texts", "81"]
        assert "least       1.0000000" in seen.out
        assert "keep the index" in seen.out
        assert "refused: 1" in seen.err
        assert cli.main(["compare", a, b, "--from", str(recorded)]) == 3
        assert "embed again" in capsys.readouterr().out
        recorded.write_text(json.dumps(entries[0]), encoding="utf-8")
        assert cli.main(["compare", a, b, "--from", str(recorded)]) == 1
        assert "2 different texts are too few" in capsys.readouterr().err
        recorded.write_text('{"path": "/embed"}')
        assert cli.main(["compare", a, b, "--from", str(recorded)]) == 1
        assert "line 1" in capsys.readouterr().err
