"""Decoders that rank: the template that asks the model if a document answers a query, and the head.

The template comes from our own file beside the model, else from the chat template that
sentence-transformers renders, else from the table of known families. config.json never has one, and
without a template the model ranks almost at random.

Templates may contain special tokens. In queries and documents, which come from users, the tokenizer
reads special tokens as plain text (`text.reader`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from hybridtei.errors import LoadError, UnsupportedArchitecture
from hybridtei.models.checkpoint.chat_template import TemplateFailure, render
from hybridtei.models.checkpoint.checkpoint import Checkpoint
from hybridtei.models.checkpoint.classifiers import (
    ClassifierHead,
    language_model,
    yes_of_two,
)
from hybridtei.models.checkpoint.files import MAX_JSON_BYTES, JsonObject
from hybridtei.models.checkpoint.folder import Folder
from hybridtei.models.checkpoint.modules import logit_score
from hybridtei.models.checkpoint.sentence import template_arguments
from hybridtei.models.checkpoint.tokenizer.vocabularies import declared_tokens, token_text
from hybridtei.models.families import that_have
from hybridtei.system.machine import read_bounded

log = logging.getLogger(__name__)

OWN_FILE = "hybridtei_rerank.json"
# Characters; slots, each for one text (known templates: 900, 3)
MAX_TEMPLATE, MAX_SLOTS = (20_000, 16)
SLOT = re.compile(r"\{(instruction|query|document)\}")


class PairTemplate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prompt of a language model that ranks a pair. hybridtei_rerank.json has these fields.

    `body` may be truncated, `prefix` and `suffix` are not. `body` has slots for {query}, {document}
    and optionally {instruction}, with the default `instruction`. The texts of a list are tokenised
    one by one. `yes` and `no`: the words whose logits are compared; without `no`, the score is the
    logit of `yes`.
    """

    prefix: str
    body: str | tuple[str, ...]
    suffix: str
    instruction: str = ""
    yes: str = "yes"
    no: str | None = "no"

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the parts of the body that are tokenised one by one."""
        return (self.body,) if isinstance(self.body, str) else self.body

    @property
    def ends_with_document(self) -> bool:
        """True if nothing of the body comes after the document."""
        return self.parts[-1].endswith("{document}")


QWEN3 = PairTemplate(
    prefix=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        "and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    ),
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
# Source: `MxbaiRerankV2` of Mixedbread's package mxbai-rerank 0.1.6.
MXBAI = PairTemplate(
    prefix=(
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.<|im_end|>\n<|im_start|>user\n"
    ),
    body=("query: {query}", "\n", "document: {document}"),
    suffix=(
        "\n"
        "You are a search relevance expert who evaluates how well documents match search queries. "
        "For each query-document pair, carefully analyze the semantic relationship between them, "
        "then provide your binary relevance judgment (0 for not relevant, 1 for relevant).\n"
        "Relevance:<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    yes="1",
    no="0",
)
# Source: `BaseLLMReranker` of BAAI's package FlagEmbedding 1.4.2.
BGE_GEMMA = PairTemplate(
    prefix="<bos>",
    body=("A: {query}", "\n", "B: {document}"),
    suffix=(
        "\n"
        "Given a query A and a passage B, determine whether the passage contains an answer to the "
        "query by providing a prediction of either 'Yes' or 'No'."
    ),
    yes="Yes",
    no=None,
)
# Source: the card of nvidia/llama-3.2-nv-rerankqa-1b-v2. `_known_template` adds the special
# tokens of the tokenizer.
NVIDIA = PairTemplate(prefix="", body="question:{query} \n \n passage:{document}", suffix="")
# (pattern of the folder's path and the architecture, model_type) -> template
KNOWN = {
    (r"LlamaBidirectionalForSequenceClassification", "llama"): NVIDIA,
    (r"qwen3[-_]?reranker", "qwen3"): QWEN3,
    (r"mxbai[-_]rerank[-_]\w+[-_]v2", "qwen2"): MXBAI,
    (r"bge[-_]reranker[-_]v2[-_]gemma", "gemma"): BGE_GEMMA,
}


def filled(slot: str, instruction: str, pair: str | tuple[str, str]) -> str:
    """Return a part of a template with a pair (query, document) in its places."""
    values = {"instruction": instruction, "query": pair[0], "document": pair[1]}
    return SLOT.sub(lambda match: values[match[1]], slot)


def _template(checkpoint: Checkpoint, *, scores: bool) -> PairTemplate | None:
    """Return the template of a model, or None. `scores`: a head of its own gives one score. Then
    any chat template counts that renders a query and a document. Those of chat models render every
    role, so of several labels they say nothing. Raises LoadError, naming the file."""
    home, config = checkpoint.home, checkpoint.config
    sentence = checkpoint.root.sentence
    instruction = (sentence.get("prompts") or {}).get(sentence.get("default_prompt_name"))
    if (home.path / OWN_FILE).exists():
        return _own(home.path / OWN_FILE)
    modalities = checkpoint.settings.object("modality_config")
    if checkpoint.renders_messages:
        return _of_chat(
            home, flat=modalities["message"].get("format") == "flat", instruction=instruction
        )
    template = None
    if scores and not modalities:
        template = _of_pairs(home, instruction)
    template = template or _known_template(home, config)
    if template is None and not modalities and _renders_qwen3(home, config):
        return QWEN3
    return template


def _renders_qwen3(home: Folder, config: JsonObject) -> bool:
    """True for a Qwen3 of any name whose chat template gives Qwen3-Reranker's prompt, with its
    instruction written out or in the place of the system's message."""
    if config["model_type"] != "qwen3":
        return False
    prompts = [
        template.prefix + "".join(template.parts) + template.suffix
        for template in (QWEN3, _of_pairs(home, QWEN3.instruction))
        if template is not None
    ]
    written = {prompt.replace("{instruction}", QWEN3.instruction) for prompt in prompts}
    return len(prompts) == 2 and len(written) == 1


