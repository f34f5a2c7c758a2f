"""Keys of sentence-transformers' files that nothing read. Its class of a module reads a key that
could change vectors: loading fails. It ignores all others, with a warning, and so do we.

`declared.json` has the keys of each class (`python -m conformance.families.declared`).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from pathlib import Path

from hybridtei.errors import UnsupportedArchitecture
from hybridtei.models.checkpoint.checkpoint import TRANSFORMERS, Checkpoint
from hybridtei.models.checkpoint.files import JsonObject
from hybridtei.models.families.settings import warn_once

DECLARED = Path(__file__).with_name("declared.json")
# Of training, of padding, of prompts that a model which scores leaves out, and widths that the
# weights have
WITHOUT_EFFECT = frozenset(
    {
        "__version__",
        "dead_threshold",
        "embedding_dimension",
        "frozen",
        "include_prompt",
        "k_aux",
        "module_output_name",
        "unpad_inputs",
        "word_embedding_dimension",
    }
)


def check_keys(
    checkpoint: Checkpoint,
    tasks: Collection[str],
) -> None:
    """Raises UnsupportedArchitecture for a setting of a module that its class obeys and that
    nothing read for this kind of model, unless the user replaces the module. `tasks`: the kind's,
    of a Transformer."""
    declared, flags = declared_keys(), checkpoint.flags
    replaced = set[str]()
    if flags.pooling is not None:
        replaced |= {"Pooling", "SpladePooling"}
    if flags.dense_path is not None:
        replaced.add("Dense")
    for name, path in checkpoint.modules:
        if name in replaced:
            continue
        if name in TRANSFORMERS:
            settings = checkpoint.home.transformer
            task = settings.get("transformer_task")
            if task not in (None, *tasks) and not replaced:
                raise UnsupportedArchitecture(
                    f"{settings.file}: `transformer_task` is {task!r}; supported in this model: "
                    f"{', '.join(tasks)}"
                )
        else:
            settings = checkpoint.root.within(path).object(optional=True)
        # Else the kind has no use for the module
        if name in declared and settings.read:
            _check(settings, declared[name])
    _check(checkpoint.root.sentence, ())


def _check(
    settings: JsonObject,
    declared: Collection[str],
) -> None:
    passed = settings.read | WITHOUT_EFFECT
    unread = [key for key in settings if key not in passed]
    for key in unread:
        if key in declared and settings[key]:
            raise UnsupportedArchitecture(
                f"{settings.file}: `{key}` is {settings[key]!r}, which sentence-transformers obeys "
                "and hybridtei does not in this kind of model"
            )
    unknown = [f"`{key}`" for key in unread if key not in declared]
    if unknown:
        warn_once(f"{settings.file}: ignored, as by sentence-transformers: {', '.join(unknown)}")


@cache
def declared_keys() -> dict[str, list[str]]:
    """The keys that sentence-transformers' class of each module takes."""
    keys: dict[str, list[str]] = json.loads(DECLARED.read_text(encoding="utf-8"))
    return keys
