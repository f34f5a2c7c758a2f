"""A training run: texts -> token states -> heads -> the head file. `args` are the flags of `hybridtei train`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from hybridtei.heads.train.fit import Origin, PairStates, Recipe, Students, Teacher, fit, write_head_file
from hybridtei.heads.train.heads import MultiVectorHead, SparseHead
from hybridtei.heads.train.pairs import Pair, read_pairs, read_translations, select_pairs, sentence_pairs
from hybridtei.heads.train.states import TokenStates, Trunk, cached_states, load_trunk

DEBIAN_DATA = "Debian package descriptions (Translation-en of the main component): title and long description"
DEBIAN_LICENCE = "each description under its source package's debian/copyright (DFSG-free); no text is in this file"
PRINCIPAL_SAMPLE = 200_000  # token states the multi-vector head's starting directions are computed from


def collect_pairs(args: argparse.Namespace) -> list[Pair]:
    """Return the training pairs the options ask for. Raises ValueError if fewer than two are left."""
    read = [pair for path in args.translations for pair in read_translations(path)]
    read += [pair for path in args.pairs for pair in read_pairs(path)]
    pairs = select_pairs(read, args.min_words, args.opening)
    if args.sentences:
        # One fixed seed: runs that differ in --seed share a cache.
        pairs += sentence_pairs(pairs, args.min_words, seed=0)
    if len(pairs) < 2:
        raise ValueError("no training pairs: give --translations or --pairs with texts of at least --min-words words")
    return pairs


def train(args: argparse.Namespace) -> list[dict[str, float]]:
    """Train as the options say and write the head file; return the mean losses of each epoch."""
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


def _students(args: argparse.Namespace, trunk: Trunk, states: TokenStates, recipe: Recipe) -> Students:
    torch.manual_seed(args.seed)
    sparse = SparseHead(trunk.hidden_size, args.sparse_width, args.sparse_inputs, args.activation)
    multivector = MultiVectorHead(trunk.hidden_size, args.dim, args.bias)
    step = max(1, len(states.input_ids) // PRINCIPAL_SAMPLE)
    multivector.start_from(torch.from_numpy(states.hidden_states[::step].astype("float32")))
    return Students(sparse, multivector, trunk.special_ids, recipe)


def _provenance(args: argparse.Namespace, pairs: int) -> dict[str, str | int | float]:
    """Return what the head file records of its making; of paths only the last part, which says enough."""
    words = ["hybridtei train"]
    for name, value in sorted(vars(args).items()):
        if name not in ("cache", "output", "data", "licence", "date", "threads", "run") and value not in (None, []):
            shown = value if isinstance(value, list) else [value]
            text = " ".join(item.name if isinstance(item, Path) else str(item) for item in shown)
            words.append(_option(name, value, text))
    debian = bool(args.translations) and not args.pairs
    return {
        "data": args.data or (DEBIAN_DATA if debian else "not stated"),
        "licence": args.licence or (DEBIAN_LICENCE if debian else "not stated"),
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
