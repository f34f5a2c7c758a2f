"""`embed`: embed a file of texts into a file of vectors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, Unpack

import numpy as np
import orjson
from tqdm.auto import tqdm

from hybridtei.batch import Head, offsets_of
from hybridtei.cli.flags import (
    Commands,
    add_flags,
    add_options,
    new_parser,
    options_from,
    read_engine,
    read_settings,
)
from hybridtei.config import EngineConfig, ModelConfig
from hybridtei.encoder import CHUNK, Encoder
from hybridtei.errors import EmptyInput, InvalidInput
from hybridtei.inference.tasks.embed import heads_named
from hybridtei.options import EmbedKeywords, EmbedOptions
from hybridtei.outputs import Embeddings
from hybridtei.system.machine import require_extra, written_whole

# Settings of the model, or options of a request alone
NO_FLAGS = ("truncate", "max_tokens", "multivector", "query_encoder", "uses_default_prompt")


def add(commands: Commands) -> None:
    parser = new_parser(commands, "embed", run, "FILE --output FILE [flags]")
    parser.add_argument(
        "file",
        metavar="FILE",
        help="texts: .txt with one a line, or .jsonl with one object or string a line",
    )
    parser.add_argument(
        "--output",
        "-o",
        required=True,
        metavar="FILE",
        help="file to write: .jsonl, .npz or .parquet",
    )
    parser.add_argument(
        "--outputs", help="comma-separated: dense,sparse,multivector [default: all of the model]"
    )
    parser.add_argument(
        "--field", default="text", help="key of the text in .jsonl objects [default: text]"
    )
    add_options(parser, EmbedOptions, without=NO_FLAGS)
    add_flags(parser, (ModelConfig, EngineConfig))


def run(arguments: argparse.Namespace) -> None:
    """Embed a file of texts."""
    model, engine = read_settings(arguments, ModelConfig), read_engine(arguments)
    # Raises an error of the output's name before a model is loaded
    writer_for(arguments.output)
    encoder = Encoder.load(config=model, engine=engine)
    outputs = (arguments.outputs or "").split(",")
    options = options_from(EmbedOptions, arguments)
    count = embed_file(
        encoder,
        arguments.file,
        arguments.output,
        outputs,
        field=arguments.field,
        options=options,
    )
    print(f"{count} texts -> {arguments.output}", file=sys.stderr)


Chunks = Iterator[tuple[Sequence[str], Embeddings]]


def embed_file(
    encoder: Encoder,
    source: str,
    target: str,
    outputs: Sequence[str] = (),
    *,
    field: str = "text",
    options: EmbedOptions | None = None,
) -> int:
    """Embed every text of `source` into `target`. Return their number. Raises InvalidInput, naming
    file and line."""
    write = writer_for(target)
    texts = list(read_texts(Path(source), field))
    if not texts:
        raise EmptyInput(f"{source}: holds no text")
    heads = encoder.spec.heads - {Head.TOKENS}
    if any(outputs):
        heads = heads_named(name.strip() for name in outputs)
    if Head.TOKENS in heads:
        raise InvalidInput("`outputs`: token states are not written to files")
    with written_whole(Path(target)) as file, tqdm(total=len(texts), unit="text") as bar:
        keywords = {} if options is None else options.as_fields()
        write(file, _embedded(encoder, texts, heads, bar, **keywords))
    return len(texts)


def _embedded(
    encoder: Encoder,
    texts: Sequence[str],
    heads: frozenset[Head],
    bar: Any,
    **options: Unpack[EmbedKeywords],
) -> Chunks:
    for start in range(0, len(texts), CHUNK):
        chunk = texts[start : start + CHUNK]
        yield chunk, encoder.encode(chunk, outputs=heads, **options)
        bar.update(len(chunk))


def read_texts(path: Path, field: str = "text") -> Iterator[str]:
    """Yield the non-empty texts of a .txt file (one a line) or a .jsonl file (strings, or objects
    with `field`).

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
            if path.suffix == ".jsonl":
                line = _json_text(line, field, where)
            if line:
                yield line


def _json_text(line: str, field: str, where: str) -> str:
    if not line.strip():
        return ""
    try:
        # Refuses lone surrogates, which no tokenizer accepts
        value = orjson.loads(line)
    except ValueError as error:
        raise InvalidInput(f"{where}: not JSON: {error}") from error
    if isinstance(value, dict):
        value = value.get(field)
    if not isinstance(value, str):
        raise InvalidInput(f"{where}: `{field}` should be a string")
    return value


def _rows(texts: Sequence[str], embeddings: Embeddings) -> Iterator[dict[str, Any]]:
    for i, text in enumerate(texts):
        row = {"text": text, **embeddings.row(i)}
        if embeddings.multivector is not None:
            row["multivector"] = np.ascontiguousarray(row["multivector"])
        yield row


def write_jsonl(file: BinaryIO, chunks: Chunks) -> None:
    for texts, embeddings in chunks:
        for row in _rows(texts, embeddings):
            file.write(
                orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
            )


def write_npz(file: BinaryIO, chunks: Chunks) -> None:
    """Write NumPy arrays at the end, when their sizes are known.

    `texts` has the UTF-8 of all texts and `texts_offsets` their starts, since NumPy's strings are
    all as wide as the longest.
    """
    written: list[bytes] = []
    parts: list[Embeddings] = []
    for texts, embeddings in chunks:
        written += [text.encode() for text in texts]
        parts.append(embeddings)
    joined = Embeddings.concat(parts)
    arrays: dict[str, Any] = {
        "texts": np.frombuffer(b"".join(written), np.uint8),
        "texts_offsets": offsets_of([len(text) for text in written]),
    }
    if joined.dense is not None:
        arrays["dense"] = joined.dense
    if joined.sparse is not None:
        names = {"sparse_indices": "indices", "sparse_values": "values", "sparse_indptr": "indptr"}
        arrays |= {name: getattr(joined.sparse, column) for name, column in names.items()}
    if joined.multivector is not None:
        arrays |= {
            "multivector": joined.multivector.values,
            "multivector_offsets": joined.multivector.offsets,
        }
    np.savez(file, **arrays)


def write_parquet(file: BinaryIO, chunks: Chunks) -> None:
    """Write Parquet, a row group for each chunk."""
    import pyarrow
    import pyarrow.parquet

    with ExitStack() as stack:
        writer: Any = None
        for texts, embeddings in chunks:
            rows = list(_rows(texts, embeddings))
            for row in rows:
                if "multivector" in row:
                    # Parquet has no arrays of two dimensions
                    row["multivector"] = list(row["multivector"])
            table = pyarrow.Table.from_pylist(rows)
            writer = writer or stack.enter_context(
                pyarrow.parquet.ParquetWriter(file, table.schema)
            )
            writer.write_table(table)


Write = Callable[[BinaryIO, Chunks], None]
WRITERS = {".jsonl": write_jsonl, ".npz": write_npz, ".parquet": write_parquet}


def writer_for(target: str) -> Write:
    """Return the writer for a file's ending. Raises InvalidInput for an unknown ending or a missing
    folder, LoadError without the extra."""
    path = Path(target)
    write = WRITERS.get(path.suffix)
    if write is None:
        raise InvalidInput(f"{target}: should end in {', '.join(WRITERS)}")
    if not path.resolve().parent.is_dir():
        raise InvalidInput(f"{target}: there is no folder {path.resolve().parent}: make it first")
    if write is write_parquet:
        require_extra("parquet", "pyarrow")
    return write
