"""What a route asks of a model, so that among several the right one answers: predicates, the most fitting first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridtei.batch import Head
from hybridtei.config import NamedModel, Role
from hybridtei.server.context import Context

Able = Callable[[Context], bool]


def _for(role: Role, can: Able) -> Able:
    """A model that was given one role does nothing else unasked."""

    def able(context: Context) -> bool:
        given = context.model.role if isinstance(context.model, NamedModel) else None
        return given in (None, role) and can(context)

    return able


def _gives(*heads: Head) -> Able:
    return _for("embed", lambda context: _kind(context) == "embedding" and context.heads >= frozenset(heads))


def _is(role: Role, kind: str) -> Able:
    return _for(role, lambda context: _kind(context) == kind)


def _kind(context: Context) -> str:
    return context.service.model.spec.kind


def first_able(contexts: Sequence[Context], job: Sequence[Able]) -> Context:
    """The first that fits best; where none can do it, the first of all, which says why."""
    for able in job:
        for context in contexts:
            if able(context):
                return context
    return contexts[0]


EMBED = (_gives(Head.DENSE), _gives())
EMBED_SPARSE = (_gives(Head.SPARSE), _gives())
EMBED_MULTIVECTOR = (_gives(Head.MULTIVECTOR), _gives())
EMBED_HYBRID = (_gives(Head.DENSE, Head.SPARSE, Head.MULTIVECTOR), _gives(Head.DENSE, Head.SPARSE), _gives())
RANK = (
    _is("rerank", "reranker"),
    _for("rerank", lambda context: Head.MULTIVECTOR in context.heads),
    _for("rerank", lambda context: _kind(context) == "embedding"),
)
CLASSIFY = (_is("classify", "classifier"), _is("classify", "reranker"))
TAG = (_is("tag", "tagger"),)
ANY: tuple[Able, ...] = ()
