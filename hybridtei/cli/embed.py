"""`embed`: embed a file of texts into a file of vectors."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import orjson
from tqdm.auto import tqdm

from hybridtei.batch import Head, offsets_of
from hybridtei.cli.flags import Commands, add_flags, new_parser, read_engine, read_settings
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.encoder import CHUNK, Encoder, heads_named
from hybridtei.errors import EmptyInput, InvalidInput
from hybridtei.outputs import Embeddings
from hybridtei.system.machine import require_extra


def add(commands: Commands) -> None:
    """Add the command `embed` and its flags."""
    parser = new_parser(commands, "embed", "embed a file of texts")
    parser.usage = "%(prog)s FILE --output FILE [flags]"
    parser.add_argument("file", metavar="FILE", help="texts: .txt with one a line, or .jsonl with one object or string a line")
    parser.add_argument("--output", "-o", required=True, metavar="FILE", help="file to write: .jsonl, .npz or .parquet")
    parser.add_argument("--outputs", help="comma-separated: dense,sparse,multivector [default: all of the model]")
    parser.add_argument("--field", default="text", help="key of the text in .jsonl objects [default: text]")
    add_flags(parser, (ModelConfig, EngineConfig))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command; the number of texts goes to standard error."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    writer_for(arguments.output)  # before a model is loaded
    encoder = Encoder.load(config=model, engine=engine)
    outputs = arguments.outputs.split(",") if arguments.outputs else None
    count = embed_file(encoder, arguments.file, arguments.output, outputs, field=arguments.field)
    print(f"{count} texts -> {arguments.output}", file=sys.stderr)


class Writer(Protocol):
    """Writes chunks into an open file in order; `close` writes what comes last."""

    def write(self, texts: Sequence[str], embeddings: Embeddings) -> None: ...

    def close(self) -> None: ...


def embed_file(encoder: Encoder, source: str, target: str, outputs: Sequence[str] | None = None, *, field: str = "text") -> int:
    """Embed every text of `source` into `target`; return their number. Raises InvalidInput, naming file and line."""
    kind = writer_for(target)
    texts = list(read_texts(Path(source), field))
    if not texts:
        raise EmptyInput(f"{source}: holds no text")
    heads = _heads(encoder, outputs)
    with replacing(Path(target)) as file, tqdm(total=len(texts), unit="text") as bar:
        writer = kind(file)
        for start in range(0, len(texts), CHUNK):
            chunk = texts[start : start + CHUNK]
            writer.write(chunk, encoder.encode(chunk, outputs=heads))
            bar.update(len(chunk))
        writer.close()
    return len(texts)


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file to write, which becomes `target` at the end, unless there is an error.

    Until then it has no name, where the system has such files, so that nothing of it stays when the process is killed.
    """
    part, is_named = Path(f"{target}.part"), False
    try:
        file: BinaryIO = os.fdopen(os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o666), "wb")
    except (AttributeError, OSError):  # not on Linux, or a file system without them
        file, is_named = part.open("wb"), True
    try:
        with file:
            yield file
            file.flush()
            if not is_named:
                part.unlink(missing_ok=True)
                os.link(f"/proc/self/fd/{file.fileno()}", part, src_dir_fd=file.fileno())  # so that the link is followed
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _heads(encoder: Encoder, outputs: Sequence[str] | None) -> frozenset[Head]:
    heads = heads_named(name.strip() for name in outputs) if outputs else encoder.spec.heads - {Head.TOKENS}
    if Head.TOKENS in heads:
        raise InvalidInput("`outputs`: token states are not written to files")
    return heads


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the texts of a .txt (one a line) or .jsonl file (strings, or objects with `field`), but for empty ones.

    Raises InvalidInput, naming the line.
    """
    if path.suffix not in (".txt", ".jsonl"):
        raise InvalidInput(f"{path}: should end in .txt or .jsonl")
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise InvalidInput(f"{where}: not UTF-8: {error}") from error
            text = line if path.suffix == ".txt" else _json_text(line, field, where)
            if text:
                yield text


def _json_text(line: str, field: str, where: str) -> str:
    if not line.strip():
        return ""
    try:
        value = orjson.loads(line)  # refuses lone surrogates, which no tokenizer takes
    except ValueError as error:
        raise InvalidInput(f"{where}: not JSON: {error}") from error
    text = value.get(field) if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise InvalidInput(f"{where}: `{field}` should be a string")
    return text


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


class JsonLines:
    """Writes JSON lines, an object for each text."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, texts: Sequence[str], embeddings: Embeddings) -> None:
        for row in _rows(texts, embeddings):
            self._file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        """Nothing: every line was written."""


class Npz:
    """Writes NumPy arrays, at the end: their sizes must be known.

    `texts` holds the UTF-8 of all and `texts_offsets` where each begins: NumPy's own strings are as wide as the longest.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._texts: list[str] = []
        self._parts: list[Embeddings] = []

    def write(self, texts: Sequence[str], embeddings: Embeddings) -> None:
        self._texts += texts
        self._parts.append(embeddings)

    def close(self) -> None:
        whole = Embeddings.concat(self._parts)
        written = [text.encode() for text in self._texts]
        texts = np.frombuffer(b"".join(written), np.uint8)
        arrays: dict[str, Any] = {"texts": texts, "texts_offsets": offsets_of([len(text) for text in written])}
        if whole.dense is not None:
            arrays["dense"] = whole.dense
        if whole.sparse is not None:
            names = {"sparse_indices": "indices", "sparse_values": "values", "sparse_indptr": "indptr"}
            arrays |= {name: getattr(whole.sparse, column) for name, column in names.items()}
        if whole.multivector is not None:
            arrays |= {"multivector": whole.multivector.values, "multivector_offsets": whole.multivector.offsets}
        np.savez(self._file, **arrays)


class Parquet:
    """Writes Parquet, a row group for each chunk."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow
        import pyarrow.parquet

        self._pyarrow = pyarrow
        self._file = file
        self._rows: Any = None

    def write(self, texts: Sequence[str], embeddings: Embeddings) -> None:
        rows = [
            {name: list(value) if name == "multivector" else value for name, value in row.items()}
            for row in _rows(texts, embeddings)
        ]
        table = self._pyarrow.Table.from_pylist(rows)
        if self._rows is None:
            self._rows = self._pyarrow.parquet.ParquetWriter(self._file, table.schema)
        self._rows.write_table(table)

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()


WRITERS: Mapping[str, Callable[[BinaryIO], Writer]] = {".jsonl": JsonLines, ".npz": Npz, ".parquet": Parquet}


def writer_for(target: str) -> Callable[[BinaryIO], Writer]:
    """What writes a file of this ending. Raises InvalidInput for another ending or a missing folder, LoadError without the
    extra."""
    path = Path(target)
    kind = WRITERS.get(path.suffix)
    if kind is None:
        raise InvalidInput(f"{target}: should end in {', '.join(WRITERS)}")
    if not path.resolve().parent.is_dir():
        raise InvalidInput(f"{target}: there is no folder {path.resolve().parent}: make it first")
    if kind is Parquet:
        require_extra("parquet", "pyarrow")
    return kind
