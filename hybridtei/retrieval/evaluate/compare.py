"""Compares two embedding servers: can B's queries search A's vectors, and if not, why?

Each cause (a prompt, the pooling, case, truncation) leaves its own sign in the vectors of chosen texts. If all numbers differ a
little, `/info` distinguishes weights from dtype and activation, if both servers have it.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hybridtei.client import Client
from hybridtei.errors import BackendError, InvalidInput, NoAnswer, NoKey, RequestError

Vectors = NDArray[np.float64]

SAMPLES = tuple(files(__package__).joinpath("samples.txt").read_text(encoding="utf-8").splitlines())
WORDS = tuple(sorted({word.strip(".,:?") for text in SAMPLES for word in text.split()}))
REQUEST_TEXTS = 32
TIMEOUT_S = 120.0
REFUSED = frozenset({400, 404, 413, 422, 424})
REPLAYED = ("/embed", "/v1/embeddings", "/embeddings")
NEIGHBOURS = 10
MAX_KEPT_TEXTS = 256  # a recording's last different texts, among which neighbours are searched
KEPT_APART, KEPT_OVERLAP = (
    1e-4,
    0.99,
)  # an index can be kept if 1 - cosine is at most this, and the overlap at least this
VERDICTS = {True: "keep the index", False: "embed again"}
SAME = (
    1e-9  # 1 - cosine: float32 in another order of summation, or the same tokens, stay below 1e-11
)
EXPLAINS = 0.02  # a cause explains a difference if at most this share remains without the cause
READ_WORDS = 2048  # of the longest text
OTHER_LENGTH = 0.15  # smaller relative differences of truncation lengths are ignored, since a prompt also takes tokens
KNOWN_PROMPTS = (
    *(
        "query: ",
        "passage: ",
        "search_query: ",
        "search_document: ",
        "clustering: ",
        "classification: ",
    ),
    "Represent this sentence for searching relevant passages: ",
    "Represent this sentence for searching relevant passages:",
    *("task: search result | query: ", "title: none | text: "),
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ",
    *("为这个句子生成表示以用于检索相关文章:", "Query: ", "Passage: ", "query:", "passage:"),
)


class Server:
    """A server with TEI's API, or without `/info` with OpenAI's. Raises NoAnswer if it has neither."""

    def __init__(self, url: str, *, api_key: str | None = None, model: str | None = None) -> None:
        self._client = Client(url, api_key=api_key, timeout_s=TIMEOUT_S)
        self._model = model or "default"
        facts = self._ask("/info", refused=range(200, 600))
        self.info: Mapping[str, Any] = (
            facts if isinstance(facts, dict) and "max_input_length" in facts else {}
        )
        self.close = self._client.close

    def embed(self, texts: Sequence[str], **options: Any) -> Vectors | None:
        """The server's vectors (texts, width); None if it refuses the option or a text."""
        if options and not self.info:
            return None
        path, field = ("/embed", "inputs") if self.info else ("/v1/embeddings", "input")
        common = {"truncate": True, **options} if self.info else {"model": self._model}
        most = min(REQUEST_TEXTS, int(self.info.get("max_client_batch_size") or REQUEST_TEXTS))
        parts = [
            self.replay(path, {field: texts[at : at + most], **common})
            for at in range(0, len(texts), most)
        ]
        return (
            None
            if any(part is None for part in parts)
            else np.concatenate([part for part in parts if part is not None])
        )

    def replay(self, path: str, body: Mapping[str, Any]) -> Vectors | None:
        """The vectors (texts, width) of a recorded request; None if the server refuses it."""
        answer = self._ask(
            path, {name: value for name, value in body.items() if name != "encoding_format"}
        )
        try:
            return None if answer is None else read_vectors(answer)
        except ValueError as error:
            raise NoAnswer(f"{self._client.url}{path}: answers no vectors: {error}") from None

    @property
    def pooling(self) -> str | None:
        declared = ((self.info.get("model_type") or {}).get("embedding") or {}).get("pooling")
        return {"cls": "first token", "last_token": "last token"}.get(str(declared), declared)

    @property
    def prompts(self) -> Mapping[str, str]:
        """The prompts by name, as far as the server tells."""
        return dict([*((self.info.get("hybridtei") or {}).get("prompts") or {}).items()][:32])

    def _ask(self, path: str, body: Any = None, refused: Container[int] = REFUSED) -> Any:
        """Return the answer, or None if the server refuses the request."""
        try:
            return self._client.ask(path, body)
        except NoKey:
            raise
        except (RequestError, BackendError):
            return None
        except NoAnswer as error:
            if error.status is not None and error.status in refused:
                return None
            raise


