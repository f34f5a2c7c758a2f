"""Why two embedding servers disagree: each cause leaves a sign of its own in the vectors of chosen texts.

`A` is the server whose vectors are stored, `B` the one that would replace it. Where all numbers differ a little, `/info`
decides between activation, dtype and weights if both servers have it, and the size of the differences if not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float64]

SAME = 1e-9  # 1 - cosine: float32 in another order of summation stays below 1e-11
EXACT = 1e-9  # of one server with itself, where it reads the same tokens
EXPLAINS = 0.02  # a cause explains a difference that it takes down to this share
FITTED_WIDTH = 2048  # of vectors between which a linear map is looked for: as many texts and half as many again are embedded
READ_WORDS = 2048  # of the longest text
OTHER_LENGTH = 0.15  # share by which two truncation lengths differ at least: a prompt takes some tokens too
SYSTEMATIC = 0.3  # mean cosine of the differences: rounding of weights leaves 0.25, other weights or another function more
FUNCTION, HALF, ROUNDED = 3e-6, 1.5e-4, 2e-2  # largest median of 1 - cosine of each
KNOWN_PROMPTS = (
    *("query: ", "passage: ", "search_query: ", "search_document: ", "clustering: ", "classification: "),
    "Represent this sentence for searching relevant passages: ",
    "Represent this sentence for searching relevant passages:",
    *("task: search result | query: ", "title: none | text: "),
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:",
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ",
    *("为这个句子生成表示以用于检索相关文章:", "Query: ", "Passage: ", "query:", "passage:"),
)


class Server(Protocol):
    """A server that embeds texts."""

    @property
    def info(self) -> Mapping[str, Any]:
        """TEI's `/info`; empty of a server without it."""

    def embed(self, texts: Sequence[str], **options: Any) -> Vectors | None:
        """Vectors (texts, width) as the server sends them; None where it takes no such option or refuses a text."""

    def states(self, text: str) -> Vectors | None:
        """Hidden states (tokens, width) of a text; None of a server without `/embed_all`."""


def unit(vectors: Vectors) -> Vectors:
    """Vectors of length 1."""
    return np.asarray(vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-30))


def apart(left: Vectors | None, right: Vectors | None) -> Vectors:
    """1 - cosine of each pair of rows; infinite where they cannot be compared."""
    if left is None or right is None or left.shape != right.shape:
        return np.array([np.inf])
    difference = unit(left) - unit(right)
    return np.asarray((difference * difference).sum(axis=1) / 2)  # exact where 1 - cosine has lost its digits


def median(values: Vectors) -> float:
    """The median, as a number."""
    return float(np.median(values))


def of_widths(narrow: Vectors, wide: Vectors, names: tuple[str, str]) -> str | None:
    """A cut dimension: the narrow vectors are the first numbers of the wide ones. `names`: of the two servers."""
    cut = wide[:, : narrow.shape[1]]
    if median(apart(narrow, cut)) > 1e-4:
        return None
    return f"dimensions: {names[0]} has the first {narrow.shape[1]} of the {wide.shape[1]} of {names[1]}"


def of_lengths(a: Vectors, b: Vectors) -> str | None:
    """Vectors that are not of length 1 on one side only."""
    scaled = [bool(np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)) for vectors in (a, b)]
    if scaled[0] == scaled[1]:
        return None
    return f"normalisation: {'AB'[scaled.index(False)]} does not scale its vectors to length 1"


def of_case(a: Server, b: Server, texts: Sequence[str], base: float) -> str | None:
    """An uncased tokenizer on one side: lower-case texts agree, and to that side case is nothing."""
    lower = [text.lower() for text in texts]
    low_a, low_b = a.embed(lower), b.embed(lower)
    if median(apart(low_a, low_b)) > max(SAME, EXPLAINS * base):
        return None
    deaf = [median(apart(server.embed(texts), low)) < EXACT for server, low in ((a, low_a), (b, low_b))]
    return None if deaf[0] == deaf[1] else f"tokenizer: that of {'AB'[deaf.index(True)]} is uncased, the other is cased"