def _of_pairs(home: Folder, instruction: str | None) -> PairTemplate | None:
    """Return the chat template if it renders a query and a document, as sentence-transformers asks
    of it."""
    with suppress(LoadError):
        return _of_chat(home, flat=True, instruction=instruction)
    return None


def _known_template(home: Folder, config: JsonObject) -> PairTemplate | None:
    name = " ".join([str(home.path.resolve()), *(config.get("architectures") or ())])
    for (pattern, model_type), template in KNOWN.items():
        if model_type == config["model_type"] and re.search(pattern, name, re.IGNORECASE):
            if template is NVIDIA:
                return _with_specials(home, template)
            return template
    return None


def _with_specials(home: Folder, template: PairTemplate) -> PairTemplate:
    """Put the special tokens around the template that the tokenizer puts around a text alone."""
    processor = home.added.post_processor or {}
    steps = processor.get("processors") or [processor]
    pieces: list[dict[str, Any]] = next(
        (step["single"] for step in steps if step.get("single")), []
    )
    names = [piece.get("SpecialToken", {}).get("id") for piece in pieces]
    # The text itself has no name
    middle = [*names, None].index(None)
    return replace(template, prefix="".join(names[:middle]), suffix="".join(names[middle + 1 :]))


def template_source(home: Path, template: PairTemplate | None) -> str | None:
    """Return the name of what declares a ranker's template: a file, the known family's pattern, or
    None."""
    if template is None:
        return None
    if (home / OWN_FILE).exists():
        return OWN_FILE
    bodies = {known_template.body: pattern for (pattern, _), known_template in KNOWN.items()}
    return bodies.get(template.body, "chat_template.jinja")