def read_vectors(answer: Any) -> Vectors:
    """Read the vectors (texts, width) of TEI's or OpenAI's answer, with rows as lists or base64. Raises ValueError."""
    try:
        if isinstance(answer, dict):
            rows = [
                row["embedding"]
                for row in sorted(answer["data"], key=lambda row: row.get("index", 0))
            ]
            answer = [
                np.frombuffer(base64.b64decode(row), "<f4") if isinstance(row, str) else row
                for row in rows
            ]
        vectors = np.array(answer, dtype=np.float64)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None
    if vectors.ndim != 2 or not vectors.size or not np.isfinite(vectors).all():
        raise ValueError("not one for each text, of one width and of finite numbers")
    return vectors


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cosines of the texts and of one above the limits, the overlap@10 of searches, the causes, and the verdict.

    A cosine is None if widths differ, or if the text was not sent."""

    texts: int
    least_cosine: float | None
    median_cosine: float | None
    long_cosine: float | None
    overlap: float
    causes: tuple[str, ...]
    keeps_index: bool

    def as_json(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    def in_words(self) -> str:
        names = ("cosine, median", "cosine, least", "cosine, long text", f"overlap@{NEIGHBOURS}")
        values = (self.median_cosine, self.least_cosine, self.long_cosine, self.overlap)
        lines = [f"{'texts':<20}{self.texts}"]
        lines += [
            f"{name:<20}{value:.7f}"
            for name, value in zip(names, values, strict=True)
            if value is not None
        ]
        lines += [f"{'likely cause':<20}{cause}" for cause in self.causes]
        return "\n".join([*lines, f"{'verdict':<20}{VERDICTS[self.keeps_index]}"])


def compared(
    left: Vectors, right: Vectors, distances: Vectors, of_long: float | None, causes: Iterable[str]
) -> Comparison:
    """`distances`: of all texts. `left`, `right`: vectors for searching neighbours. `of_long`: the long text's distance."""
    worst, shared = float(distances.max()), overlap(left, right)
    keeps = max(worst, of_long or 0.0) <= KEPT_APART and shared >= KEPT_OVERLAP
    long_cosine = None if of_long is None or np.isinf(of_long) else 1 - of_long
    return Comparison(
        len(distances), 1 - worst, 1 - median(distances), long_cosine, shared, tuple(causes), keeps
    )


def compare(a: Server, b: Server) -> Comparison:
    """Compare an index's server with the server that would replace it. Raises HybridTeiError."""
    left, right = a.embed(SAMPLES), b.embed(SAMPLES)
    if left is None or right is None:
        raise InvalidInput(f"{'A' if left is None else 'B'} refuses to embed the sample texts")
    if left.shape[1] != right.shape[1]:
        return Comparison(
            len(left), None, None, None, 0.0, (of_widths(left, right),), keeps_index=False
        )
    distances = apart(left, right)
    causes = [of_lengths(left, right)]
    if (base := median(distances)) > SAME:
        causes.append(
            of_case(a, b, base) or of_prompts(a, b, base) or of_pooling(a, b) or of_numbers(a, b)
        )
    cut, of_long = of_truncation(a, b)
    return compared(left, right, distances, of_long, filter(None, [*causes, cut]))


