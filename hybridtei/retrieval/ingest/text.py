"""Bytes to text, and text to the form that is stored and embedded: once, for every document that
is ingested.

An encoding is a byte order mark's, else UTF-8, else the one that the file declares, read as
browsers read it (the Encoding Standard), else a guess from the bytes. Bytes that the encoding
lacks become U+FFFD. Queries of a search get the same form.
"""

from __future__ import annotations

import codecs
import io
import re
import tempfile
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO

from hybridtei.system.machine import require_extra

# The longer marks first: UTF-32's begins like UTF-16's.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Guesses in the order that decides between equals.
GUESSES = re.findall(
    r"\w+",
    "cp1252 iso8859_2 cp1250 cp1254 cp1257 cp1255 cp1253 cp1256 cp1251 cp874 koi8_r cp866 cp932 "
    "euc_jp iso2022_jp cp949 gb18030 "
    "big5hkscs mac_roman mac_cyrillic",
)
SAMPLE_BYTES = 65_536
# A binary file has more control characters than this, and than this share of its text.
MOST_CONTROLS, CONTROLS_SHARE = 8, 0.02
# Bytes of no text in the encodings of one byte a character.
STRAY = re.compile(rb"[\xfe\xff]")
# Dashes, quotes, signs: the same in most code pages of Windows.
SIGNS_ONLY = re.compile(
    rb"[\x00-\x80\x82-\x87\x8b\x91-\x97\x99\x9b\xa0\xa3\xa7\xa9\xab\xae\xb0\xb1\xb5\xb7\xbb-\xbf]*"
)
CONTROL_BYTES = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


class Unfit(ValueError):
    """A record is not a document. The message: the reason in the quarantine. `document_id`: the
    record's id, if it has one."""

    document_id: str | None = None


