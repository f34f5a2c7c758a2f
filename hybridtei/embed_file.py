"""A file of texts -> a file of vectors: txt or jsonl in; jsonl, npz or parquet out.

jsonl      one object a text, written as the work goes on
npz        `dense` [n, d]; `sparse_indices`, `sparse_values`, `sparse_indptr` (CSR); `multivector` [t, d], `multivector_offsets`
parquet    a row a text; needs pyarrow
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from hybridtei.batch import Head
from hybridtei.encoder import CHUNK, Encoder
from hybridtei.errors import EmptyInput, InvalidInput, LoadError
from hybridtei.outputs import Embeddings

Write = Callable[[Sequence[str], Embeddings], None]


def embed_file(encoder: Encoder, source: str, target: str, outputs: Sequence[str] | None = None, *, field: str = "text") -> int:
    """Embed every text of `source` into `target`; how many there were. Raises InvalidInput, naming file and line."""
    texts = list(read_texts(Path(source), field))
    heads = list(outputs) if outputs else sorted(encoder.spec.heads - {Head.TOKENS})
    write = _writer(Path(target))
    if not texts:
        raise EmptyInput(f"{source}: holds no text")
    parts = []
    with tqdm(total=len(texts), unit="text") as bar:
        for start in range(0, len(texts), CHUNK):
            parts.append(encoder.encode(texts[start : start + CHUNK], outputs=heads))
            bar.update(len(parts[-1]))
    write(texts, Embeddings.concat(parts))
    return len(texts)


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """Texts of a .txt (one a line) or .jsonl file (strings, or objects with `field`). Raises InvalidInput."""
    if path.suffix not in (".txt", ".jsonl"):
        raise InvalidInput(f"{path}: should end in .txt or .jsonl")
    with path.open(encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, 1):
                text = line.rstrip("\r\n") if path.suffix == ".txt" else _json_text(line, field, f"{path}:{number}")
                if text:
                    yield text
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{path}: not UTF-8: {error}") from error


def _json_text(line: str, field: str, where: str) -> str:
    if not line.strip():
        return ""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"{where}: not JSON: {error}") from error
    text = value.get(field) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidInput(f"{where}: `{field}` should be a string")
    return text


def _writer(target: Path) -> Write:
    writers: dict[str, Callable[[Path, Sequence[str], Embeddings], None]] = {
        ".jsonl": _jsonl,
        ".npz": _npz,
        ".parquet": _parquet,
    }
    if target.suffix not in writers:
        raise InvalidInput(f"{target}: should end in {', '.join(writers)}")
    if target.suffix == ".parquet":
        _pyarrow()
    return lambda texts, embeddings: writers[target.suffix](target, texts, embeddings)


def _rows(texts: Sequence[str], embeddings: Embeddings) -> Iterator[dict[str, Any]]:
    for i, text in enumerate(texts):
        row: dict[str, Any] = {"text": text}
        if embeddings.dense is not None:
            row["dense"] = embeddings.dense[i]
        if embeddings.sparse is not None:
            indices, values = embeddings.sparse.row(i)
            row["sparse"] = {"indices": indices, "values": values}
        if embeddings.multivector is not None:
            row["multivector"] = np.ascontiguousarray(embeddings.multivector.row(i))
        yield row


def _jsonl(target: Path, texts: Sequence[str], embeddings: Embeddings) -> None:
    import orjson

    with target.open("wb") as file:
        for row in _rows(texts, embeddings):
            file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))


def _npz(target: Path, texts: Sequence[str], embeddings: Embeddings) -> None:
    arrays: dict[str, Any] = {"texts": np.array(texts)}
    if embeddings.dense is not None:
        arrays["dense"] = embeddings.dense
    if embeddings.sparse is not None:
        sparse = embeddings.sparse
        arrays |= {"sparse_indices": sparse.indices, "sparse_values": sparse.values, "sparse_indptr": sparse.indptr}
    if embeddings.multivector is not None:
        arrays |= {"multivector": embeddings.multivector.values, "multivector_offsets": embeddings.multivector.offsets}
    np.savez(target, **arrays)


def _parquet(target: Path, texts: Sequence[str], embeddings: Embeddings) -> None:
    pyarrow, parquet = _pyarrow()
    table = pyarrow.Table.from_pylist(
        [
            {name: list(value) if name == "multivector" else value for name, value in row.items()}
            for row in _rows(texts, embeddings)
        ]
    )
    parquet.write_table(table, target)


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise LoadError("parquet needs pyarrow: pip install 'hybridtei[parquet]'") from error
    return pyarrow, parquet
