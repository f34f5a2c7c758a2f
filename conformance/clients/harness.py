"""Shared by the scripts of all clients: the server's address, its plain answers, the checks and the
counts of calls.

Standard library only: it runs in every client's environment. Compares a client's results with the
same server's answers on TEI's routes to plain requests, which other tests compare with the models.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

TEXTS = ["baka lomi beti", "duna boka", "pelu dati buka bera mona", "bo"]
QUERY = "boka lomi"
# Of floats that took another way through a batch
TOLERANCE = 1e-5
TIMEOUT_SECONDS = 60
# Ignore the environment's proxy
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Skipped(Exception):
    """A call that cannot be made here, and why."""


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:300]}")
        self.status, self.text = status, text


@dataclass(frozen=True)
class Server:
    """`url` of all models; each also has all routes at `at(alias)`. `grpc`: alias -> host:port, of
    servers of one model."""

    url: str
    embed: str
    rerank: str
    classify: str
    tag: str
    grpc: dict[str, str]

    def at(self, alias: str) -> str:
        return f"{self.url}/m/{alias}"

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        alias: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """A plain request: POST of JSON, or GET without a body. Raises Refused."""
        data = None if body is None else json.dumps(body).encode()
        where = f"{self.url if alias is None else self.at(alias)}{path}"
        request = urllib.request.Request(
            where, data, {"content-type": "application/json", **(headers or {})}
        )
        try:
            with DIRECT.open(request, timeout=TIMEOUT_SECONDS) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode(errors="replace")) from None

    def vectors(self, texts: Any = TEXTS, **settings: Any) -> list[list[float]]:
        return self.ask("/embed", {"inputs": texts, **settings}, alias=self.embed)

    def ranks(
        self, texts: list[str] = TEXTS, query: str = QUERY, **settings: Any
    ) -> list[dict[str, Any]]:
        """The best first."""
        return self.ask("/rerank", {"query": query, "texts": texts, **settings}, alias=self.rerank)

    def labels(self, texts: list[str] = TEXTS, **settings: Any) -> list[list[dict[str, Any]]]:
        """The labels of each text, the best first."""
        return self.ask(
            "/predict", {"inputs": [[text] for text in texts], **settings}, alias=self.classify
        )


Call = Callable[[Server], None]
CALLS: list[Call] = []


def call(function: Call) -> Call:
    """Makes a function a call of its script. The function raises if the client's result is
    wrong."""
    CALLS.append(function)
    return function


def same(found: Any, wanted: Any, where: str = "answer") -> None:
    """Raises AssertionError unless both hold the same, floats within TOLERANCE. Arrays and tuples
    are taken for lists."""
    found, wanted = _plain(found), _plain(wanted)
    if (
        isinstance(found, float)
        and isinstance(wanted, int | float)
        and not isinstance(wanted, bool)
    ):
        assert math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE), (
            f"{where}: {found}, expected {wanted}"
        )
    elif isinstance(found, list) and isinstance(wanted, list):
        assert len(found) == len(wanted), f"{where}: {len(found)} items, expected {len(wanted)}"
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{where}[{place}]")
    elif isinstance(found, dict) and isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), (
            f"{where}: keys {sorted(found)}, expected {sorted(wanted)}"
        )
        for key in wanted:
            same(found[key], wanted[key], f"{where}.{key}")
    else:
        equal = found == wanted and isinstance(found, bool) == isinstance(wanted, bool)
        assert equal, f"{where}: {found!r}, expected {wanted!r}"


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return [*value] if isinstance(value, tuple) else value


def pairs(items: Iterable[Any], *names: str) -> list[list[Any]]:
    """The named fields of each item, whether it is an object or a dictionary."""
    return [
        [item[name] if isinstance(item, dict) else getattr(item, name) for name in names]
        for item in items
    ]


def bits(numbers: Iterable[float]) -> int:
    """Eight numbers as the byte of their signs, the first the highest."""
    return int("".join("1" if number > 0 else "0" for number in numbers), 2)


def refused(work: Callable[[], Any], *words: str) -> None:
    """Raises AssertionError unless `work` fails with all of these words."""
    try:
        work()
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        missing = [word for word in words if word not in told]
        assert not missing, f"refused as {told[:300]!r}, without {missing}"
        return
    raise AssertionError("should have been refused")


def main(client: str, package: str | None) -> None:
    """Makes all calls and prints one line of JSON. Argument: a file that tells of the server."""
    with open(sys.argv[1], encoding="utf-8") as file:
        server = Server(**json.load(file))
    version = "as its source asks" if package is None else importlib.metadata.version(package)
    told: dict[str, Any] = {
        "client": client,
        "version": version,
        "passed": [],
        "failed": {},
        "skipped": {},
    }
    for one in CALLS:
        name = one.__name__
        try:
            one(server)
        except Skipped as reason:
            told["skipped"][name] = str(reason)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            told["failed"][name] = (
                f"{type(error).__name__}: {str(error)[:300]} ({place.name}:{place.lineno})"
            )
        else:
            told["passed"].append(name)
    print(json.dumps(told), flush=True)