def _own(file: Path) -> PairTemplate:
    try:
        content = read_bounded(file, MAX_JSON_BYTES)
        own = msgspec.json.decode(content, type=PairTemplate)
    except (msgspec.DecodeError, OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{file}: should describe a template: {error}") from error
    _check_slots(file, "".join(own.parts), len(content))
    return own


def _check_slots(file: Path, body: str, size: int) -> None:
    if size > MAX_TEMPLATE or len(SLOT.findall(body)) > MAX_SLOTS:
        raise LoadError(
            f"{file}: a template of {size} characters; allowed are {MAX_TEMPLATE}, with "
            f"{MAX_SLOTS} places of texts"
        )
    lacking = {"query", "document"} - set(SLOT.findall(body))
    if lacking:
        raise LoadError(f"{file}: the template has no place for {', '.join(sorted(lacking))}")


def _of_chat(folder: Folder, *, flat: bool, instruction: str | None) -> PairTemplate:
    """Render a chat template with marks instead of texts, and split it at the special tokens around
    the marks."""
    file, settings = folder.path / "chat_template.jinja", folder.tokenizer_config
    source = settings.get("chat_template")
    # Templates by name
    if isinstance(source, list):
        named = [each for each in source if isinstance(each, dict)]
        source = {each.get("name"): each.get("template") for each in named}.get("default")
    if file.exists():
        source = read_bounded(file, MAX_JSON_BYTES).decode()
    if not isinstance(source, str):
        raise LoadError(f"{file}: missing: sentence-transformers renders messages by it")
    marks = {name: f"\ue000{name}\ue001" for name in ("instruction", "query", "document")}
    roles = {"query": marks["query"], "document": marks["document"]}
    if instruction:
        roles = {"system": marks["instruction"], **roles}
    messages = [
        {"role": role, "content": mark if flat else [{"type": "text", "text": mark}]}
        for role, mark in roles.items()
    ]
    contents = {key: token_text(settings[key]) for key in settings if key.endswith("_token")}
    tokens = {key: content for key, content in contents.items() if content is not None}
    text = _rendered(file, source, messages, {**tokens, **template_arguments(folder.transformer)})
    text = text.replace("\ue000", "{").replace("\ue001", "}")
    slots = [*SLOT.finditer(text)]
    _check_slots(file, text, len(text))
    specials = _special_tokens(folder)
    # The body lies between the last special token before the slots and the first one after them
    ends = [match.end() for match in specials.finditer(text, 0, slots[0].start())]
    starts = [match.start() for match in specials.finditer(text, slots[-1].end())]
    begin = ends[-1] if ends else 0
    end = starts[0] if starts else len(text)
    return PairTemplate(text[:begin], text[begin:end], text[end:], instruction or "")


def _rendered(
    file: Path, source: str, messages: list[dict[str, Any]], arguments: Mapping[str, Any]
) -> str:
    values = {
        "tools": None,
        "documents": None,
        "add_generation_prompt": False,
        **arguments,
        "messages": messages,
    }
    try:
        return render(source, values)
    except TemplateFailure as failure:
        if failure.is_missing:
            raise UnsupportedArchitecture(
                f"{file}: rendering it needs jinja2: pip install jinja2, or describe the template "
                f"in {OWN_FILE}"
            ) from failure
        raise LoadError(
            f"{file}: cannot be rendered for a query and a document: {failure}"
        ) from failure


def _special_tokens(folder: Folder) -> re.Pattern[str]:
    """Return a pattern of the tokens that the files add to the vocabulary."""
    added = folder.added.added_tokens or []
    contents = [
        str(token.get("content"))
        for token in added
        if isinstance(token, dict) and token.get("content")
    ]
    contents += [token.content for token in declared_tokens(folder.tokenizer_config).values()]
    # The longest first, since a token may begin with another one
    names = [re.escape(content) for content in sorted(contents, key=len, reverse=True)]
    # An empty pattern would match everywhere; this one matches nothing
    return re.compile("|".join(names) or r"(?!)")


def language_ranker(
    checkpoint: Checkpoint, classifier: ClassifierHead | None
) -> tuple[ClassifierHead | None, PairTemplate | None]:
    """Return (head, template) of a decoder that ranks, by its own classifier or by the logits of
    words. For any other model return (`classifier`, None)."""
    home, config, family = checkpoint.home, checkpoint.config, checkpoint.family
    token_ids = logit_score(checkpoint)
    causal = checkpoint.is_a("ForCausalLM") and (not checkpoint.modules or token_ids is not None)
    ranks = classifier is not None and classifier.role != "tagger"
    if causal and family.words is None:
        if token_ids is None and not (home.path / OWN_FILE).exists():
            return classifier, None
        raise UnsupportedArchitecture(
            f"{config.file}: {checkpoint.model_type!r} as a language model that ranks is not "
            f"supported; supported: {that_have('words')}"
        )
    if not (causal or (ranks and family.is_decoder)):
        return classifier, None
    scores = classifier is not None and classifier.role == "reranker"
    template = _template(checkpoint, scores=scores)
    if classifier is not None:
        if template is not None:
            classifier = yes_of_two(classifier)
        elif classifier.role == "reranker":
            log.warning(
                "%s: no file names the template that this language model was trained to rank with: "
                "the document follows the query as the tokenizer joins two texts. If the model's "
                "card has a template, describe it in %s",
                home,
                OWN_FILE,
            )
        return classifier, template
    if token_ids is None and template is not None:
        no = None if template.no is None else _token_id(home, template.no)
        token_ids = _token_id(home, template.yes), no
    if token_ids is None or family.words is None:
        return None, None
    return language_model(home, family.words, config, *token_ids), template


def _token_id(folder: Folder, word: str) -> int:
    token_id = folder.vocabulary.get(word)
    if token_id is None:
        raise LoadError(
            f"{folder.path / 'tokenizer.json'}: the word {word!r}, whose logit is the score, is "
            "not a token"
        )
    return token_id
