"""Sparse vectors for LangChain's Qdrant store, from an encoder in this process or from a running server.

    QdrantVectorStore(…, sparse_embedding=HybridSparseEmbeddings(encoder), retrieval_mode=RetrievalMode.HYBRID)

Lexical weights want `modifier: idf` on the collection's sparse field (nDCG@10 of the embedded model's on cranfield: 0.518 for
0.495); those of SPLADE and BGE-M3 hold the importance of a term already and lose by it. The checkpoint says which it makes, and
LangChain sets no modifier unless it is told:

    schema = schema_for(encoder.spec, "minilm-hybrid")                                   # hybridtei.schema_for
    params = {"modifier": schema.sparse["sparse"].modifier}                                # None for SPLADE
    QdrantVectorStore.from_texts(…, sparse_embedding=…, sparse_vector_params=params)

LangChain's store does not check the object's class, only calls its methods; so nothing of LangChain is imported until a
vector is asked for, and then only the record that holds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Literal

import httpx
import orjson

from hybridtei.encoder import Encoder
from hybridtei.errors import BackendError, LoadError

Side = Literal["query", "document"]
REQUEST_TEXTS = 16
TIMEOUT_S = 300.0


class HybridSparseEmbeddings:
    """The methods of `langchain_qdrant.SparseEmbeddings`. `source`: an `Encoder`, or a server's URL.

    A server is asked at `/embed_sparse`, in requests of `REQUEST_TEXTS` texts. `query_prompt`, `document_prompt`: names of the
    server's prompts; an encoder knows by itself what to put before a query.
    """

    def __init__(
        self,
        source: Encoder | str,
        *,
        api_key: str | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
    ) -> None:
        self._encoder = None if isinstance(source, str) else source
        self._prompts: dict[Side, str | None] = {"query": query_prompt, "document": document_prompt}
        self._client: httpx.Client | None = None
        if isinstance(source, str):
            headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
            self._client = httpx.Client(base_url=source.rstrip("/"), headers=headers, timeout=TIMEOUT_S)

    def embed_documents(self, texts: Sequence[str]) -> list[Any]:
        """A `langchain_qdrant.SparseVector` for each. Raises HybridTeiError."""
        return self._embed(list(texts), "document")

    def embed_query(self, text: str) -> Any:
        """A `langchain_qdrant.SparseVector`. Raises HybridTeiError."""
        return self._embed([text], "query")[0]

    async def aembed_documents(self, texts: Sequence[str]) -> list[Any]:
        """The same, in a thread."""
        return await asyncio.to_thread(self.embed_documents, texts)

    async def aembed_query(self, text: str) -> Any:
        """The same, in a thread."""
        return await asyncio.to_thread(self.embed_query, text)

    def close(self) -> None:
        """Closes connections; an encoder stays open, since its owner closes it."""
        if self._client is not None:
            self._client.close()

    def _embed(self, texts: list[str], side: Side) -> list[Any]:
        vector = _vector_class()
        return [vector(indices=indices, values=values) for indices, values in self._rows(texts, side)]

    def _rows(self, texts: list[str], side: Side) -> list[tuple[list[int], list[float]]]:
        if self._encoder is not None:
            sparse = self._encoder.encode(texts, ("sparse",), input_type=side).sparse
            assert sparse is not None
            rows = (sparse.row(i) for i in range(len(texts)))
            return [(indices.tolist(), values.tolist()) for indices, values in rows]
        return [
            row
            for begin in range(0, len(texts), REQUEST_TEXTS)
            for row in self._request(texts[begin : begin + REQUEST_TEXTS], side)
        ]

    def _request(self, texts: list[str], side: Side) -> list[tuple[list[int], list[float]]]:
        assert self._client is not None
        body: dict[str, Any] = {"inputs": texts, "truncate": True}
        if self._prompts[side] is not None:
            body["prompt_name"] = self._prompts[side]
        try:
            answer = self._client.post(
                "/embed_sparse", content=orjson.dumps(body), headers={"content-type": "application/json"}
            )
        except httpx.TransportError as error:
            raise BackendError(f"{self._client.base_url}: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise BackendError(f"{self._client.base_url}: status {answer.status_code}: {answer.text[:300]}")
        return [([entry["index"] for entry in row], [entry["value"] for entry in row]) for row in orjson.loads(answer.content)]


def _vector_class() -> Any:
    try:
        from langchain_qdrant.sparse_embeddings import SparseVector
    except ImportError as error:
        raise LoadError(f"LangChain's Qdrant store is missing: pip install langchain-qdrant ({error})") from None
    return SparseVector
