"""Compares a checkpoint's vectors here with sentence-transformers' or transformers', and judges the
clarity of refusals."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import (
    CrossEncoder,
    MultiVectorEncoder,
    SentenceTransformer,
    SparseEncoder,
)
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from conformance.small.vocabulary import WORDS
from hybridtei.encoder import Encoder
from hybridtei.errors import HybridTeiError, LoadError, WeightMismatch

TEXTS = (
    " ",
    "baka bulo",
    "Crème BRÛLÉE 東京 Baka?",
    "  leading bulo",
    "[CLS] baka </s> <|endoftext|> [MASK] <s> <pad> lolo",
    " ".join(WORDS * 6),
    "baka 🙂 bulo 👩‍👩‍👧 duti",
)
PAIRS = [(TEXTS[1], text) for text in TEXTS[2:]]
# Of an element of a unit vector, or of a logit, in float32
TOLERANCE = 2e-5
RIGHT, WRONG, CLEAR, UNCLEAR = (
    "served, right",
    "served, WRONG",
    "refused, clear",
    "refused, unclear",
)
NOT_JUDGED, BY_DESIGN, AT_REQUEST = (
    "served, not judged",
    "differs by design",
    "refused at the request",
)

# Name of an output -> an array a text
Rows = dict[str, list[Any]]
CURE = (
    r"served|supported|use |convert|pass |--|give |set |load|save|should|needs?\b|install|remove|"
    r"rename|[Mm]erge|[Cc]opy|download|run |one of"
)
DAMAGE = "empty|cannot be read|NaN or infinity|not a tokenizer|is missing"
FOREIGN = (
    "PytorchStreamReader|miniz|pip install (?!['\"`]?hybridtei)|optimum|Traceback|mat1 and "
    "mat2|is invalid for input|has no attribute|must be executed to correctly "
    "load|Unrecognized|Errno|KeyError"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line of the report. `deviation`: the largest difference of an element, None where nothing
    was compared."""

    verdict: str
    message: str
    deviation: float | None = None


def is_clear(error: BaseException, folder: Path) -> bool:
    """True if a refusal tells a new user what to do.

    It is one of our classes of LoadError; it names a file of the checkpoint, or a key in
    backquotes; it says what is served, expected or mends it, or that the file is damaged, or
    (WeightMismatch) which two of the checkpoint's files disagree; and it passes on no raw text of
    torch, transformers or pip.
    """
    message = str(error).replace(str(folder), "")
    suffixes = (".json", ".safetensors", ".bin", ".gguf", ".pt")
    names = [*suffixes, *(path.name for path in folder.rglob("*"))]
    is_named = "`" in message or any(name in message for name in names)
    mends = isinstance(error, WeightMismatch) or re.search(f"{CURE}|{DAMAGE}", message)
    return (
        isinstance(error, LoadError)
        and is_named
        and bool(mends)
        and not re.search(FOREIGN, message)
    )


def expected(kind: str, folder: Path, options: Mapping[str, Any]) -> Rows:
    """The oracle's outputs by kind of checkpoint."""
    with torch.inference_mode():
        return ORACLES[kind](folder, options)


def found(kind: str, encoder: Encoder, options: Mapping[str, Any]) -> Rows:
    """Ours."""
    return OURS[kind](encoder, options)


def compare(ours: Rows, theirs: Rows) -> Verdict:
    """Raises nothing: other outputs or widths are wrong by infinity."""
    worst, place = 0.0, "-"
    for name, rows in theirs.items():
        for row, (one, other) in enumerate(
            zip(ours.get(name, [()] * len(rows)), rows, strict=True)
        ):
            same = np.shape(one) == np.shape(other)
            difference = (
                float(np.abs(np.asarray(one) - np.asarray(other)).max(initial=0))
                if same
                else np.inf
            )
            difference = np.inf if np.isnan(difference) else difference
            if difference > worst:
                worst, place = (
                    difference,
                    f"{name} row {row}"
                    + ("" if same else f" {np.shape(one)}, not {np.shape(other)}"),
                )
    return Verdict(RIGHT if worst <= TOLERANCE else WRONG, f"{worst:.1e} {place}", worst)


def refusal(error: Exception, folder: Path) -> Verdict:
    """A failure to load, judged by `is_clear`."""
    message = f"{type(error).__name__}: {error}".replace(str(folder), "…").replace("\n", " ")[:400]
    return Verdict(CLEAR if is_clear(error, folder) else UNCLEAR, message)


def judge(
    kind: str, folder: Path, backend: str, theirs: Rows | str, options: Mapping[str, Any]
) -> Verdict:
    """`theirs`: the oracle's rows, or why it gives none."""
    load = {"measures": False, **options.get("load", {})}
    try:
        encoder = Encoder.load(str(folder), backend=backend, dtype="float32", **load)
    except Exception as error:
        return refusal(error, folder)
    try:
        ours = found(kind, encoder, options)
    except HybridTeiError as error:
        return Verdict(AT_REQUEST, f"{type(error).__name__}: {error}"[:200])
    finally:
        encoder.close()
    if isinstance(theirs, str):
        return Verdict(NOT_JUDGED, theirs)
    return compare(ours, theirs)


def _texts(options: Mapping[str, Any]) -> Sequence[str]:
    """`first` 1: without the blank, which some tokenizers make nothing of."""
    return TEXTS[options.get("first", 0) :]


