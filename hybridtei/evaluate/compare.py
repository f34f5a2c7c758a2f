"""Compares two embedding servers: whether the vectors that A made can be searched by queries that B embeds."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import httpx
import numpy as np
import orjson

from hybridtei.errors import InvalidInput
from hybridtei.evaluate import signs
from hybridtei.evaluate.signs import SAME, Vectors, apart, unit

REQUEST_TEXTS = 32
TIMEOUT_S = 120.0
NEIGHBOURS = 10
KEPT_APART, KEPT_OVERLAP = 1e-4, 0.99  # an index is kept up to this 1 - cosine, from this overlap on
VERDICTS = {True: "keep the index", False: "embed again"}
SAMPLES = tuple(
    """\
The Treaty of Versailles was signed in June 1919 in the Hall of Mirrors.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.
How do I reset the password of my online banking account?
The Amazon carries more water to the sea than any other river on Earth.
A sorting algorithm puts the elements of a list into a certain order.
Boundary layers of air on a swept wing become turbulent at high speed.
Whales are mammals: they breathe air and feed their young with milk.
The court held that the contract was void because of a mistake of fact.
What causes inflation, and how do central banks fight it?
Vaccines train the immune system to recognise a virus before it meets it.
Python is a language whose blocks are marked by indentation.
The Moon always shows the same side to us, since it turns as it orbits.
Bake the bread for forty minutes until its crust is brown.
The train from Berlin to Prague leaves at ten past nine from platform six.
Shakespeare wrote Hamlet around the year 1600.
Which planets of the Solar System have rings?
The patient complained of fever, cough and pain in the chest.
Interest rates rose by a quarter of a point in September.
Mount Everest grows by a few millimetres every year.
Beethoven went on composing after he had lost his hearing.
An index makes a database find rows without reading the whole table.
The goalkeeper saved two penalties, and Spain won the final.
Earthquakes happen where plates of the crust slide past each other.
Who invented the telephone, Bell or Meucci?
Recycling aluminium takes a twentieth of the energy of making it new.
The committee postponed its vote on the budget until Monday.
Bees tell each other by a dance where the flowers are.
Heat flows from warm bodies to cold ones, never by itself the other way.
The museum in Cairo shows the golden mask of Tutankhamun.
A vector database stores embeddings and finds the nearest of them.
Drinking too much coffee can make your hands shake.
Ships passing through the Panama Canal are lifted by locks.
The old man and the boy sat on the terrace and watched the sea.
Transformers replaced recurrent networks in machine translation.
Where can I renew my passport while I live abroad?
Glaciers in the Alps have lost half of their ice since 1900.
Milk turns sour when bacteria make lactic acid of its sugar.
The suspect fled on a bicycle across the bridge.
Light of short wavelength is scattered more, so the sky is blue.
NASA launched both Voyager probes in the summer of 1977.""".splitlines()
)


class Remote:
    """A server with TEI's API or, where it has no `/info`, OpenAI's. Raises ConnectionError where it has neither."""

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=TIMEOUT_S)
        self._model = model
        self.info = self._info()
        self._embed_once = lru_cache(4096)(self._embed_one)

    def embed(self, texts: Sequence[str], **options: Any) -> Vectors | None:
        """Vectors (texts, width) as the server sends them; None where it takes no such option or refuses a text."""
        if options and not self.info:
            return None
        most = min(REQUEST_TEXTS, int(self.info.get("max_client_batch_size") or REQUEST_TEXTS))
        parts = [self._embed_once(tuple(texts[at : at + most]), tuple(options.items())) for at in range(0, len(texts), most)]
        return None if any(part is None for part in parts) else np.concatenate([part for part in parts if part is not None])

    def states(self, text: str) -> Vectors | None:
        """Hidden states (tokens, width) of a text; None of a server without `/embed_all`."""
        answer = self._ask("/embed_all", {"inputs": [text]}) if self.info else None
        return None if answer is None else self._vectors(answer[0])

    def _embed_one(self, texts: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> Vectors | None:
        if self.info:
            answer = self._ask("/embed", {"inputs": texts, "truncate": True, **dict(options)})
            return None if answer is None else self._vectors(answer)
        answer = self._ask("/v1/embeddings", {"input": texts, "model": self._model or "default", "encoding_format": "float"})
        return None if answer is None else self._vectors(answer)

    def _info(self) -> Mapping[str, Any]:
        answer = self._request("GET", "/info")
        try:
            facts = orjson.loads(answer.content) if answer.status_code == 200 else None
        except ValueError:
            facts = None
        return facts if isinstance(facts, dict) and "max_input_length" in facts else {}

    def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer; None where the server refuses the request."""
        answer = self._request("POST", path, content=orjson.dumps(body), headers={"content-type": "application/json"})
        if answer.status_code in (400, 404, 413, 422, 424):
            return None
        if answer.status_code != 200:
            raise ConnectionError(f"{self.url}{path}: status {answer.status_code}: {answer.text[:200]}")
        try:
            return orjson.loads(answer.content)
        except ValueError:
            raise ConnectionError(f"{self.url}{path}: answers no JSON") from None

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            return self._client.request(method, self.url + path, **content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConnectionError(f"{self.url}{path}: {type(error).__name__}: {error}") from None

    def _vectors(self, answer: Any) -> Vectors:
        try:
            return read_vectors(answer)
        except ValueError as error:
            raise ConnectionError(f"{self.url}: answers no vectors: {error}") from None

    def replay(self, path: str, body: Mapping[str, Any]) -> Vectors | None:
        """Vectors (texts, width) of a recorded request; None where the server refuses it."""
        answer = self._ask(path, {key: value for key, value in body.items() if key != "encoding_format"})
        return None if answer is None else self._vectors(answer)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def read_vectors(answer: Any) -> Vectors:
    """Vectors (texts, width) of TEI's answer or OpenAI's, whose rows are lists or base64. Raises ValueError."""
    try:
        if isinstance(answer, dict):
            rows = sorted(answer["data"], key=lambda row: row.get("index", 0))
            answer = [_numbers(row["embedding"]) for row in rows]
        vectors = np.array(answer, dtype=np.float64)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if vectors.ndim != 2 or not vectors.size or not np.isfinite(vectors).all():
        raise ValueError("not one for each text, of one width and of finite numbers")
    return vectors


def _numbers(row: Any) -> Any:
    return np.frombuffer(base64.b64decode(row), "<f4") if isinstance(row, str) else row


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cosines of the samples and of a long text (None of other widths), overlap@10 of searches, causes, and the verdict."""

    least_cosine: float | None
    median_cosine: float | None
    long_cosine: float | None
    overlap: float
    causes: tuple[str, ...]
    keeps_index: bool

    def as_json(self) -> str:
        """A line of JSON."""
        return orjson.dumps(asdict(self)).decode()

    def in_words(self) -> str:
        """Lines for people."""
        rows = (
            ("cosine, median", self.median_cosine),
            ("cosine, least", self.least_cosine),
            ("cosine, long text", self.long_cosine),
            (f"overlap@{NEIGHBOURS}", self.overlap),
        )
        lines = [f"{name:<20}{'-' if value is None else f'{value:.7f}'}" for name, value in rows]
        lines += [f"{'likely cause':<20}{cause}" for cause in self.causes or ("none: they agree",)]
        return "\n".join([*lines, f"{'verdict':<20}{VERDICTS[self.keeps_index]}"])


def keeps_index(worst: float, shared: float) -> bool:
    """Whether queries by B find in A's index what A's own find: `worst`: the largest 1 - cosine; `shared`: the overlap."""
    return worst <= KEPT_APART and shared >= KEPT_OVERLAP


def compare(a: signs.Server, b: signs.Server) -> Comparison:
    """Compare the server that made an index with the one that would embed for it. Raises ConnectionError and InvalidInput."""
    left, right = a.embed(SAMPLES), b.embed(SAMPLES)
    if left is None or right is None:
        raise InvalidInput(f"{'A' if left is None else 'B'} refuses to embed the sample texts")
    if left.shape[1] != right.shape[1]:
        return Comparison(None, None, None, 0.0, (_of_other_width(a, b, left, right),), keeps_index=False)
    words = sorted({word.strip(".,:?") for text in SAMPLES for word in text.split()})
    distances, shared = apart(left, right), overlap(left, right)
    base = signs.median(distances)
    causes = [cause for cause in (signs.of_lengths(left, right),) if cause is not None]
    if base > SAME:
        causes.append(_of_samples(a, b, left, right, words))
    of_long, of_whole = signs.of_truncation(a, b, words)
    causes += of_long
    worst = max(float(distances.max()), of_whole)
    keeps = keeps_index(worst, shared)
    long_cosine = None if np.isinf(of_whole) else 1 - of_whole
    return Comparison(1 - float(distances.max()), 1 - base, long_cosine, shared, tuple(causes), keeps)


def _of_samples(a: signs.Server, b: signs.Server, left: Vectors, right: Vectors, words: Sequence[str]) -> str:
    """The cause of a difference in short texts."""
    base = signs.median(apart(left, right))
    found = signs.of_case(a, b, SAMPLES, base) or signs.of_prompts(a, b, SAMPLES, base) or signs.of_pooling(a, b, SAMPLES[0])
    if found is None and base > KEPT_APART:
        found = signs.of_dense(a, b, words) or signs.of_dilution(a, b, words)
    return found or signs.of_numbers(a, b, left, right)


def _of_other_width(a: signs.Server, b: signs.Server, left: Vectors, right: Vectors) -> str:
    narrow = (left, right, ("A", "B")) if left.shape[1] < right.shape[1] else (right, left, ("B", "A"))
    words = sorted({word.strip(".,:?") for text in SAMPLES for word in text.split()})
    cause = signs.of_widths(*narrow) or signs.of_dense(a, b, words)
    return cause or f"model: another one, with vectors of {right.shape[1]} numbers in place of {left.shape[1]}"


def overlap(left: Vectors, right: Vectors, count: int = NEIGHBOURS) -> float:
    """The mean share of the `count` nearest rows of `left`, itself left out, that a query by `right`'s row finds as well."""
    stored = unit(left)
    found = []
    for queries in (stored, unit(right)):
        scores = queries @ stored.T
        np.fill_diagonal(scores, -np.inf)
        found.append(np.argsort(-scores, axis=1)[:, :count])
    return float(np.mean([len({*one} & {*other}) / count for one, other in zip(*map(np.ndarray.tolist, found), strict=True)]))


MAX_KEPT_TEXTS = 256  # the last different ones, among which neighbours are looked for
MIN_TEXTS = len(SAMPLES)  # for a verdict: among fewer, most are neighbours


class Agreement:
    """How far two servers agree in texts that come one by one, such as recorded requests: bounded, however many come."""

    def __init__(self) -> None:
        self.texts = 0
        self._worst = 0.0
        self._kept: dict[bytes, tuple[Vectors, Vectors]] = {}

    def add(self, left: Vectors, right: Vectors) -> Vectors:
        """1 - cosine of each pair of rows of both servers, which are of one width."""
        distances = apart(left, right)
        self.texts += len(left)
        self._worst = max(self._worst, float(distances.max()))
        for mine, other in zip(left[-MAX_KEPT_TEXTS:], right[-MAX_KEPT_TEXTS:], strict=True):
            self._kept[mine.tobytes()] = mine.copy(), other.copy()
        for oldest in [*self._kept][:-MAX_KEPT_TEXTS]:
            del self._kept[oldest]
        return distances

    def of_other_widths(self) -> None:
        """Count a text whose vectors are of two widths."""
        self.texts += 1
        self._worst = np.inf

    @property
    def keeps_index(self) -> bool:
        """Whether queries by B find in A's index what A's own find, as far as the texts tell."""
        return not np.isinf(self._worst) and keeps_index(self._worst, overlap(*self._rows()))

    def in_a_line(self) -> str | None:
        """The figures and the verdict; None before there are texts enough."""
        if np.isinf(self._worst):
            return f"vectors of another width: {VERDICTS[False]}"
        if len(self._kept) < MIN_TEXTS:
            return None
        left, right = self._rows()
        shared, middle = overlap(left, right), signs.median(apart(left, right))
        figures = f"cosine least {1 - self._worst:.7f}, median {1 - middle:.7f}, overlap@{NEIGHBOURS} {shared:.4f}"
        return f"{self.texts} texts, {figures}: {VERDICTS[self.keeps_index]}"

    def _rows(self) -> tuple[Vectors, Vectors]:
        left, right = (np.stack(side) for side in zip(*self._kept.values(), strict=True))
        return left, right


REPLAYED = ("/embed", "/v1/embeddings", "/embeddings")


def replay(a: Remote, b: Remote, lines: Iterable[str]) -> tuple[Agreement, int]:
    """Send recorded requests to both servers. Return how far they agree, and how many requests one of them refused.

    A line is `{"path": "/embed", "body": {...}}`; the body may be a text of JSON, as nginx logs it. Requests of other paths are
    left out. Raises InvalidInput, naming the line, and ConnectionError.
    """
    agreement, refused = Agreement(), 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        path, body = _recorded(line, number)
        if path not in REPLAYED:
            continue
        left, right = a.replay(path, body), b.replay(path, body)
        if left is None or right is None:
            refused += 1
        elif left.shape != right.shape:
            agreement.of_other_widths()
        else:
            agreement.add(left, right)
    return agreement, refused


def _recorded(line: str, number: int) -> tuple[str, Mapping[str, Any]]:
    try:
        entry = orjson.loads(line)
        path, body = entry["path"], entry["body"]
        body = orjson.loads(body) if isinstance(body, str) and body else body
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f'line {number}: should be {{"path": "/embed", "body": {{…}}}}: {error}') from None
    if not isinstance(path, str) or (path in REPLAYED and not isinstance(body, dict)):
        raise InvalidInput(f"line {number}: `path` should be a text, `body` an object")
    return path, body