def replay(a: Server, b: Server, lines: Iterable[str]) -> tuple[Comparison, int]:
    """Send recorded requests to both servers. Return the comparison, and the number of requests that one of them refused.

    A line is `{"path": "/embed", "body": {...}}`. The body may be JSON in a text, as nginx logs it. Requests to other paths are
    skipped. Raises InvalidInput, naming the line, or for too few texts, and HybridTeiError.
    """
    distances: list[Vectors] = []
    kept: dict[bytes, tuple[Vectors, Vectors]] = {}
    refused = 0
    for number, line in enumerate(filter(str.strip, lines), 1):
        try:
            entry = orjson.loads(line)
            path, body = entry["path"], entry["body"]
            if path not in REPLAYED:
                continue
            body = dict(orjson.loads(body) if isinstance(body, str) else body)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(
                f'line {number}: should be {{"path": "/embed", "body": {{…}}}}: {error}'
            ) from None
        left, right = a.replay(path, body), b.replay(path, body)
        if left is None or right is None:
            refused += 1
            continue
        if left.shape != right.shape:
            return Comparison(
                len(left), None, None, None, 0.0, (of_widths(left, right),), keeps_index=False
            ), refused
        distances.append(apart(left, right))
        kept |= {mine.tobytes(): (mine, its) for mine, its in zip(left, right, strict=True)}
        kept = dict([*kept.items()][-MAX_KEPT_TEXTS:])
    if len(kept) < len(SAMPLES):
        raise InvalidInput(
            f"{len(kept)} different texts are too few for a verdict: give {len(SAMPLES)}"
        )
    rows = [np.stack(side) for side in zip(*kept.values(), strict=True)]
    return compared(rows[0], rows[1], np.concatenate(distances), None, ()), refused


def overlap(left: Vectors, right: Vectors) -> float:
    """The mean share of a `left` row's nearest rows, without itself, that a query by the `right` row also finds."""
    stored = unit(left)
    found = []
    for queries in (stored, unit(right)):
        scores = queries @ stored.T
        np.fill_diagonal(scores, -np.inf)
        found.append(np.argsort(-scores, axis=1)[:, :NEIGHBOURS])
    pairs = zip(*map(np.ndarray.tolist, found), strict=True)
    return float(np.mean([len({*one} & {*other}) / NEIGHBOURS for one, other in pairs]))


def unit(vectors: Vectors) -> Vectors:
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30))


def apart(left: Vectors | None, right: Vectors | None) -> Vectors:
    """1 - cosine of each pair of rows; infinite if they cannot be compared."""
    if left is None or right is None or left.shape != right.shape:
        return np.array([np.inf])
    difference = unit(left) - unit(right)
    return np.asarray(
        (difference * difference).sum(axis=1) / 2
    )  # exact even if 1 - cosine has lost its digits


def median(values: Vectors) -> float:
    return float(np.median(values))


def of_widths(left: Vectors, right: Vectors) -> str:
    """Explain different widths: cut dimensions if the narrow vectors are the start of the wide ones, else another model."""
    (name, narrow), (other, wide) = sorted(
        (("A", left), ("B", right)), key=lambda side: side[1].shape[1]
    )
    few, many = narrow.shape[1], wide.shape[1]
    if median(apart(narrow, wide[:, :few])) > KEPT_APART:
        return f"model: another one, or another Dense module: vectors of {left.shape[1]} numbers and of {right.shape[1]}"
    return f"dimensions: {name} has the first {few} of the {many} of {other}"


def of_lengths(left: Vectors, right: Vectors) -> str | None:
    """Explain vectors that have length 1 on only one side."""
    scaled = [
        bool(np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3))
        for vectors in (left, right)
    ]
    if scaled[0] == scaled[1]:
        return None
    return f"normalisation: {'AB'[scaled.index(False)]} does not scale its vectors to length 1"


def of_case(a: Server, b: Server, base: float) -> str | None:
    """Explain an uncased tokenizer on one side: lower-case texts agree, and that side ignores case."""
    low = [server.embed([text.lower() for text in SAMPLES]) for server in (a, b)]
    if median(apart(*low)) > max(SAME, EXPLAINS * base):
        return None
    deaf = [
        median(apart(server.embed(SAMPLES), lower)) < SAME
        for server, lower in zip((a, b), low, strict=True)
    ]
    return (
        None
        if deaf[0] == deaf[1]
        else f"tokenizer: that of {'AB'[deaf.index(True)]} is uncased, the other is cased"
    )