# Readers mark lines with these: a heading, whose level follows; the header of a table; its end. No
# text has them.
HEADING_MARK, TABLE_MARK, TABLE_END = "\ufdd0", "\ufdd1", "\ufdd2"
MARKS_OF_LINES = re.compile("\ufdd0[1-6]|[\ufdd0\ufdd1]|\n?\ufdd2")
FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def fence_after(line: str, fence: str) -> str:
    """Return the code fence (such as "```") that is open after `line`, or "". `fence`: the one open
    before the line, or ""."""
    mark = FENCE.match(line)
    if mark is None:
        return fence
    if not fence:
        return mark[1]
    # A closing fence: the same character, at least as long, and nothing else on its line
    closes = mark[1].startswith(fence) and not line.strip(" `~")
    return "" if closes else fence


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds. `pages`: its text, in parts that are normalised apart. `notes`: what a
    reader should be told of it. `is_wrapped`: a line end may cut a word."""

    title: str | None
    pages: Sequence[str]
    notes: Sequence[str] = ()
    is_paged: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_wrapped: bool = False


def decoded(data: bytes, label: str | None = None) -> tuple[str, list[str]]:
    """(the text, what a reader should be told of it). `label`: the encoding that the file
    declares. Raises Unfit for data that are no text."""
    encoding, mark, notes = encoding_of(data, label)
    text = MARKS_OF_LINES.sub("", data[mark:].decode(encoding, errors="replace"))
    return text, notes + notes_of(text)


def notes_of(text: str) -> list[str]:
    """The note that a text has replacement characters."""
    return ["bytes that are no text were replaced by U+FFFD"] if "\ufffd" in text else []


def encoding_of(
    data: bytes, label: str | None = None, *, is_cut: bool = False
) -> tuple[str, int, list[str]]:
    """(the codec, the length of the mark, notes). `is_cut`: the data are the beginning of a file.
    Raises Unfit for data that are no text."""
    for mark, encoding in MARKS:
        if data.startswith(mark):
            return encoding, len(mark), []
    sample = data[:SAMPLE_BYTES]
    # UTF-16 without a mark. `high`: the place of the high byte in a pair, which is 0 for Latin
    # letters
    for high, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if sample[high::2].count(0) > len(sample) // 5 and not sample[1 - high :: 2].count(0):
            return encoding, 0, [f"read as {encoding}, by a guess"]
    if len(CONTROL_BYTES.findall(sample)) > max(MOST_CONTROLS, CONTROLS_SHARE * len(sample)):
        raise Unfit("holds no text: its bytes are binary data")
    return _declared(label, data) or _seen(data, is_cut)


def _declared(label: str | None, data: bytes) -> tuple[str, int, list[str]] | None:
    """The encoding of a label, unless the data are UTF-8."""
    require_extra("qdrant", "webencodings")
    import webencodings

    declared = webencodings.lookup(label or "")
    if declared is None:
        return _other(label or "")
    if declared.name in ("utf-8", "replacement", "x-user-defined"):
        return None
    # A page's label in ASCII letters says that it is not UTF-16. Escapes in ASCII are other letters
    if declared.name.startswith("utf-16") or (not data.isascii() and _is_utf8(data)):
        return None
    return declared.codec_info.name, 0, []


def _other(label: str) -> tuple[str, int, list[str]] | None:
    """An encoding that Python knows and browsers do not, such as UTF-7."""
    with suppress(LookupError, ValueError):
        "".encode(label)
        return label, 0, []
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _seen(data: bytes, is_cut: bool) -> tuple[str, int, list[str]]:
    """UTF-8 if the data are mostly that, else the best guess."""
    text, stop = codecs.utf_8_decode(data, "replace", not is_cut)
    # Without the replacement characters that the data hold themselves
    errors = text.count("\ufffd") - data.count("\ufffd".encode())
    if not errors:
        return "utf-8", 0, []
    without_stray = STRAY.sub(b"", data[:stop])
    foreign = sum(not character.isascii() for character in text) - errors
    has_few_stray = len(data) - len(without_stray) < 10
    if foreign > errors or (has_few_stray and _is_utf8(without_stray)):
        return "utf-8", 0, []
    encoding = _guess(data)
    return encoding, 0, [f"read as {encoding}, by a guess"]


def _guess(data: bytes) -> str:
    """The likeliest of `GUESSES` by the lines that are not ASCII."""
    require_extra("qdrant", "charset_normalizer")
    from charset_normalizer import from_bytes

    sample = b"\n".join(line for line in data.splitlines() if not line.isascii())[:SAMPLE_BYTES]
    if SIGNS_ONLY.fullmatch(sample):
        return "cp1252"
    scores = {
        encoding: round(match.coherence - match.chaos, 1)
        for match in from_bytes(sample, cp_isolation=GUESSES)
        for encoding in match.could_be_from_charset
        if encoding in GUESSES
    }
    return min(scores, key=lambda name: (-scores[name], GUESSES.index(name)), default="cp1252")


def as_utf8(file: BinaryIO) -> tuple[BinaryIO, list[str]]:
    """(the file from behind its mark, in UTF-8; notes of its encoding). Raises Unfit for data that
    are no text."""
    sample = file.read(16 * SAMPLE_BYTES)
    encoding, mark, notes = encoding_of(sample, is_cut=len(sample) == 16 * SAMPLE_BYTES)
    file.seek(mark)
    # Excel's "CSV (Macintosh)"
    line_end = "\n"
    if b"\r" in sample and b"\n" not in sample:
        line_end = "\r"
    elif encoding == "utf-8":
        return file, notes
    whole = tempfile.TemporaryFile()  # noqa: SIM115
    text = io.TextIOWrapper(file, encoding, errors="replace", newline="")
    while block := text.read(SAMPLE_BYTES):
        whole.write(block.replace(line_end, "\n").encode())
    whole.seek(0)
    return whole, notes


LINE_ENDS = re.compile("\r\n?|[\f\v\x1c-\x1e\x85\u2028\u2029]")
# What a reader does not see: colours of terminals, soft hyphens with the line end behind them,
# controls, marks of direction, tags.
UNSEEN = re.compile(
    "\x1b\\[[0-9;?]{0,20}[A-Za-z]|\u00ad[ \t]*\n?[ \t]*|"
    "[\0-\x08\x0e-\x1f\x7f-\x9f\u180e\u200b\u200e\u200f"
    "\u202a-\u202e\u2060-\u206f\ufdd3-\ufdef\ufeff"
    "\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
# Bytes of a picture are no text in any kind of file.
DATA_URI = re.compile(r"data:\w{1,40}/[\w.+-]{1,80}(?:;[\w.=-]{1,80}){0,5},[^\s)\"'<>\]]*")
# NFKC would make 102 of 10², blanks of accents that stand alone, and two characters of a Thai
# vowel.
KEPT = (
    "\u00a8\u00aa\u00af\u00b2-\u00b5\u00b8-\u00ba\u00bc-\u00be\u02b0-\u02ff\u2017\u203e"
    "\u2070-\u209f\u2120\u2122\u2150-\u215f\u2189\u0e33\u0eb3"
)
# At most 500 characters at a time, since the time to order marks grows with the square of their
# number.
FOREIGN = re.compile(f"[!-~]?[^\0-\x7f{KEPT}]{{1,500}}")
WORD = r"[^\W\d_]{1,40}"
LINE_HYPHEN = re.compile(rf"\b({WORD})[-\u2010]\n[ \t]*(?=({WORD}))")
FENCES = re.compile(
    r"^( {0,3}```.*?^ {0,3}```[ \t]*$| {0,3}~~~.*?^ {0,3}~~~[ \t]*$)", re.MULTILINE | re.DOTALL
)
CONJUNCTION = re.compile(
    "und|oder|bzw|sowie|als|bis|and|or|to|nor|et|ou|y|o|e|of|en|eller|och|og|ja|tai"
)
# Words before a hyphen that no program writes where it cuts a word
PREFIX = re.compile("half|non|quasi|self|well|.")
COMPOUND = re.compile(rf"\b{WORD}-{WORD}\b")


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a document: those with a hyphen within, and all that stand whole."""

    compounds: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()