def of_prompts(a: Server, b: Server, texts: Sequence[str], base: float) -> str | None:
    """A prompt that one side puts before texts, or each another one."""
    few = texts[:4]
    plain = {"A": a.embed(few), "B": b.embed(few)}
    named = {name: _prompts(server) for name, server in (("A", a), ("B", b))}
    texts_of = dict.fromkeys([*named["A"].values(), *named["B"].values(), *KNOWN_PROMPTS])
    for (name, server), other in zip((("A", a), ("B", b)), "BA", strict=True):
        for prompt, text in named[name].items():
            if median(apart(server.embed(few, prompt_name=prompt), plain[other])) < max(SAME, EXPLAINS * base):
                return f"prompt: {other} puts what {name} names `{prompt}` before texts, {text!r}; {name} another or none"
    for (name, server), other in zip((("A", a), ("B", b)), "BA", strict=True):
        for text in filter(None, texts_of):
            if median(apart(server.embed([text + each for each in few]), plain[other])) < max(SAME, EXPLAINS * base):
                return f"prompt: {name} leaves out {text!r}, which {other} puts before texts"
    return None


def _prompts(server: Server) -> dict[str, str]:
    ours = server.info.get("hybridtei")
    prompts = ours.get("prompts") if isinstance(ours, dict) else None
    return {str(name): str(text) for name, text in [*prompts.items()][:32]} if isinstance(prompts, dict) else {}


POOLINGS: Mapping[str, Callable[[Vectors], Vectors]] = {
    "mean": lambda states: states.mean(axis=0),
    "cls": lambda states: states[0],
    "last-token": lambda states: states[-1],
    "max": lambda states: states.max(axis=0),
}


def of_pooling(a: Server, b: Server, text: str) -> str | None:
    """Another pooling: read off the hidden states where the server sends them, else off `/info`."""
    names = [_pooling(server, text) for server in (a, b)]
    if None in names or names[0] == names[1]:
        return None
    words = {"cls": "the first token", "last-token": "the last token"}
    return "pooling: A takes {}, B {}".format(*(words.get(str(name), f"the {name}") for name in names))


def _pooling(server: Server, text: str) -> str | None:
    states, vector = server.states(text), server.embed([text])
    if states is not None and vector is not None and states.shape[1] == vector.shape[1]:
        for name, pool in POOLINGS.items():
            if apart(pool(states)[None], vector)[0] < 1e-4:
                return name
    kind = server.info.get("model_type")
    embedding = kind.get("embedding") if isinstance(kind, dict) else None
    return str(embedding["pooling"]).replace("_", "-") if isinstance(embedding, dict) and "pooling" in embedding else None


