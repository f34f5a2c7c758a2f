"""Makes the collection `mine` in a folder of qdrant-client, as the packages of others make theirs.

    python collections_of_others.py PACKAGE FOLDER GIVEN.json

GIVEN: `texts`, `dense` and `sparse` vectors of each, or the `model` that the package runs itself.
It runs in the package's own environment, so it imports nothing of ours.
"""

import json
import sys

from qdrant_client import QdrantClient, models


def langchain(folder, given):
    """Dense vectors without a name, sparse ones with LangChain's."""
    from langchain_qdrant import QdrantVectorStore, RetrievalMode
    from langchain_qdrant.sparse_embeddings import SparseVector

    class Vectors:
        def embed_documents(self, texts):
            # It asks for the width by a text of its own
            rows = dict(zip(given["texts"], given["dense"], strict=True))
            return [rows.get(text, given["dense"][0]) for text in texts]

    class SparseVectors:
        def embed_documents(self, texts):
            rows = [given["sparse"][given["texts"].index(text)] for text in texts]
            return [SparseVector(indices=indices, values=values) for indices, values in rows]

    store = QdrantVectorStore.from_texts(
        given["texts"],
        Vectors(),
        [{"place": place} for place in range(len(given["texts"]))],
        sparse_embedding=SparseVectors(),
        retrieval_mode=RetrievalMode.HYBRID,
        collection_name="mine",
        path=folder,
        validate_embeddings=False,
        validate_collection_config=False,
    )
    store.client.close()


def llama_index(folder, given, **settings):
    """Nodes as JSON; vectors without a name, or with LlamaIndex's."""
    from llama_index.core.schema import TextNode
    from llama_index.vector_stores.qdrant import QdrantVectorStore

    client = QdrantClient(path=folder)
    store = QdrantVectorStore("mine", client=client, **settings)
    rows = zip(given["texts"], given["dense"], strict=True)
    store.add(
        [
            TextNode(text=text, embedding=vector, metadata={"place": place})
            for place, (text, vector) in enumerate(rows)
        ]
    )
    client.close()


def last_line(text):
    """The text without the metadata that LlamaIndex puts above it."""
    return text.splitlines()[-1]


def llama_index_hybrid(folder, given):
    def sparse(texts):
        rows = [given["sparse"][given["texts"].index(text)] for text in map(last_line, texts)]
        return [indices for indices, _ in rows], [values for _, values in rows]

    llama_index(folder, given, enable_hybrid=True, sparse_doc_fn=sparse, sparse_query_fn=sparse)


def fastembed(folder, given):
    """Vectors that fastembed makes, under its name, beside sparse vectors of BM25's kind."""
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="tiny",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf="tiny"),
        dim=given["width"],
        model_file="onnx/model.onnx",
    )
    client = QdrantClient(path=folder)
    size = models.VectorParams(size=given["width"], distance=models.Distance.COSINE)
    hashed = {"fast-sparse-bm25": models.SparseVectorParams(modifier=models.Modifier.IDF)}
    client.create_collection("mine", {"fast-tiny": size}, hashed)
    options = {"specific_model_path": given["model"]}
    client.upload_collection(
        "mine",
        vectors=[
            {
                "fast-tiny": models.Document(text=text, model="tiny", options=options),
                "fast-sparse-bm25": models.SparseVector(indices=[2**31 + place], values=[1.0]),
            }
            for place, text in enumerate(given["texts"])
        ],
        payload=[{"document": text} for text in given["texts"]],
        ids=list(range(len(given["texts"]))),
    )
    client.close()


MAKERS = {
    maker.__name__: maker for maker in (langchain, llama_index, llama_index_hybrid, fastembed)
}
if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        MAKERS[sys.argv[1]](sys.argv[2], json.load(file))
