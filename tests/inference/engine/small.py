"""A small real model without weights: a WordPiece tokenizer built in code, and the fake backend's
arithmetic."""

import string
from pathlib import Path

from conformance.small.fake_backend import FakeBackend
from conformance.small.vocabulary import wordpiece
from hybridtei.batch import Positions, pack
from hybridtei.config import EngineConfig
from hybridtei.inference.engine.service import EngineService
from hybridtei.inference.tasks.base import Model
from hybridtei.models.checkpoint.heads import MultivectorHead, SparseHead
from hybridtei.models.checkpoint.kinds import Embedding, Labels, Late, Splade
from hybridtei.models.checkpoint.layers import query_table
from hybridtei.models.checkpoint.spec import ModelSpec, Router
from hybridtei.models.text.reader import TextReader
from hybridtei.models.text.tokenizer import Prompts, Tokenizer

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [
    "the",
    "a",
    "hybrid",
    "search",
    "engine",
    "finds",
    "text",
    "by",
    "words",
    "and",
    "meaning",
    "poison",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
]
# The normaliser removes it, so its id decodes to nothing that becomes a token
CONTROL = "\x01"
LETTERS = [*string.ascii_lowercase, *string.digits, *".,:;!?-_'"]
PIECES = [
    *SPECIALS,
    *dict.fromkeys([*WORDS, *LETTERS]),
    *(f"##{letter}" for letter in LETTERS),
    CONTROL,
]
IDS = {piece: number for number, piece in enumerate(PIECES)}
HIDDEN, DIM, LONGEST = 16, 8, 64
LEXICAL, PROJECTION = SparseHead("linear"), MultivectorHead(Path("small"), DIM)
PROMPTS = {"query": "query: ", "passage": "passage: "}


def tokenizer():
    raw = wordpiece(PIECES)
    raw.add_special_tokens(SPECIALS)
    return Tokenizer(raw, has_token_types=True)


def model_spec(
    *,
    pooling=("mean",),
    sparse=LEXICAL,
    multivector=PROJECTION,
    classifier=None,
    sides=None,
    query=None,
    **changes,
):
    """A model with every kind of output, or of the kind that the arguments name."""
    heads = {"pooling": pooling, "sparse": sparse, "multivector": multivector}
    width = changes.get("hidden_size", HIDDEN)
    if classifier is not None:
        kind = Labels(head=classifier, template=changes.pop("template", None))
    elif sides is not None:
        kind = Late(query=sides[0], document=sides[1], multivector=multivector)
    elif query is not None:
        documents = Embedding(pooling=pooling, width=width)
        kind = Router(**vars(documents), of_documents=documents, of_queries=query, default=None)
    elif sparse is not None and sparse.kind == "splade":
        kind = Splade(sparse=sparse, width=len(PIECES))
    else:
        kind = Embedding(**heads, width=width)
    facts = {
        "folder": Path("small"),
        "model_type": "bert",
        "architectures": ("BertModel",),
        "hidden_size": HIDDEN,
        "vocab_size": len(PIECES),
        "max_input_length": LONGEST,
        "positions": Positions(),
        "kind": kind,
        "prompts": PROMPTS,
        "removed_ids": frozenset(range(len(SPECIALS))),
        "has_token_types": True,
    }
    return ModelSpec(**{**facts, **changes})


def dense_only():
    return model_spec(sparse=None, multivector=None, prompts=None)


def splade():
    return model_spec(sparse=SparseHead("splade", idf=False), multivector=None, pooling=())


def model(spec=None, *, default_prompt=None):
    spec = spec or model_spec()
    prompts = Prompts(
        spec.prompts, default_prompt, () if spec.adapters is None else spec.adapters.names
    )
    reader = TextReader(tokenizer(), prompts, spec.max_input_length, spec.vocab_size)
    return Model(spec, reader, query_table(spec))


def answered(task, model, computed=None):
    """The encodings of a task, and its answer by the fake backend; `computed`: instead of its own
    heads."""
    encodings = task.prepare(model)
    batch = pack(encodings, computed or task.heads, model.spec.positions)
    return encodings, task.finish(model, encodings, FakeBackend(model.spec).forward(batch))


def service(
    spec=None,
    config=None,
    *,
    budget_tokens=256,
    registry=None,
    default_prompt=None,
    **backend,
):
    """An engine over the fake backend; keywords beyond are the backend's."""
    spec = spec or model_spec()
    return EngineService(
        model(spec, default_prompt=default_prompt),
        FakeBackend(spec, **backend),
        EngineConfig(**{"tokenization_workers": 2, **(config or {})}),
        budget_tokens=budget_tokens,
        registry=registry,
    )
