"""A training run: texts -> pairs -> token states -> heads -> the head file. `args` are the flags of
`hybridtei train`.

A pair is a short text (title, question, sentence) and the longer text it belongs to. No labels are
needed beyond the pairing; the teacher (`fit.Teacher`) grades the other texts of a batch.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from hybridtei.models.heads.fit import (
    Origin,
    PairStates,
    Recipe,
    Students,
    Teacher,
    fit,
    write_head_file,
)
from hybridtei.models.heads.models import (
    MultivectorHeadModule,
    SparseHeadModule,
    TokenStates,
    Trunk,
    cached_states,
    load_trunk,
)

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


class Pair(NamedTuple):
    """A query and the text that answers it."""

    query: str
    text: str


def read_pairs(path: Path) -> Iterator[Pair]:
    """Yield the pairs of a JSON-lines file of objects with "query" (or "title") and "text".

    Raises ValueError, naming the line, for a line that is not such an object.
    """
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_pair(line, f"{path}:{number}")


def _parse_pair(line: str, place: str) -> Pair:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: not JSON: {error}") from error
    fields = record if isinstance(record, dict) else {}
    query, text = fields.get("query", fields.get("title")), fields.get("text")
    if isinstance(query, str) and isinstance(text, str):
        return Pair(query.strip(), text.strip())
    raise ValueError(
        f'{place}: expected an object with the strings "query" (or "title") and "text"'
    )


def select_pairs(pairs: Iterable[Pair], min_words: int, opening: int) -> list[Pair]:
    """Drop pairs with a text under `min_words` words, and repeats of an earlier pair.

    A pair is a repeat if its query, or the first `opening` characters of its text, are equal. In
    one batch the repeated text would count as a wrong answer to its own query.
    """
    queries: set[str] = set()
    openings: set[str] = set()
    selection: list[Pair] = []
    for pair in pairs:
        query, start = pair.query.casefold(), pair.text[:opening].casefold()
        if not query or len(pair.text.split()) < min_words or query in queries or start in openings:
            continue
        queries.add(query)
        openings.add(start)
        selection.append(pair)
    return selection


def sentence_pairs(pairs: Iterable[Pair], min_words: int, seed: int) -> list[Pair]:
    """Make (sentence, rest of the text) pairs, whose queries are longer and more natural than
    titles.

    Every text of three sentences or more gives one sentence of 5 to 40 words. The rest must have
    `min_words` words.
    """
    draw = random.Random(seed)
    new_pairs: list[Pair] = []
    for pair in pairs:
        sentences = SENTENCE_END.split(pair.text)
        usable = [
            place for place, sentence in enumerate(sentences) if 5 <= len(sentence.split()) <= 40
        ]
        if len(sentences) < 3 or not usable:
            continue
        place = draw.choice(usable)
        rest = " ".join(sentences[:place] + sentences[place + 1 :])
        if len(rest.split()) >= min_words:
            new_pairs.append(Pair(sentences[place], rest))
    return new_pairs


# Token states for computing the multi-vector head's first directions
PRINCIPAL_SAMPLE = 200_000


def collect_pairs(args: argparse.Namespace) -> list[Pair]:
    """Return the training pairs of these options. Raises ValueError if fewer than two remain."""
    pairs = select_pairs(
        (pair for path in args.pairs for pair in read_pairs(path)), args.min_words, args.opening
    )
    if args.sentences:
        # A fixed seed, so that runs with different --seed share a cache.
        pairs += sentence_pairs(pairs, args.min_words, seed=0)
    if len(pairs) < 2:
        raise ValueError("no training pairs: give --pairs with texts of at least --min-words words")
    return pairs


def train(args: argparse.Namespace) -> list[dict[str, float]]:
    """Train by these options and write the head file. Return the mean losses of each epoch."""
    torch.set_num_threads(args.threads)
    pairs = collect_pairs(args)
    trunk = load_trunk(args.model)
    texts = [pair.query for pair in pairs] + [pair.text for pair in pairs]
    recipe = _recipe(args)
    states = cached_states(args.cache, trunk, texts, args.max_tokens, recipe.dtype)
    students = _students(args, trunk, states, recipe)
    teacher = Teacher(args.dense_temperature, args.maxsim_temperature, recipe.dtype)
    data = PairStates(states, states.pooled(args.pooling), trunk.word_embeddings, teacher)
    history = fit(students, data)
    origin = Origin(args.base_name or args.model.name, trunk.sha256, _provenance(args, len(pairs)))
    write_head_file(args.output, students, origin)
    return history


def _recipe(args: argparse.Namespace) -> Recipe:
    prefixes = tuple(sorted({*args.prefixes, args.dim}))
    if prefixes[0] < 1 or prefixes[-1] > args.dim:
        raise ValueError(f"--prefixes must lie between 1 and --dim {args.dim}")
    return Recipe(
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        group_size=args.group_size,
        groups=args.groups,
        prefixes=prefixes,
        drop=args.drop,
        seed=args.seed,
        dtype=getattr(torch, args.dtype),
    )


def _students(
    args: argparse.Namespace, trunk: Trunk, states: TokenStates, recipe: Recipe
) -> Students:
    torch.manual_seed(args.seed)
    sparse = SparseHeadModule(
        trunk.hidden_size, args.sparse_width, args.sparse_inputs, args.activation
    )
    multivector = MultivectorHeadModule(trunk.hidden_size, args.dim, bias=args.bias)
    step = max(1, len(states.input_ids) // PRINCIPAL_SAMPLE)
    multivector.start_from(torch.from_numpy(states.hidden_states[::step].astype("float32")))
    return Students(sparse, multivector, trunk.special_ids, recipe)


# Options that do not change the weights, or that the record has under its own keys
UNRECORDED = ("cache", "output", "data", "licence", "date", "threads", "run")


def _provenance(args: argparse.Namespace, pairs: int) -> dict[str, str | int | float]:
    """Return the head file's record of its training. Paths are reduced to their last part."""
    words = ["hybridtei train"]
    for name, value in sorted(vars(args).items()):
        if name in UNRECORDED or value in (None, []):
            continue
        items = value if isinstance(value, list) else [value]
        text = " ".join(item.name if isinstance(item, Path) else str(item) for item in items)
        words.append(_option(name, value, text))
    return {
        "data": args.data or "not stated",
        "licence": args.licence or "not stated",
        "date": args.date,
        "command": " ".join(words),
        "seed": args.seed,
        "pairs": pairs,
    }


def _option(name: str, value: object, text: str) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {text}"
