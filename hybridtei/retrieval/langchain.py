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
from typing import TYPE_CHECKING, Any

from hybridtei.client import Client
from hybridtei.errors import LoadError

if TYPE_CHECKING:
    from hybridtei.encoder import Encoder
    from hybridtei.inference.tasks.embed import InputType


class HybridSparseEmbeddings:
    """The methods of `langchain_qdrant.SparseEmbeddings`. `source`: an `Encoder`, or a server by a `Client` or its URL.

    Queries and documents are read as the model's prompts ask for it; `query_prompt`, `document_prompt`: names of other prompts.
    """

    def __init__(
        self,
        source: Encoder | Client | str,
        *,
        api_key: str | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
    ) -> None:
        self._is_owned = isinstance(source, str)
        self._source = Client(source, api_key=api_key, timeout_s=300.0) if isinstance(source, str) else source
        self._prompts: dict[InputType, str | None] = {"query": query_prompt, "document": document_prompt}

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
        """Closes the connections to a URL; an encoder or a client is closed by its owner."""
        if self._is_owned:
            self._source.close()

    def _embed(self, texts: list[str], side: InputType) -> list[Any]:
        vector = _vector_class()
        sparse = self._source.encode(texts, ("sparse",), input_type=side, prompt_name=self._prompts[side]).sparse
        assert sparse is not None
        rows = [sparse.row(i) for i in range(len(texts))]
        return [vector(indices=indices.tolist(), values=values.tolist()) for indices, values in rows]


def _vector_class() -> Any:
    try:
        from langchain_qdrant.sparse_embeddings import SparseVector
    except ImportError as error:
        raise LoadError(f"LangChain's Qdrant store is missing: pip install langchain-qdrant ({error})") from None
    return SparseVector
