"""Checks of answers that cases name, with words as arguments. Each check returns the fault, or
None."""

import base64
import json
import re
import struct
from typing import Any

import numpy as np

from conformance.wire.asking import Answer
from conformance.wire.case import Question

TIMES = (
    "x-compute-time",
    "x-total-time",
    "x-tokenization-time",
    "x-queue-time",
    "x-inference-time",
)
NUMBER = re.compile(r"(?<=[\[,:])-?[0-9][0-9.eE+-]*")
SUMS_TO_ONE = 1e-4


def parsed(text: str) -> Any:
    return json.loads(text)


def empty(answer: Answer) -> str | None:
    """No body and no content type."""
    return None if not answer.body and "content-type" not in answer.headers else "not empty"


def times(answer: Answer) -> str | None:
    """The headers of 1.5."""
    if answer.headers.get("x-compute-type") != "gpu+optimized":
        return f"x-compute-type {answer.headers.get('x-compute-type')}"
    return next(
        (
            f"{name} {answer.headers.get(name)}"
            for name in TIMES
            if not answer.headers.get(name, "").isdigit()
        ),
        None,
    )


def no_times(answer: Answer) -> str | None:
    found = [name for name in answer.headers if name.startswith("x-")]
    return f"headers {found}" if found else None


def vectors(answer: Answer, count: str, width: str) -> str | None:
    """Expect this number of vectors of this width."""
    found = np.array(answer.data, dtype=object)
    return None if found.shape == (int(count), int(width)) else f"shape {found.shape}"


def unit(answer: Answer) -> str | None:
    norms = np.linalg.norm(np.array(answer.data, dtype=float), axis=-1)
    return None if np.allclose(norms, 1, atol=1e-4) else f"lengths {norms}"


def not_unit(answer: Answer) -> str | None:
    return None if unit(answer) else "of length 1"


def tokens(answer: Answer, *lengths: str) -> str | None:
    """Expect a list per input with this number of vectors."""
    found = [len(rows) for rows in answer.data]
    return None if found == [*map(int, lengths)] else f"lengths {found}"


def sparse(answer: Answer, count: str) -> str | None:
    """Expect this number of sparse vectors: ascending indices, no zeros, keys in order."""
    if len(answer.data) != int(count):
        return f"{len(answer.data)} vectors"
    for row in answer.data:
        if not row or any([*entry] != ["index", "value"] or entry["value"] == 0 for entry in row):
            return "entries"
        indices = [entry["index"] for entry in row]
        if indices != sorted(set(indices)):
            return "order"
    return None


def falling(answer: Answer) -> str | None:
    """Scores, the best first."""
    scores = [entry["score"] for entry in answer.data]
    return None if scores == sorted(scores, reverse=True) else "order"


def probabilities(answer: Answer) -> str | None:
    """They sum to one."""
    total = sum(entry["score"] for entry in answer.data)
    return None if abs(total - 1) < SUMS_TO_ONE else f"sum {total}"


def between_zero_and_one(answer: Answer) -> str | None:
    return None if all(0 < entry["score"] < 1 for entry in answer.data) else "scores"


def keys(answer: Answer, *names: str) -> str | None:
    """The keys of the object, or of each object in the list, in order; `...`: more may follow."""
    rows = answer.data if isinstance(answer.data, list) else [answer.data]
    for row in rows:
        found = [*row]
        wanted = [name for name in names if name != "..."]
        if (found[: len(wanted)] if "..." in names else found) != wanted:
            return f"keys {found}"
    return None


def length(answer: Answer, count: str) -> str | None:
    return None if len(answer.data) == int(count) else f"length {len(answer.data)}"


def order(answer: Answer, *indices: str) -> str | None:
    """`index` of each, in order."""
    found = [entry["index"] for entry in answer.data]
    return None if found == [*map(int, indices)] else f"order {found}"


def before(answer: Answer, first: str, second: str) -> str | None:
    """Index `first` is before `second`, with an equal score."""
    found = [entry["index"] for entry in answer.data]
    scores = {entry["index"]: entry["score"] for entry in answer.data}
    if scores[int(first)] != scores[int(second)]:
        return "scores differ"
    return None if found.index(int(first)) < found.index(int(second)) else f"order {found}"


def shortest_floats(answer: Answer) -> str | None:
    """Each number as the shortest decimal that gives its float32 back; none as an integer."""
    for number in NUMBER.findall(answer.text):
        if (
            len(number) > len(np.format_float_positional(np.float32(number), unique=True, trim="0"))
            and "e" not in number
        ):
            return f"{number} is not the shortest"
        if np.float32(number) != np.float32(
            np.format_float_scientific(np.float32(number), unique=True)
        ):
            return f"{number} does not round-trip"
        if "." not in number and "e" not in number:
            return f"{number} looks like an integer"
    return None