def of_prompts(a: Server, b: Server, base: float) -> str | None:
    """Explain a prompt that one side puts before texts, or different prompts."""
    few, bound = SAMPLES[:4], max(SAME, EXPLAINS * base)
    plain = {"A": a.embed(few), "B": b.embed(few)}
    sides = (("A", a, "B"), ("B", b, "A"))
    for name, server, other in sides:
        for prompt, text in server.prompts.items():
            if median(apart(server.embed(few, prompt_name=prompt), plain[other])) < bound:
                return f"prompt: {other} puts what {name} names `{prompt}` before texts, {text!r}; {name} another or none"
    texts = dict.fromkeys([*a.prompts.values(), *b.prompts.values(), *KNOWN_PROMPTS])
    for name, server, other in sides:
        for text in filter(None, texts):
            if median(apart(server.embed([text + each for each in few]), plain[other])) < bound:
                return f"prompt: {name} leaves out {text!r}, which {other} puts before texts"
    return None


def of_pooling(a: Server, b: Server) -> str | None:
    if None in (a.pooling, b.pooling) or a.pooling == b.pooling:
        return None
    return f"pooling: A takes the {a.pooling}, B the {b.pooling}"


def of_numbers(a: Server, b: Server) -> str:
    """Explain small differences of all numbers by the servers' declarations."""
    one, other = (
        {
            **((info.get("hybridtei") or {}).get("fingerprint") or {}),
            "model_dtype": info.get("model_dtype"),
            **info,
        }
        for info in (a.info, b.info)
    )
    declared = {
        "weights": "weights: another revision",
        "activation": "activation: another form of GELU",
    }
    declared |= {"dtype": "dtype", "model_dtype": "dtype", "model_sha": "weights: another revision"}
    for part, words in declared.items():
        if one.get(part) and other.get(part) and one[part] != other[part]:
            return f"{words}: {str(one[part])[:16]} of A, {str(other[part])[:16]} of B"
    return "numbers: other weights, dtype, activation, modules or a prompt; the servers' `/info` does not tell"


def of_truncation(a: Server, b: Server) -> tuple[str | None, float | None]:
    """(the explanation of different truncation, 1 - cosine of a text above the limits)."""
    text = random.Random(11).choices([word.lower() for word in WORDS], k=READ_WORDS)
    whole = [server.embed([" ".join(text)]) for server in (a, b)]
    distance = float(apart(*whole)[0])
    refused = [vectors is None for vectors in whole]
    if all(refused):
        return None, None
    if any(refused):
        return (
            f"truncation: {'AB'[refused.index(True)]} refuses a text of {READ_WORDS} words, which the other takes",
            distance,
        )
    if distance <= SAME:
        return None, distance
    (side_a, read_a), (side_b, read_b) = _reads(a, text), _reads(b, text)
    if side_a != side_b and None not in (side_a, side_b):
        return (
            f"truncation: {'A' if side_a == 'left' else 'B'} cuts texts from the left, the other from the right",
            distance,
        )
    if abs(read_a - read_b) > OTHER_LENGTH * max(read_a, read_b):
        shorter, few, many = ("A", read_a, read_b) if read_a < read_b else ("B", read_b, read_a)
        return (
            f"truncation: {shorter} is cut shorter, at about {few} words; the other reads {many}",
            distance,
        )
    return None, distance


def _reads(server: Server, text: Sequence[str]) -> tuple[str | None, int]:
    """(the side that is cut, the number of words that are read); (None, all words) without truncation."""
    whole = server.embed([" ".join(text)])
    for side in ("right", "left"):

        def same(k: int, side: str = side) -> bool:
            rest = text[:k] if side == "right" else text[len(text) - k :]
            return bool(apart(server.embed([" ".join(rest)]), whole)[0] < SAME)

        if same(len(text) - 1) and same(len(text) - min(len(text) // 4, 16)):
            low, high = 1, len(text) - 1
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if same(middle) else (middle + 1, high)
            return side, low
    return None, len(text)
