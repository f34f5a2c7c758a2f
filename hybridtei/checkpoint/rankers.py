"""Decoders that rank: their head and their template, as they were trained, or made a classifier of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridtei.checkpoint.classifiers import ClassifierHead, language_model, yes_of_two
from hybridtei.checkpoint.modules import Modules, logit_score
from hybridtei.checkpoint.sizes import read_vocabulary
from hybridtei.checkpoint.templates import PairTemplate, find_template
from hybridtei.checkpoint.weights import sentence_config
from hybridtei.errors import LoadError


def language_ranker(
    folder: Path,
    home: Path,
    modules: Modules,
    classifier: ClassifierHead | None,
    *,
    config: Mapping[str, Any],
    sentence: Mapping[str, Any],
) -> tuple[ClassifierHead | None, PairTemplate | None]:
    """(head, template) of a decoder that ranks: as it was trained, or made a classifier of; (as it is, None) of another."""
    scored = logit_score(folder, modules)
    causal = any(name.endswith("ForCausalLM") for name in config.get("architectures") or ()) and (
        not modules or scored is not None
    )
    ranks = classifier is not None and classifier.kind != "tagger"
    if not (causal or ranks):
        return classifier, None
    chat = (sentence_config(home)[1].get("modality_config") or {}).get("message") if modules else None
    default = (sentence.get("prompts") or {}).get(sentence.get("default_prompt_name"))
    template = find_template(home, str(config["model_type"]), chat, default)
    if classifier is not None:
        return (classifier if template is None else yes_of_two(classifier)), template
    tied = bool(config.get("tie_word_embeddings"))
    if scored is not None:
        return language_model(*scored, tied=tied), template
    if template is None:
        return None, None
    yes, no = (None if word is None else _token_id(home, word) for word in (template.yes, template.no))
    assert yes is not None
    return language_model(yes, no, tied=tied), template


def _token_id(folder: Path, word: str) -> int:
    """Of a word that is one token. Raises LoadError."""
    file = folder / "tokenizer.json"
    found = read_vocabulary(file).get(word)
    if found is None:
        raise LoadError(f"{file}: {word!r} is no token, but the model is asked for its logit")
    return found