def words_of(texts: Sequence[str]) -> Words:
    """The words that decide about hyphens at line ends, if there are any."""
    if not any(map(LINE_HYPHEN.search, texts)):
        return Words()
    return Words(
        frozenset(word.lower() for text in texts for word in COMPOUND.findall(text)),
        frozenset(word.lower() for text in texts for word in re.findall(WORD, text)),
    )


def normalised(text: str, words: Words | None = None, *, is_wrapped: bool = True) -> str:
    """The text with one kind of line end, without what is not seen, in NFKC, and with words whole
    that a line end cut, outside of fences of code.

    `words`: of the whole document, if this is a part of it. `is_wrapped`: a line end may cut a
    word."""
    text = UNSEEN.sub("", LINE_ENDS.sub("\n", text))
    if "data:" in text:
        text = DATA_URI.sub("", text)
    if not text.isascii():
        text = FOREIGN.sub(lambda run: unicodedata.normalize("NFKC", run[0]), text)
    if not is_wrapped or LINE_HYPHEN.search(text) is None:
        return text
    join = partial(_joined, words or words_of([text]))
    # Fences of code are the odd parts
    parts = FENCES.split(text)
    parts[::2] = [LINE_HYPHEN.sub(join, part) for part in parts[::2]]
    return "".join(parts)


def _joined(words: Words, cut: re.Match[str]) -> str:
    """The word before a hyphen and a line end, with what belongs behind it."""
    before, after = cut.groups()
    if f"{before}{after}".lower() in words.whole and after.islower():
        return str(before)
    # The hyphen stands for a word that comes later: "input- and output"
    if CONJUNCTION.fullmatch(after.lower()):
        return f"{before}- "
    is_compound = cut.string[cut.start() - 1 : cut.start()] == "-" or before.isupper()
    is_compound = is_compound or PREFIX.fullmatch(before.lower()) is not None
    if is_compound or not after.islower() or f"{before}-{after}".lower() in words.compounds:
        return f"{before}-"
    return str(before)
