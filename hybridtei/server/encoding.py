"""Arrays -> JSON. Here goes the server's CPU time: float32 in shortest form straight from numpy, never number by number."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable

import numpy as np
import orjson
from numpy.typing import NDArray

from hybridtei.outputs import Embeddings, Floats, SparseVectors
from hybridtei.ragged import Ragged

Pieces = Callable[[NDArray[np.int64]], list[str]]


def array(values: NDArray[np.generic]) -> bytes:
    """Any numeric array; NaN and infinities become null, as TEI's do."""
    return orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY)


def joined(items: Iterable[bytes]) -> bytes:
    """JSON values -> a JSON list."""
    return b"[" + b",".join(items) + b"]"


def ragged(rows: Ragged) -> bytes:
    """n × [t_i, d] -> a list of lists of vectors."""
    return joined(array(row) for row in rows)


def dense_or_base64(row: Floats, encoding_format: str) -> bytes:
    """A vector as numbers, or as a string of base64 over little-endian float32."""
    if encoding_format == "base64":
        return b'"' + base64.b64encode(row.astype("<f4").tobytes()) + b'"'
    return array(row)


def sparse_tei(vectors: SparseVectors, i: int) -> bytes:
    """`[{"index":…,"value":…}, …]`, ascending."""
    indices, values = vectors.row(i)
    if not len(indices):
        return b"[]"
    pairs = zip(array(indices)[1:-1].split(b","), array(values)[1:-1].split(b","), strict=True)
    return b"[" + b",".join([b'{"index":%b,"value":%b}' % pair for pair in pairs]) + b"]"


def sparse_qdrant(vectors: SparseVectors, i: int) -> bytes:
    """`{"indices":[…],"values":[…]}`."""
    indices, values = vectors.row(i)
    return b'{"indices":%b,"values":%b}' % (array(indices), array(values))


def sparse_tokens(vectors: SparseVectors, i: int, pieces: Pieces) -> bytes:
    """`{"vocabulary piece": weight, …}`, heaviest first."""
    indices, values = vectors.row(i)
    order = np.argsort(-values, kind="stable")
    names = pieces(indices[order])
    return orjson.dumps(dict(zip(names, values[order], strict=True)), option=orjson.OPT_SERIALIZE_NUMPY)


def sparse(vectors: SparseVectors, i: int, form: str, pieces: Pieces) -> bytes:
    """Row i in the wanted form."""
    if form == "tokens":
        return sparse_tokens(vectors, i, pieces)
    return sparse_tei(vectors, i) if form == "tei" else sparse_qdrant(vectors, i)


def hybrid(embeddings: Embeddings, form: str, pieces: Pieces) -> bytes:
    """One object an input, with a key for each output."""
    return joined(_object(_columns(embeddings, i, form, pieces)) for i in range(len(embeddings)))


def _columns(embeddings: Embeddings, i: int, form: str, pieces: Pieces) -> Iterable[tuple[str, bytes]]:
    if embeddings.dense is not None:
        yield "dense", array(embeddings.dense[i])
    if embeddings.sparse is not None:
        yield "sparse", sparse(embeddings.sparse, i, form, pieces)
    if embeddings.multivector is not None:
        yield "multivector", array(embeddings.multivector.row(i))


def _object(columns: Iterable[tuple[str, bytes]]) -> bytes:
    return b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in columns) + b"}"


def openai(embeddings: Embeddings, *, encoding_format: str, form: str, pieces: Pieces, model: str, tokens: int) -> bytes:
    """OpenAI's list object; `sparse_embedding` and `multivector` stand beside `embedding` if they were asked for."""
    data = joined(_openai_item(embeddings, i, encoding_format, form, pieces) for i in range(len(embeddings)))
    usage = b'{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    return b'{"object":"list","data":%b,"model":%b,"usage":%b}' % (data, orjson.dumps(model), usage)


def _openai_item(embeddings: Embeddings, i: int, encoding_format: str, form: str, pieces: Pieces) -> bytes:
    item = [("object", b'"embedding"')]
    if embeddings.dense is not None:
        item.append(("embedding", dense_or_base64(embeddings.dense[i], encoding_format)))
    if embeddings.sparse is not None:
        item.append(("sparse_embedding", sparse(embeddings.sparse, i, form, pieces)))
    if embeddings.multivector is not None:
        item.append(("multivector", array(embeddings.multivector.row(i))))
    return _object([*item, ("index", b"%d" % i)])
