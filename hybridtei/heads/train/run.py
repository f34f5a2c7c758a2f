"""Command line of the head training."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from hybridtei.heads.train.fit import Origin, PairStates, Recipe, Students, Teacher, fit, write_head_file
from hybridtei.heads.train.heads import ACTIVATIONS, DROPS, MultiVectorHead, SparseHead
from hybridtei.heads.train.pairs import Pair, read_pairs, read_translations, select_pairs, sentence_pairs
from hybridtei.heads.train.states import TokenStates, Trunk, cached_states, load_trunk

DEBIAN_DATA = "Debian package descriptions (Translation-en of the main component): title and long description"
DEBIAN_LICENCE = "each description under its source package's debian/copyright (DFSG-free); no text is in this file"
PRINCIPAL_SAMPLE = 200_000  # token states the multi-vector head's starting directions are computed from


def build_parser() -> argparse.ArgumentParser:
    """Return the argument parser."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridtei.heads.train",
        description="Train a sparse and a multi-vector head over a frozen dense encoder, without relevance labels.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="model folder in the Hugging Face layout")
    output_help = "head file to write; a model serves the one beside it named hybridtei_heads.safetensors"
    parser.add_argument("--output", type=Path, required=True, help=output_help)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the token states, reused if it fits")
    _add_data_options(parser.add_argument_group("data"))
    _add_head_options(parser.add_argument_group("heads"))
    _add_training_options(parser.add_argument_group("training"))
    return parser


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--translations", type=Path, nargs="+", default=[], help="Debian Translation-en files")
    group.add_argument("--pairs", type=Path, nargs="+", default=[], help='JSON lines of {"query" or "title", "text"}')
    group.add_argument("--min-words", type=int, default=20, help="leave out texts with fewer words")
    group.add_argument("--opening", type=int, default=100, help="characters that make two texts repeats if equal")
    group.add_argument("--sentences", action=argparse.BooleanOptionalAction, default=True, help="add sentence pairs")
    group.add_argument("--max-tokens", type=int, default=192, help="truncate training texts here")
    group.add_argument("--data", help="description of the data, recorded in the head file (known for --translations)")
    group.add_argument("--licence", help="licence of the data, recorded in the head file (known for --translations)")
    group.add_argument("--base-name", help="name of the base model, recorded (default: the folder's name)")
    group.add_argument("--date", default=datetime.datetime.now(datetime.UTC).date().isoformat(), help="date to record")


def _add_head_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--sparse-width", type=int, default=256, help="hidden units of the sparse head; 0: linear")
    group.add_argument("--sparse-inputs", nargs="+", default=["hidden", "embedding"], choices=["hidden", "embedding"])
    group.add_argument("--activation", default="gelu", choices=sorted(ACTIVATIONS), help="of the sparse head")
    group.add_argument("--dim", type=int, default=256, help="dimensions of a token's vector")
    group.add_argument("--prefixes", type=int, nargs="*", default=[64, 128], help="dimensions that also serve alone")
    group.add_argument("--bias", action=argparse.BooleanOptionalAction, default=False, help="of the projection")
    group.add_argument("--drop", default="first", choices=DROPS, help="tokens that get no vector")


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--pooling", default="mean", choices=["mean", "cls"], help="of the model's dense vectors")
    group.add_argument("--dense-temperature", type=float, default=0.05, help="of the teacher's cosine")
    group.add_argument("--maxsim-temperature", type=float, default=0.03, help="of the teacher's mean MaxSim")
    group.add_argument("--epochs", type=int, default=3)
    group.add_argument("--learning-rate", type=float, default=1e-3, help="highest; rises first, then falls to 0")
    group.add_argument("--group-size", type=int, default=16, help="neighbouring texts that stay together")
    group.add_argument("--groups", type=int, default=4, help="groups in a batch")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of matrix products")
    group.add_argument("--threads", type=int, default=1, help="CPU threads; their number can change the last digits")


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
    words = ["python -m hybridtei.heads.train"]
    for name, value in sorted(vars(args).items()):
        if name not in ("cache", "output", "data", "licence", "date", "threads") and value not in (None, []):
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = build_parser().parse_args(argv)
    try:
        history = train(args)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"hybridtei.heads.train: {error}", file=sys.stderr)
        return 1
    for epoch, losses in enumerate(history, start=1):
        print(f"epoch {epoch}: " + ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items()))
    print(f"wrote {args.output}, {args.output.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
