"""The models that profiles name: seeded tiny checkpoints in hub format, which a TEI loads, too. To
write them takes torch."""

from collections.abc import Callable, Mapping
from pathlib import Path

from conformance.small import tiny

PROMPTS = {"query": "baka ", "document": "bake "}


def _embedding(folder: Path) -> None:
    tiny.write_family(folder, "bert")
    tiny.write_modules(folder, pooling="mean", layout="old", prompts=PROMPTS)


def _plain(folder: Path) -> None:
    tiny.write_family(folder, "bert")
    tiny.write_modules(folder, pooling="cls", layout="old")


def _guessed(folder: Path) -> None:
    """Without modules: pooling by the name of the model's type."""
    tiny.write_family(folder, "bert")


def _roberta(folder: Path) -> None:
    tiny.write_family(folder, "roberta")
    tiny.write_modules(folder, pooling="cls", layout="old")
    # So that positions decide how long a text may be
    (folder / "sentence_bert_config.json").unlink()


def _xlmr(folder: Path) -> None:
    tiny.write_family(folder, "xlm-roberta")
    tiny.write_modules(folder, pooling="mean", layout="old")


def _last(folder: Path) -> None:
    tiny.write_family(folder, "qwen3")
    tiny.write_modules(folder, pooling="lasttoken", layout="old")


def _dense(folder: Path) -> None:
    tiny.write_family(folder, "bert")
    tiny.write_modules(
        folder,
        pooling="mean",
        layout="old",
        dense=[(tiny.HIDDEN, 8, "torch.nn.modules.activation.Tanh")],
    )


def _splade(folder: Path) -> None:
    tiny.write_family(folder, "bert", task="ForMaskedLM")


def _reranker(folder: Path) -> None:
    tiny.write_classifier(folder, "bert", 1)


def _classifier(folder: Path) -> None:
    tiny.write_classifier(folder, "bert", 3)


WRITERS: Mapping[str, Callable[[Path], None]] = {
    "embedding": _embedding,
    "plain": _plain,
    "guessed": _guessed,
    "roberta": _roberta,
    "xlmr": _xlmr,
    "last": _last,
    "dense": _dense,
    "splade": _splade,
    "reranker": _reranker,
    "classifier": _classifier,
}


def write(name: str, folder: Path) -> Path:
    """A model of this name below `folder`, if it is not there yet."""
    home = folder / name
    if not (home / "config.json").exists():
        home.mkdir(parents=True, exist_ok=True)
        WRITERS[name](home)
    return home