def compact(answer: Answer) -> str | None:
    """No spaces between."""
    return "spaces" if re.search(r'[\]},:"]\s|[,:]\s', answer.text) else None


def base64_vectors(answer: Answer, count: str, width: str) -> str | None:
    """Little-endian float32 of length one."""
    for item in answer.data["data"]:
        raw = base64.b64decode(item["embedding"], validate=True)
        row = np.array(struct.unpack(f"<{len(raw) // 4}f", raw))
        if len(row) != int(width) or abs(float(np.linalg.norm(row)) - 1) > SUMS_TO_ONE:
            return "vector"
    return None if len(answer.data["data"]) == int(count) else "count"


def float_vectors(answer: Answer, count: str, width: str) -> str | None:
    """OpenAI's answer: keys in order, places, vectors of length one."""
    data = answer.data["data"]
    if [*answer.data] != ["object", "data", "model", "usage"]:
        return f"keys {[*answer.data]}"
    for place, item in enumerate(data):
        if (
            [*item] != ["object", "embedding", "index"]
            or item["object"] != "embedding"
            or item["index"] != place
        ):
            return f"item {place}"
        if (
            len(item["embedding"]) != int(width)
            or abs(float(np.linalg.norm(item["embedding"])) - 1) > SUMS_TO_ONE
        ):
            return f"vector {place}"
    return None if len(data) == int(count) else f"{len(data)} vectors"


def paths(answer: Answer, *names: str) -> str | None:
    """The OpenAPI document holds these."""
    missing = set(names) - answer.data["paths"].keys()
    return f"without {sorted(missing)}" if missing else None


def no_paths(answer: Answer, *names: str) -> str | None:
    found = set(names) & answer.data["paths"].keys()
    return f"with {sorted(found)}" if found else None


def schemas(answer: Answer, *names: str) -> str | None:
    """The OpenAPI document holds these components, and every reference in it leads somewhere."""
    known = answer.data["components"]["schemas"].keys()
    missing = set(names) - known
    lost = {
        name
        for name in re.findall(r'"#/components/schemas/([^"]+)"', answer.text)
        if name not in known
    }
    return f"without {sorted(missing | lost)}" if missing | lost else None


def holds(answer: Answer, *words: str) -> str | None:
    """The body, these words one after another with a space between."""
    return None if " ".join(words) in answer.text else "missing"


def wide(answer: Answer, width: str) -> str | None:
    """Expect token vectors of this width."""
    found = {len(row) for rows in answer.data for row in rows}
    return None if found == {int(width)} else f"widths {found}"


def prediction_vectors(answer: Answer, width: str) -> str | None:
    """Vertex AI's envelope around vectors."""
    found = {len(row) for rows in answer.data["predictions"] for row in rows}
    return None if found == {int(width)} else f"widths {found}"


def equal(answer: Answer, one: str, other: str) -> str | None:
    """Two entries of a list, to the last digits that a float32 is good for."""
    first, second = (np.array(answer.data[int(place)], dtype=float) for place in (one, other))
    return None if np.allclose(first, second, atol=1e-5) else "differ"


def first_of_three(answer: Answer) -> str | None:
    """The answer for a text alone is that among others of like and of other lengths."""
    others = _again(answer, '{"inputs":["baka","bake balo balu bami bamo bana","bape"]}').data[0]
    alone = answer.data[0]
    if alone and isinstance(alone[0], dict):
        near = [entry["index"] for entry in alone] == [entry["index"] for entry in others]
        one, other = ([entry["value"] for entry in row] for row in (alone, others))
    else:
        near, one, other = True, alone, others
    return (
        None
        if near and np.allclose(np.array(one), np.array(other), atol=1e-4)
        else "depends on its neighbours"
    )


def pooled(answer: Answer, how: str) -> str | None:
    """The vector is the first, the last or the mean of its tokens' vectors."""
    rows = np.array(_again(answer, None, "POST /embed_all").data[0])
    wanted = {"first": rows[0], "last": rows[-1], "mean": rows.mean(axis=0)}[how]
    return None if np.allclose(wanted, np.array(answer.data[0]), atol=1e-4) else "another vector"


def prefix_of_whole(answer: Answer) -> str | None:
    """Asked for fewer dimensions without normalisation, the vector is cut and nothing else."""
    whole = _again(answer, '{"inputs":"baka","normalize":false}').data[0]
    return (
        None
        if np.allclose(whole[: len(answer.data[0])], answer.data[0], atol=1e-5)
        else "another vector"
    )


def counted_once(answer: Answer) -> str | None:
    """One request has come in, and one was answered."""
    metrics = _again(answer, None, "GET /metrics").text
    for name in ("te_request_count", "te_request_success"):
        if f'{name}{{method="single"}} 1\n' not in metrics:
            return f"{name} {metrics[:200]}"
    return None


def _again(answer: Answer, body: str | None, request: str = "") -> Answer:
    assert answer.again is not None
    return answer.again(Question(request=request, body=body))
