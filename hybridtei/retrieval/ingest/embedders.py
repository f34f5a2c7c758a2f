"""Which outputs an ingest stores, a batch of which one text may fail, and a running server as an `Embedder`.

A text that an embedder refuses must not take others with it: `embed_each` halves a failing batch until it stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from hybridtei.batch import Head
from hybridtei.client import Client
from hybridtei.errors import BackendError, EmptyInput, HybridTeiError, InvalidInput, RequestError, TokenizerError
from hybridtei.outputs import Embeddings

T = TypeVar("T")
VECTORS = (Head.DENSE, Head.SPARSE, Head.MULTIVECTOR)


def vector_heads(available: frozenset[Head], names: Sequence[str] | None) -> frozenset[Head]:
    """The outputs to store: those of `names`, or all of the model's. Raises InvalidInput for one that the model lacks."""
    has = available & frozenset(VECTORS)
    if names is None:
        return has
    known = {head.value: head for head in VECTORS}
    for name in names:
        if known.get(name) not in has:
            raise InvalidInput(f"--outputs names {name!r}; the model has {', '.join(sorted(has))}")
    return frozenset(known[name] for name in names)


def embed_each(embed: Callable[[Sequence[T]], Embeddings], texts: Sequence[T]) -> tuple[Embeddings, list[str | None]]:
    """(rows of the texts, or texts with spans, that could be embedded, for each the error's message or None).

    Raises BackendError where none of several texts could be embedded: then the engine is at fault.
    """
    parts: list[Embeddings] = []
    errors: list[HybridTeiError | None] = []

    def halve(texts: Sequence[T]) -> None:
        try:
            parts.append(embed(texts))
            errors.extend([None] * len(texts))
        except (RequestError, BackendError) as error:
            if len(texts) == 1:
                errors.append(error)
                return
            middle = len(texts) // 2
            halve(texts[:middle])
            halve(texts[middle:])

    halve(texts)
    if len(texts) > 1 and isinstance(errors[0], BackendError) and None not in errors:
        raise errors[0]
    return Embeddings.concat(parts), [None if error is None else str(error) for error in errors]


class RemoteEmbedder:
    """A running hybridtei as an `Embedder`.

    A text is at fault only where the server's own error says so: InvalidInput, EmptyInput or TokenizerError for a refused text,
    BackendError for one whose pass failed or whose vectors are broken. Any other response is about the server, or a proxy's,
    and raises ConnectionError with its text, as does the end of patience. The constructor raises InvalidInput for another
    server.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        info = self._client.info()
        if info["hybridtei"].get("role") != "embedding":
            raise InvalidInput(f"{client.url}: serves no embedding model")
        self.model_id = str(info["model_id"])
        self.outputs = frozenset(Head(name) for name in info["hybridtei"]["outputs"]) & frozenset(VECTORS)
        self.name = f"{client.url}, {info['model_dtype']}"

    def encode(self, texts: Sequence[str], outputs: Iterable[str], **settings: Any) -> Embeddings:
        """As `Client.encode`, whose prompt is the server's for that type of inputs, if it has one."""
        try:
            return self._client.encode(texts, outputs, **settings)
        except (EmptyInput, InvalidInput, TokenizerError):
            raise
        except RequestError as error:  # a key or a model that the server lacks
            raise ConnectionError(str(error)) from error

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()
