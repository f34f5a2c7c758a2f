"""Compares an answer with its case."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from conformance.wire import checks
from conformance.wire.asking import Answer, ask
from conformance.wire.case import Case, Profile, Question, filled

TOLERANCE = 2e-4
# In `has`: any value, if the key exists
ANYTHING = "*"
# Characters of a body in a complaint
SHOWN = 300


def judged(
    url: str, profile_name: str, profile: Profile, cases: Sequence[Case]
) -> dict[str, list[str]]:
    """Each case that fails, as `case profile`, and why."""
    key = profile.args[profile.args.index("--api-key") + 1] if "--api-key" in profile.args else None
    failures: dict[str, list[str]] = {}
    for case in cases:
        try:
            reasons = [*_faults(url, key, case)]
        except Exception as error:
            reasons = [f"{type(error).__name__}: {error}"]
        if reasons:
            failures[f"{case.name} {profile_name}"] = reasons
    return failures


def _faults(url: str, key: str | None, case: Case) -> Iterator[str]:
    answer = replace(
        ask(url, case, key), again=lambda other: ask(url, _completed(other, case), key)
    )
    if answer.status != case.status:
        yield f"status {answer.status}, not {case.status}: {answer.text[:SHOWN]}"
        return
    yield from _headers(case, answer)
    yield from _body(case, answer)
    for check in case.check:
        name, *words = check.split()
        fault = getattr(checks, name)(answer, *words)
        if fault:
            yield f"{check}: {fault}: {answer.text[:SHOWN]}"
    for other, should_equal in ((case.same_as, True), (case.unlike, False)):
        if other is not None:
            told = ask(url, _completed(other, case), key)
            if (told.status == answer.status and _near(told.data, answer.data)) is not should_equal:
                yield (
                    f"{'differs from' if should_equal else 'equals'} that to {other.body}: "
                    f"{told.text[:SHOWN]}"
                )


def _completed(other: Question, case: Case) -> Question:
    return Question(
        request=other.request or case.request,
        headers=other.headers or case.headers,
        body=case.body if other.body is None else other.body,
        fill=other.fill or case.fill,
    )


def _headers(case: Case, answer: Answer) -> Iterator[str]:
    for name, pattern in case.header.items():
        value = answer.headers.get(name.lower())
        if value is None or not re.fullmatch(pattern, value):
            yield f"header {name}: {value!r}, not {pattern!r}"
    for name in case.absent:
        if name.lower() in answer.headers:
            yield f"header {name}: {answer.headers[name.lower()]!r}, should not be there"


def _body(case: Case, answer: Answer) -> Iterator[str]:
    if case.text is not None and answer.text != filled(case.text, case.fill):
        yield f"body {answer.text[:SHOWN]!r}, not {case.text!r}"
    if case.json is not None and not _near(
        answer.data, checks.parsed(filled(case.json, case.fill))
    ):
        yield f"body {answer.text[:SHOWN]}, not {case.json[:SHOWN]}"
    for path, value in case.has.items():
        try:
            found = at(answer.data, path)
        except (LookupError, TypeError):
            yield f"nothing at {path}: {answer.text[:SHOWN]}"
            continue
        if value != ANYTHING and not _near(found, value):
            yield f"{path}: {found!r}, not {value!r}"


def at(data: Any, path: str) -> Any:
    """What lies there: `0.score`, `data.0.index`. Raises LookupError."""
    for step in path.split("."):
        data = data[int(step) if isinstance(data, list) else step]
    return data


def _near(one: Any, other: Any) -> bool:
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_near, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return [*one] == [*other] and all(_near(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other
