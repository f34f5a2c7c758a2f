"""Office documents by hand: the parts that a reader needs."""

import zipfile
from io import BytesIO

from conformance.documents.__main__ import FOLDER

CORE = "<cp:coreProperties xmlns:dc='d' xmlns:cp='c'><dc:title>The {kind} title</dc:title></cp:coreProperties>"
ODF_KIND = "application/vnd.oasis.opendocument.text"
CONTAINER = """<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>
<rootfile full-path="OEBPS/book.opf" media-type="application/oebps-package+xml"/></rootfiles></container>"""
SPACE = "urn:oasis:names:tc:opendocument:xmlns"
ODF = f"""<office:document-content xmlns:office="{SPACE}:office:1.0" xmlns:text="{SPACE}:text:1.0" xmlns:table="{SPACE}:table:1.0"><office:styles>no</office:styles><office:body>
<office:text><text:h text:outline-level="2">Install</text:h><text:p>Turn<text:s/>it<text:line-break/>slowly</text:p>
<table:table><table:table-row><table:table-cell><text:p>Size</text:p></table:table-cell><table:table-cell><text:p>Torque</text:p>
</table:table-cell></table:table-row><table:table-row><table:table-cell><text:p>M8</text:p></table:table-cell><table:table-cell/>
</table:table-row></table:table></office:text></office:body></office:document-content>"""
OPF = """<package xmlns="o" xmlns:dc="d"><metadata><dc:title>The book</dc:title></metadata><manifest>
<item id="two" href="text/2.xhtml" media-type="application/xhtml+xml"/><item id="one" href="text/1%20a.xhtml"/></manifest>
<spine><itemref idref="one"/><itemref idref="two"/><itemref idref="gone"/></spine></package>"""


def zipped(**parts):
    """An archive of these parts; `__` in a name is a slash, `_` a dot."""
    return packed({name.replace("__", "/").replace("_", "."): part for name, part in parts.items()})


def changed(name, part, change):
    """The fixture with a part that `change` makes of the part's text, which is empty if new."""
    with zipfile.ZipFile(FOLDER / "office" / name) as archive:
        parts = {member: archive.read(member) for member in archive.namelist()}
    parts[part] = change(parts.get(part, b"").decode()).encode()
    return packed(parts)


def packed(parts):
    """An archive of these parts by name."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return data.getvalue()


DOCX = (FOLDER / "office" / "letter.docx").read_bytes()
ODT = zipped(mimetype=ODF_KIND, content_xml=ODF, meta_xml=CORE.format(kind="ODF"))
EPUB = zipped(
    OEBPS__book_opf=OPF,
    **{
        "META-INF__container_xml": CONTAINER,
        "OEBPS__text__1 a_xhtml": "<body><h1>First</h1><p>one</body>",
        "OEBPS__text__2_xhtml": "<body><p>two</body>",
    },
)
