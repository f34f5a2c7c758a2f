"""Office documents by hand: the parts that a reader needs."""

import zipfile
from io import BytesIO

CORE = "<cp:coreProperties xmlns:dc='d' xmlns:cp='c'><dc:title>The {kind} title</dc:title></cp:coreProperties>"
ROW = "<w:tr><w:trPr/><w:tc><w:tcPr/><w:p><w:r><w:t>{}</w:t></w:r></w:p></w:tc><w:tc><w:p><w:r><w:t>{}</w:t></w:r></w:p></w:tc></w:tr>"
DOCUMENT = f"""<?xml version="1.0"?><w:document xmlns:w="w"><w:body>
<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Install</w:t></w:r></w:p>
<w:p><w:r><w:t xml:space="preserve">Turn the </w:t></w:r><w:r><w:t>bolt &amp; nut</w:t></w:r><w:r><w:br/><w:t>slowly</w:t></w:r>
<w:r><w:delText>deleted</w:delText></w:r><w:r><w:instrText>PAGE</w:instrText></w:r></w:p>
<w:tbl><w:tblPr/><w:tblGrid/>{ROW.format("Size", "Torque")}{ROW.format("M8", "25")}</w:tbl>
<w:p/></w:body></w:document>"""
ODF = """<office:document-content xmlns:office="o" xmlns:text="t" xmlns:table="b"><office:styles>no</office:styles><office:body>
<office:text><text:h text:outline-level="2">Install</text:h><text:p>Turn<text:s/>it<text:line-break/>slowly</text:p>
<table:table><table:table-row><table:table-cell><text:p>Size</text:p></table:table-cell><table:table-cell><text:p>Torque</text:p>
</table:table-cell></table:table-row><table:table-row><table:table-cell><text:p>M8</text:p></table:table-cell><table:table-cell/>
</table:table-row></table:table></office:text></office:body></office:document-content>"""
SHEET = """<worksheet xmlns="x"><sheetData><row r="1"><c r="A1" t="s"><v>0</v></c><c r="B1" t="s"><v>1</v></c><c r="C1" t="s">
<v>2</v></c></row><row r="2"><c r="A2" t="inlineStr"><is><t>P-1077</t></is></c><c r="C2"><f>1+1</f><v>12</v></c></row>
</sheetData></worksheet>"""
STRINGS = (
    "<sst><si><t>Part</t></si><si><r><t>Sto</t></r><r><t>ck</t></r></si><si><t>Count</t></si></sst>"
)
SLIDE = "<p:sld xmlns:a='a' xmlns:p='p'><a:p><a:r><a:t>{}</a:t></a:r></a:p></p:sld>"
OPF = """<package xmlns="o" xmlns:dc="d"><metadata><dc:title>The book</dc:title></metadata><manifest>
<item id="two" href="text/2.xhtml" media-type="application/xhtml+xml"/><item id="one" href="text/1%20a.xhtml"/></manifest>
<spine><itemref idref="one"/><itemref idref="two"/><itemref idref="gone"/></spine></package>"""


def zipped(**parts):
    """An archive of these parts; `__` in a name is a slash, `_` a dot."""
    data = BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), content)
    return data.getvalue()


DOCX = zipped(word__document_xml=DOCUMENT, docProps__core_xml=CORE.format(kind="Word"))
ODT = zipped(
    content_xml=ODF, **{"META-INF__manifest_xml": "<m/>", "meta_xml": CORE.format(kind="ODF")}
)
XLSX = zipped(xl__worksheets__sheet1_xml=SHEET, xl__sharedStrings_xml=STRINGS)
PPTX = zipped(
    ppt__slides__slide10_xml=SLIDE.format("ten"),
    ppt__slides__slide2_xml=SLIDE.format("two"),
    ppt__notesSlides__notesSlide2_xml=SLIDE.format("said"),
)
EPUB = zipped(
    OEBPS__book_opf=OPF,
    **{
        "OEBPS__text__1 a_xhtml": "<body><h1>First</h1><p>one</body>",
        "OEBPS__text__2_xhtml": "<body><p>two</body>",
    },
)
