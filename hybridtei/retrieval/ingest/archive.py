"""Archives of office documents and books. Sizes are bounded before and while a part is unfolded;
no entity is expanded, and no macro, link or embedded file is opened."""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from urllib.parse import unquote
from xml.etree.ElementTree import Element, ParseError, fromstring

from hybridtei.retrieval.ingest.text import Unfit

MAX_MEMBERS, MAX_PART_BYTES = 10_000, 50_000_000
# An archive may be larger than this only by this factor
MAX_UNFOLDED, MAX_RATIO = 10_000_000, 100
# Other methods unfold a part whole, whatever size the archive says
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
OLE = b"\xd0\xcf\x11\xe0"


class Archive:
    """The parts of an archive. Raises Unfit for one that is encrypted, broken, or unfolds too
    far."""

    def __init__(self, data: bytes) -> None:
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, ValueError, EOFError, OSError) as error:
            raise Unfit(f"not readable as an archive: {error}") from None
        members = self._zip.infolist()
        size = sum(member.file_size for member in members)
        if size > max(MAX_UNFOLDED, MAX_RATIO * len(data)) or len(members) > MAX_MEMBERS:
            raise Unfit(f"{len(data)} bytes would become {len(members)} files of {size} bytes")
        self.names = [member.filename for member in members]

    def read(self, name: str) -> bytes:
        """The bytes of a part. Raises Unfit."""
        try:
            member = self._zip.getinfo(name)
            if member.file_size > MAX_PART_BYTES:
                raise Unfit(f"{name} has {member.file_size} bytes, allowed are {MAX_PART_BYTES}")
            if member.flag_bits & 1:
                raise Unfit("is encrypted")
            if member.compress_type not in METHODS:
                raise Unfit(f"{name} is packed by method {member.compress_type}, which is not read")
            data = self._zip.read(member)
        except (
            KeyError,
            NotImplementedError,
            RuntimeError,
            OSError,
            zlib.error,
            EOFError,
            zipfile.BadZipFile,
        ) as error:
            raise Unfit(f"not readable: {name}: {error}"[:300]) from None
        if b"<!ENTITY" in data:
            raise Unfit(f"{name} declares entities of XML")
        return data

    def xml(self) -> dict[str, bytes]:
        """The parts of XML by name."""
        return {
            name: self.read(name) for name in self.names if name.lower().endswith((".xml", ".rels"))
        }


def packed(parts: Mapping[str, bytes]) -> bytes:
    """An archive of these parts."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return data.getvalue()


def tree_of(data: bytes, name: str) -> Element:
    """The elements of a part of XML. Raises Unfit."""
    if b"<!ENTITY" in data:
        raise Unfit(f"{name} declares entities of XML")
    try:
        return fromstring(data)
    except (ParseError, ValueError, LookupError) as error:
        raise Unfit(f"not readable: {name}: {error}"[:300]) from None


def local(element: Element) -> str:
    """An element's name without its namespace."""
    return str(element.tag).rpartition("}")[2]


def attribute(element: Element, name: str) -> str:
    """The value of an attribute in any namespace, or nothing."""
    for key, value in element.attrib.items():
        if key.rpartition("}")[2] == name:
            return value
    return ""


def every(element: Element, *names: str) -> Iterator[Element]:
    """The elements of these local names, in order."""
    return (below for below in element.iter() if local(below) in names)


def title_of(parts: Mapping[str, bytes], name: str) -> str | None:
    """The title in a part that describes the document."""
    if name not in parts:
        return None
    return next((title.text for title in every(tree_of(parts[name], name), "title")), None)


def related(parts: Mapping[str, bytes], name: str) -> dict[str, str]:
    """{id of a relationship of a part: the name of the part it leads to}."""
    folder, file = posixpath.split(name)
    place = f"{folder}/_rels/{file}.rels"
    targets: dict[str, str] = {}
    if place not in parts:
        return targets
    for relation in every(tree_of(parts[place], place), "Relationship"):
        target = unquote(attribute(relation, "Target"))
        # A target that begins with / is a part's name
        path = posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")
        targets[attribute(relation, "Id")] = path
    return targets


def number_of(name: str) -> int:
    """The last number in a part's name."""
    return int((re.findall(r"\d{1,9}", name) or [0])[-1])