def of_dense(a: Server, b: Server, words: Sequence[str]) -> str | None:
    """A Dense module on one side: its vectors, or their inverse hyperbolic tangents, are a linear map of the other's.

    The vectors have to come unscaled, so servers with TEI's API only."""
    for (name, source), (other, target) in ((("B", b), ("A", a)), (("A", a), ("B", b))):
        width = source.embed(words[:1], normalize=False)
        if width is None or width.shape[1] > FITTED_WIDTH:
            continue
        count = width.shape[1]
        texts = [" ".join(draw) for draw in _draws(words, count + count // 2 + 16)]
        inputs, outputs = source.embed(texts, normalize=False), target.embed(texts, normalize=False)
        if inputs is None or outputs is None:
            continue
        for activation in ("", " with tanh"):
            if activation and np.abs(outputs).max() >= 1:
                continue
            goal = np.arctanh(outputs) if activation else outputs
            if _is_linear(inputs, goal, count + count // 4 + 8):
                return f"modules: {name} leaves out the Dense module{activation} of {other}"
    return None


def _is_linear(inputs: Vectors, outputs: Vectors, fitted: int) -> bool:
    full = np.hstack([inputs, np.ones((len(inputs), 1))])
    solved, *_ = np.linalg.lstsq(full[:fitted], outputs[:fitted], rcond=None)
    left = outputs[fitted:] - full[fitted:] @ solved
    around = outputs[fitted:] - outputs[:fitted].mean(axis=0)
    return bool((left**2).sum() < 1e-4 * (around**2).sum())


def _draws(words: Sequence[str], count: int) -> list[list[str]]:
    draw = random.Random(7)
    return [draw.choices(words, k=draw.randint(2, 6)) for _ in range(count)]


def of_truncation(a: Server, b: Server, words: Sequence[str]) -> tuple[list[str], float]:
    """(another side or length of truncation, 1 - cosine of a text longer than the limits)."""
    limits = [info for server in (a, b) if isinstance(info := server.info.get("max_input_length"), int)]
    count = min(READ_WORDS, max(limits) + 64) if len(limits) == 2 else READ_WORDS
    draw = random.Random(11)
    text = draw.choices([word.lower() for word in words], k=count)
    whole = [server.embed([" ".join(text)]) for server in (a, b)]
    distance = float(apart(*whole)[0])
    if distance <= SAME:
        return [], distance
    refused = [vectors is None for vectors in whole]
    if refused[0] != refused[1]:
        return [f"truncation: {'AB'[refused.index(True)]} refuses a text of {count} words, which the other takes"], distance
    if all(refused):
        return [], 0.0
    (side_a, read_a), (side_b, read_b) = _reads(a, text), _reads(b, text)
    if side_a != side_b and None not in (side_a, side_b):
        from_left = "A" if side_a == "left" else "B"
        return [f"truncation: {from_left} cuts texts from the left, the other from the right"], distance
    if abs(read_a - read_b) > OTHER_LENGTH * max(read_a, read_b):
        shorter, few, many = ("A", read_a, read_b) if read_a < read_b else ("B", read_b, read_a)
        return [f"truncation: {shorter} is cut shorter, at about {few} words; the other reads {many}"], distance
    return [], distance


def _reads(server: Server, text: Sequence[str]) -> tuple[str | None, int]:
    """(the side from which a text is cut, the number of its words that are read); (None, all) where all are read."""
    whole, quarter = server.embed([" ".join(text)]), len(text) // 4
    for side in ("right", "left"):
        rest = (lambda k: text[:k]) if side == "right" else (lambda k: text[len(text) - k :])

        def same(k: int, rest: Callable[[int], Sequence[str]] = rest) -> bool:
            return bool(apart(server.embed([" ".join(rest(k))]), whole)[0] < EXACT)

        if not (same(len(text) - 1) and same(len(text) - min(quarter, 16))):
            continue
        low, high = 1, len(text) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if same(middle) else (middle + 1, high)
        return side, low
    return None, len(text)


def of_dilution(a: Server, b: Server, words: Sequence[str]) -> str | None:
    """Another prompt that neither names: what it changes fades as texts get longer."""
    draw = random.Random(13)
    short, long = ([" ".join(draw.choices(words, k=k)) for _ in range(8)] for k in (3, 80))
    near, far = median(apart(a.embed(short), b.embed(short))), median(apart(a.embed(long), b.embed(long)))
    return "prompt: A and B put other texts before theirs: the longer a text, the closer they are" if far < near / 8 else None


def of_numbers(a: Server, b: Server, left: Vectors, right: Vectors) -> str:
    """What changes all numbers a little: by what the servers declare, else by how large and how alike the differences are."""
    if (declared := _declared(a.info, b.info)) is not None:
        return declared
    size, alike = median(apart(left, right)), _alikeness(unit(right) - unit(left))
    if size <= FUNCTION:
        return "activation: the other form of GELU, by the size of the differences"
    if size <= HALF and alike < SYSTEMATIC:
        return "dtype: 16-bit numbers, by the size of the differences"
    if size <= ROUNDED and alike < SYSTEMATIC:
        return "dtype: int8, by the size of the differences, which vary from text to text"
    return "weights: another revision or another model, by the differences, which are alike in all texts"


def _alikeness(differences: Vectors) -> float:
    """The mean cosine of two rows."""
    rows, count = unit(differences), len(differences)
    return float(((rows @ rows.T).sum() - count) / (count * count - count))


def _declared(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    prints = [info.get("hybridtei", {}).get("fingerprint") or {} for info in (a, b)]
    for part, words in (("weights", "another revision: other files"), ("activation", "another form of GELU"), ("dtype", "")):
        one, other = (found.get(part) for found in prints)
        if None not in (one, other) and one != other:
            shown = f"{words}: " if words else ""
            return f"{part}: {shown}{str(one)[:16]} of A, {str(other)[:16]} of B"
    one, other = a.get("model_dtype"), b.get("model_dtype")
    if one and other and one != other:
        return f"dtype: {one} of A, {other} of B"
    one, other = a.get("model_sha"), b.get("model_sha")
    return f"weights: another revision: {one} of A, {other} of B" if one and other and one != other else None
