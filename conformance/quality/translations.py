"""Pairs of Debian's package descriptions, for `hybridtei train --pairs`: a JSON line for each title
and its long description.

    python -m conformance.quality.translations Translation-en [...] > pairs.jsonl

See data.md for how to fetch the files.
"""

import argparse
import gzip
import io
import json
import lzma
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

from hybridtei.models.heads.run import Pair

APT_HELPER = "/usr/lib/apt/apt-helper"
FIELD = "Description-en:"


def read_translations(path: Path) -> Iterator[Pair]:
    """Yield the pairs of a `Translation-en` file: plain, .gz, .xz, or .lz4 (with apt's helper or
    the lz4 program).

    Raises RuntimeError where an .lz4 file cannot be read for want of either program, or is damaged.
    """
    return parse_translations(_lines(path))


def parse_translations(lines: Iterable[str]) -> Iterator[Pair]:
    """Yield (short description, long description) for every paragraph which has both.

    Wrapped lines are joined into paragraphs; an empty line stays between paragraphs.
    """
    title = ""
    body: list[str] = []
    for line in lines:
        if line.startswith(FIELD):
            title, body = line[len(FIELD) :].strip(), []
        elif title and line.startswith((" ", "\t")):
            body.append("" if line.strip() == "." else line.strip())
        elif title:
            yield from _pair(title, body)
            title = ""
    if title:
        yield from _pair(title, body)


def _pair(title: str, body: list[str]) -> Iterator[Pair]:
    paragraphs = "\n".join(body).split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs).strip()
    if text:
        yield Pair(title, text)


def _lines(path: Path) -> Iterator[str]:
    if path.suffix == ".lz4":
        yield from _unpack_lz4(path).splitlines()
        return
    with _open_packed(path) as packed:
        yield from io.TextIOWrapper(packed, encoding="utf-8", errors="replace")


def _open_packed(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    return cast(BinaryIO, lzma.open(path)) if path.suffix == ".xz" else path.open("rb")


def _unpack_lz4(path: Path) -> str:
    if Path(APT_HELPER).exists():
        command = [APT_HELPER, "cat-file", str(path)]
    elif lz4 := shutil.which("lz4"):
        command = [lz4, "--decompress", "--stdout", str(path)]
    else:
        raise RuntimeError(f"{path}: reading .lz4 needs apt or the lz4 program")
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{path}: {command[0]} failed: {done.stderr.decode(errors='replace').strip()}"
        )
    return done.stdout.decode("utf-8", errors="replace")


def main() -> None:
    """Print the pairs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    for file in parser.parse_args().files:
        for pair in read_translations(file):
            print(json.dumps(pair._asdict()))


if __name__ == "__main__":
    main()