def _pairs(options: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """`plain`: without special tokens and long texts, which a ranker's template here keeps plain,
    and cuts before its end."""
    return [PAIRS[0], PAIRS[1], PAIRS[4]] if options.get("plain") else PAIRS


def _unit(rows: Any) -> Any:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _dense_theirs(folder: Path, options: Mapping[str, Any]) -> Rows:
    trust = options.get("load", {}).get("trust_remote_code", False)
    model = SentenceTransformer(
        str(folder), device="cpu", trust_remote_code=trust, model_kwargs={"dtype": torch.float32}
    )
    rows: Rows = {}
    for one in options.get("inputs", [{}]):
        method = {"query": model.encode_query, "document": model.encode_document}.get(
            one.get("input_type"), model.encode
        )
        named = {"prompt_name": one["prompt_name"]} if "prompt_name" in one else {}
        # Padding is no part of what is compared
        vectors = np.concatenate([method([text], **named) for text in _texts(options)])
        rows[f"dense {one or ''}"] = list(vectors if options.get("raw") else _unit(vectors))
    return rows


def _dense_ours(encoder: Encoder, options: Mapping[str, Any]) -> Rows:
    rows: Rows = {}
    for one in options.get("inputs", [{}]):
        vectors = encoder.encode(_texts(options), normalize=not options.get("raw"), **one).dense
        rows[f"dense {one or ''}"] = [np.asarray(row) for row in vectors]
    return rows


def _sparse_theirs(folder: Path, options: Mapping[str, Any]) -> Rows:
    model = SparseEncoder(str(folder), device="cpu")
    many = {"query": model.encode_query, "document": model.encode_document}
    return {
        f"sparse {kind}": [
            method([text], convert_to_sparse_tensor=False, convert_to_tensor=True)[0]
            .float()
            .numpy()
            for text in TEXTS
        ]
        for kind, method in many.items()
    }


def _sparse_ours(encoder: Encoder, options: Mapping[str, Any]) -> Rows:
    return {
        f"sparse {kind}": [*encoder.encode(TEXTS, ("sparse",), input_type=kind).sparse.to_dense()]
        for kind in ("query", "document")
    }


def _late_theirs(folder: Path, options: Mapping[str, Any]) -> Rows:
    model = MultiVectorEncoder(str(folder), device="cpu")
    texts = list(TEXTS[1:])
    return {
        "query": [np.asarray(model.encode_query([text])[0]) for text in texts],
        "document": [np.asarray(model.encode_document([text])[0]) for text in texts],
    }


def _late_ours(encoder: Encoder, options: Mapping[str, Any]) -> Rows:
    texts = list(TEXTS[1:])
    parts = {
        kind: encoder.encode(texts, ("multivector",), input_type=kind).multivector
        for kind in ("query", "document")
    }
    return {
        kind: [np.asarray(part.row(i)) for i in range(len(texts))] for kind, part in parts.items()
    }


def _ranker_theirs(folder: Path, options: Mapping[str, Any]) -> Rows:
    model = CrossEncoder(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    scores = [
        model.predict([pair], activation_fn=torch.nn.Identity())[0] for pair in _pairs(options)
    ]
    return {"classify": scores, "rerank": scores}


def _ranker_ours(encoder: Encoder, options: Mapping[str, Any]) -> Rows:
    pairs = _pairs(options)
    ranked = sorted(
        encoder.rerank(PAIRS[0][0], [text for _, text in pairs], raw_scores=True),
        key=lambda one: one.index,
    )
    return {
        "classify": [row[0].score for row in encoder.classify(pairs, raw_scores=True)],
        "rerank": [one.score for one in ranked],
    }


def _classifier_theirs(folder: Path, options: Mapping[str, Any]) -> Rows:
    words = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    length = min(words.model_max_length, getattr(model.config, "max_position_embeddings", 128))
    return {
        "classify": [
            model(**words(*sides, truncation=True, max_length=length, return_tensors="pt"))
            .logits[0]
            .numpy()
            for sides in (*((text,) for text in TEXTS[1:]), *PAIRS)
        ]
    }


def _classifier_ours(encoder: Encoder, options: Mapping[str, Any]) -> Rows:
    predictions = encoder.classify([*TEXTS[1:], *PAIRS], raw_scores=True)
    rows = [{one.label: one.score for one in row} for row in predictions]
    return {"classify": [np.array([row[label] for label in encoder.spec.labels]) for row in rows]}


def _tagger_theirs(folder: Path, options: Mapping[str, Any]) -> Rows:
    words = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = []
    for text in TEXTS[1:3]:
        read = words(text, return_tensors="pt", return_special_tokens_mask=True)
        special = read.pop("special_tokens_mask")[0].bool()
        rows.append(model(**read).logits[0].softmax(-1).amax(-1)[~special].numpy())
    return {"tags": rows}


def _tagger_ours(encoder: Encoder, options: Mapping[str, Any]) -> Rows:
    return {
        "tags": [
            np.array([one.score for one in row])
            for row in encoder.tag(TEXTS[1:3], aggregation_strategy="none")
        ]
    }


ORACLES: Mapping[str, Callable[[Path, Mapping[str, Any]], Rows]] = {
    "embedding": _dense_theirs,
    "sparse": _sparse_theirs,
    "late": _late_theirs,
    "reranker": _ranker_theirs,
    "classifier": _classifier_theirs,
    "tagger": _tagger_theirs,
}
OURS: Mapping[str, Callable[[Encoder, Mapping[str, Any]], Rows]] = {
    "embedding": _dense_ours,
    "sparse": _sparse_ours,
    "late": _late_ours,
    "reranker": _ranker_ours,
    "classifier": _classifier_ours,
    "tagger": _tagger_ours,
}
