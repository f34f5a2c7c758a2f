"""What sentence-transformers' own settings change: config_sentence_transformers.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridtei.checkpoint.sizes import Adapters
from hybridtei.errors import LoadError

MODEL_FILE = "config_sentence_transformers.json"


def read_prompts(sentence: Mapping[str, Any], folder: Path, adapters: Adapters | None) -> Mapping[str, str] | None:
    """Return the named prompts; an adapter's name is always one."""
    prompts = sentence.get("prompts")
    if prompts is None:
        return None if adapters is None else adapters.prompts
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise LoadError(f"{folder / MODEL_FILE}: `prompts` should map names to texts")
    return prompts if adapters is None else {**adapters.prompts, **prompts}


def default_prompt(sentence: Mapping[str, Any], folder: Path, prompts: Mapping[str, str] | None) -> str | None:
    """Return the name of the prompt of texts that name no other. Raises LoadError for one that `prompts` lacks.

    sentence-transformers itself adds empty prompts called query and document.
    """
    name = sentence.get("default_prompt_name")
    if isinstance(name, str) and name in (prompts or {}):
        return name
    if name is None or name in ("query", "document"):
        return None
    known = ", ".join(prompts or {}) or "none"
    raise LoadError(f"{folder / MODEL_FILE}: `default_prompt_name` is {name!r}; `prompts` has: {known}")


def score_activation(config: Mapping[str, Any], sentence: Mapping[str, Any]) -> str | None:
    """Return the name of the activation, which each version of sentence-transformers keeps elsewhere."""
    settings = config.get("sentence_transformers")
    inner = settings.get("activation_fn") if isinstance(settings, dict) else None
    name = sentence.get("activation_fn") or inner or config.get("sbert_ce_default_activation_function")
    return name.rsplit(".", 1)[-1] if isinstance(name, str) else None
