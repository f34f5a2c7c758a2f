"""sentence-transformers' settings: of the model (config_sentence_transformers.json) and of its
Transformer (sentence_bert_config.json). A setting that changes vectors is either applied, or
refused by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.files import JsonObject
from hybridtei.models.checkpoint.sizes import Adapters

log = logging.getLogger(__name__)
# Characters; tokenised again with each text of a request
MAX_PROMPT = 16_384
# The prompts of a type of inputs: sentence-transformers' names, then Jina's
PROMPTS = {
    "query": ("query", "retrieval.query"),
    "document": ("document", "passage", "corpus", "retrieval.passage"),
}
# Arguments of the tokenizer that do not change the tokens of a single text.
WITHOUT_EFFECT = {
    "padding": (True, False, "longest", "max_length"),
    "truncation": (True, "longest_first"),
    "return_tensors": ("pt",),
    "return_attention_mask": (True,),
}
# Arguments of transformers' apply_chat_template that the template itself does not get.
OF_RENDERING = frozenset(
    {
        "chat_template",
        "continue_final_message",
        "max_length",
        "padding",
        "processor_kwargs",
        "return_dict",
        "return_assistant_tokens_mask",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "truncation",
    }
)
STATES = ("last_hidden_state", ["last_hidden_state"], ["hidden_states", -1])
LOGITS = ("logits", ["logits"])


def check_similarity(sentence: JsonObject, *, is_unit: bool) -> None:
    """Warn of another similarity than the cosine, unless vectors have length 1 (`is_unit`), whose
    order is the same."""
    name = sentence.get("similarity_fn_name")
    if name in ("dot", "dot_product", "euclidean", "manhattan") and not is_unit:
        log.warning(
            "%s: `similarity_fn_name` is %r, and collections, search and similarities use the "
            "cosine: the order can differ. To compare vectors by %r, ask for them with `normalize` "
            "false",
            sentence.file,
            name,
            name,
        )


def read_prompts(sentence: JsonObject, adapters: Adapters | None) -> Mapping[str, str] | None:
    """Return the named prompts. Each adapter has one."""
    prompts = sentence.get("prompts")
    if prompts is None:
        return None if adapters is None else adapters.prompts
    if isinstance(prompts, dict):
        prompts = {name: "" if text is None else text for name, text in prompts.items()}
    if not isinstance(prompts, dict) or not all(
        isinstance(text, str) and len(text) <= MAX_PROMPT for text in prompts.values()
    ):
        raise LoadError(
            f"{sentence.file}: `prompts` should map names to texts of at most {MAX_PROMPT} "
            "characters"
        )
    return prompts if adapters is None else {**adapters.prompts, **prompts}


def default_prompt(
    sentence: JsonObject,
    prompts: Mapping[str, str] | None,
    *,
    embeds: bool,
    ignores: bool = False,
) -> str | None:
    """Return the name of the default prompt. Raises LoadError if `prompts` lacks it.

    sentence-transformers adds empty prompts called query and document. `embeds`: False for a model
    without a default prompt.
    `ignores`: a model that scores, where the library uses the default prompt and TEI does not.
    """
    name = sentence.get("default_prompt_name")
    prompts = prompts or {}
    if isinstance(name, str) and name in prompts:
        if ignores and prompts[name]:
            log.warning(
                "%s: `default_prompt_name` %r is ignored, as in TEI: the model scores",
                sentence.file,
                name,
            )
        return name if embeds else None
    if name is None or name in ("query", "document") or not embeds:
        return None
    names = ", ".join(prompts) or "none"
    raise LoadError(
        f"{sentence.file}: `default_prompt_name` is {name!r}, should be one of `prompts`: {names}"
    )


def score_activation(config: Mapping[str, Any], sentence: Mapping[str, Any]) -> str | None:
    """Return the name of the activation. Versions of sentence-transformers store it in different
    places."""
    settings = config.get("sentence_transformers")
    name = sentence.get("activation_fn")
    if not name and isinstance(settings, dict):
        name = settings.get("activation_fn")
    name = name or config.get("sbert_ce_default_activation_function")
    return name.rsplit(".", 1)[-1] if isinstance(name, str) else None


def adds_specials(settings: JsonObject, *, scores: bool, renders: bool) -> bool:
    """Return True if texts get special tokens. `settings`: the transformer's. `scores`: the model
    gives logits. `renders`: a template is rendered, or the settings do not count. Raises
    UnsupportedArchitecture for other settings that change its output."""
    modalities = settings.object("modality_config")
    _check_outputs(modalities, LOGITS + STATES if scores else STATES)
    if modalities.get("message") is not None and not renders:
        raise UnsupportedArchitecture(
            f"{settings.file}: `modality_config` has `message`: sentence-transformers renders each "
            "text as a user's message by the chat template, which hybridtei does for pairs alone. "
            "If the model was trained on plain texts, remove `message`"
        )
    arguments = settings.object("processing_kwargs")
    calls = {
        f"{part}.{key}": value
        for part in ("common", "text")
        for key, value in arguments.object(part).items()
    }
    adds = calls.pop("text.add_special_tokens", calls.pop("common.add_special_tokens", True))
    for name, value in calls.items():
        if value not in WITHOUT_EFFECT.get(name.partition(".")[2], ()):
            raise UnsupportedArchitecture(
                f"{settings.file}: `processing_kwargs` {name} is {value!r}, which is not supported"
            )
    return bool(adds)


def template_arguments(settings: JsonObject) -> Mapping[str, Any]:
    """Return the chat template's arguments besides the messages. Raises UnsupportedArchitecture."""
    arguments = settings.object("processing_kwargs").object("chat_template")
    for name in arguments:
        if name in OF_RENDERING:
            raise UnsupportedArchitecture(
                f"{arguments.file}: `processing_kwargs` chat_template.{name} is not supported"
            )
    return arguments


def _check_outputs(modalities: JsonObject, served: tuple[Any, ...]) -> None:
    for name in ("text", "message"):
        entry = modalities.object(name)
        method = entry.get("method", "forward")
        output = entry.get("method_output_name", served[0])
        if method != "forward" or output not in served:
            raise UnsupportedArchitecture(
                f"{modalities.file}: `modality_config` takes {output!r} of `{method}` for {name}; "
                f"supported: {served[0]} of `forward`"
            )
