"""Sparse vectors for LangChain's Qdrant store, from an encoder in this process or from a running
server.

    QdrantVectorStore.from_texts(…, sparse_embedding=HybridSparseEmbeddings(encoder),
    sparse_vector_params={"modifier": …})

Lexical weights need `modifier: idf` on the collection's sparse field (nDCG@10 of the embedded model
on cranfield: 0.518, without it 0.495); weights of SPLADE and BGE-M3 include the importance of a
term and get worse by it. `hybridtei.schema_for` tells a checkpoint's: `schema_for(encoder.spec,
"minilm-hybrid").sparse["sparse"].modifier`. `create_arguments` of the whole schema makes a
collection that LangChain, `ingest` and `/points` share. LangChain's store does not check the
object's class, so nothing of LangChain is imported before the first vector.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybridtei.client import Client
from hybridtei.errors import LoadError

if TYPE_CHECKING:
    from langchain_qdrant import SparseEmbeddings

    from hybridtei.encoder import Encoder
    from hybridtei.options import InputType
else:
    SparseEmbeddings = object


class HybridSparseEmbeddings(SparseEmbeddings):
    """The methods of `langchain_qdrant.SparseEmbeddings`. `source`: an `Encoder`, a `Client`, or a
    server's URL.

    Queries and documents get the model's prompts. `query_prompt`, `document_prompt`: the names of
    other prompts.
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
        if isinstance(source, str):
            source = Client(source, api_key=api_key, timeout_s=300.0)
        self._source = source
        self._prompts: dict[InputType, str | None] = {
            "query": query_prompt,
            "document": document_prompt,
        }

    def embed_documents(self, texts: Sequence[str]) -> list[Any]:
        """Return a `langchain_qdrant.SparseVector` for each text. Raises HybridTeiError."""
        return self._embed(list(texts), "document")

    def embed_query(self, text: str) -> Any:
        """Return a `langchain_qdrant.SparseVector`. Raises HybridTeiError."""
        return self._embed([text], "query")[0]

    async def aembed_documents(self, texts: Sequence[str]) -> list[Any]:
        """Call `embed_documents` in a thread."""
        return await asyncio.to_thread(self.embed_documents, texts)

    async def aembed_query(self, text: str) -> Any:
        """Call `embed_query` in a thread."""
        return await asyncio.to_thread(self.embed_query, text)

    def close(self) -> None:
        """Close the connections to a URL. The caller closes an encoder or a client."""
        if self._is_owned:
            self._source.close()

    def _embed(self, texts: list[str], side: InputType) -> list[Any]:
        try:
            from langchain_qdrant.sparse_embeddings import SparseVector
        except ImportError as error:
            raise LoadError(
                f"LangChain's Qdrant store is missing: pip install langchain-qdrant ({error})"
            ) from None
        sparse = self._source.encode(
            texts, ("sparse",), input_type=side, prompt_name=self._prompts[side]
        ).sparse
        assert sparse is not None
        rows = map(sparse.row, range(len(texts)))
        return [
            SparseVector(indices=indices.tolist(), values=values.tolist())
            for indices, values in rows
        ]
