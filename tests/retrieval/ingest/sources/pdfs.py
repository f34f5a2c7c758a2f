"""PDF files by hand, and two encrypted ones that pypdf wrote: AES-256 with an empty password, and
with the password `secret`."""

from base64 import b85decode

PICTURE = b"<< /Type /XObject /Subtype /Image /Width 1 /Height 1 /ColorSpace /DeviceGray /BitsPerComponent 8 /Length 1 >>\nstream\n\0\nendstream"
FONT = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
DRAWN = "q 100 0 0 100 0 0 cm /P Do Q"


def shown(text):
    """The operators that show lines of text, one below the other."""
    lines = " T* ".join(f"({line}) Tj" for line in text.split("\n"))
    return f"BT /F1 12 Tf 14 TL 72 700 Td {lines} ET"


def pdf_of(*pages, title="", annotations=(), fields=()):
    """A page for each stream of operators. `annotations` and `fields`: dictionaries of the first
    page."""
    objects = [b"", b"", FONT, PICTURE, f"<< /Title ({title}) >>".encode()]
    numbers = []
    for extra in (*annotations, *fields):
        objects.append(extra.encode())
    marked = " ".join(f"{6 + place} 0 R" for place in range(len(annotations) + len(fields)))
    for place, operators in enumerate(pages):
        stream = operators.encode()
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        annots = f"/Annots [{marked}]" if place == 0 else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {len(objects)} 0 R {annots} "
            "/Resources << /Font << /F1 3 0 R >> /XObject << /P 4 0 R >> >> >>".encode()
        )
        numbers.append(len(objects))
    form = " ".join(f"{6 + len(annotations) + place} 0 R" for place in range(len(fields)))
    objects[0] = f"<< /Type /Catalog /Pages 2 0 R /AcroForm << /Fields [{form}] >> >>".encode()
    kids = " ".join(f"{number} 0 R" for number in numbers)
    objects[1] = f"<< /Type /Pages /Kids [{kids}] /Count {len(numbers)} >>".encode()
    data, places = b"%PDF-1.7\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    size = len(objects) + 1
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    trailer = f"trailer\n<< /Size {size} /Root 1 0 R /Info 5 0 R >>\nstartxref\n{len(data)}\n%%EOF"
    return data + b"xref\n0 %d\n0000000000 65535 f \n" % size + table + trailer.encode()


OPEN_AES = b85decode(
    "B~V00Eio=L3MJy>&(jJqATS_rVrmLJJPI#Vd2nSQFGFE;VQg<_3NKJ$XJvCBG9WM@QVK6YV{&gsZ*pxQJUj|7Mrmbi"
    "WOE=}AYBSRJ_<fQ3T19&Z(?c+G9WM@Z(?c+JUj|7RC#b^ATLm1XJvB=FH31;b0AwFGaxV^QXpLlFGFv2Zge0q3O+sx"
    "Wo~3|VrmLAATS_rVrmLJJPI#Vd2nSQFHm7;WeP7)VRB_|bRaSyFd$M2FHL1+X<<TdcpzIKFd#4>HZd|FH#ssOT?#Kl"
    "Z*FvDZgg`XG$1e_QVK6YZf<XMb0AwFT?#K!Wpi(Ja${w4AUr$@FGg=}bRaxD3NJ=6AT=N`AW{lGJ_;{bPhx6iV{{-q"
    "JPI#RAT}T{AW{lGJ_<fQ3O+sxWo~3|VrmLBATS_rVrmLJJPI#NWo~D5XdpN+3O+sxb98cLVQmUlemaBjO*I1#0Y1!e"
    "{6AwLi_cn17J`*oG?PaE=~vcTTs#BcwW`j9`UU?;W~TTsZ(UrXk`5S>{lS6Mv6$fyVMT?jO$?4cSH!xu+=JB$Wo~41"
    "baG{3Z3<;>WN%_>3N;`wAa7!73OqatFI0JOWgss`Z*Fu7FH?15ba`-PATLyTaAh$HFG68+WkzpqbRaKCWo&k3bZKK@"
    "3O+sxWo~3|VrmLDATS_rVrmLJJPI#Vd2nSQFIZ1vYGq?|3NKT2Vsv?MWgss}ZDD6+3NKe_WOQgCF$yn8Woc(<bRaPb"
    "FGFu^Z*o&`VPj<=FGOW_X=7zaa$$K2FG6W_b5Lb+LvL+xZ*FC7bRakiFHB`_XLM*FGcpQ3J_>Vma%Ev{3Mc;Id;0z{"
    "qh`EwV@dH!<pJ4|t6XIUEQtlyw!8&=^$KNfWOH<KWnpa!Wo~3|VrmLEATS_rVrmLJJPI#VX>@F5AUrTMW@KSuW;tdv"
    "Wn(a7IAJtqW;HftG&wRhHaBE8VK6W>Fga#sWHV-DGd4LhFfunWFkxjkHZfsjHaKNrH8MU5K0XR%Ze(v_Y6>_YFd%PY"
    "Y6?6&3NKb5H3~0MAT|mwOl59obZ8(lH8u(_P#`oiIW##oH!?Xg3NJ=!Y;<LEATLvNVQyq$a%2iGPar&GIbtw3WH2^i"
    "Wi>T6W;SACGG=5kWo2VBWo9;FVmLWsVKX)~Wn^VBG&o^nFflM=H#cHqIWcB5Ghs9{Fl9M1HZd_aI5Rn7WMnZjFg9T{"
    "FlJ+6W@R%qF*YzcW@ceN3NKY4JTPWAHDqODFf(E~WMwj9IAvxyW;HQmG&VG5Vq-8dV_{@6HfCcvIW;t5H#lK1IW%Np"
    "V>mHpW;ZfoFk(1mHDhHpVP!WmH!v|WIWjh5IWjk5VKX#0V>UBkV`ervGCm3~Lq;GxJPI#UbYw$DAUr$@FF|#5Xhn8q"
    "Zge0oL~mnHaAj@^FGEI6ATL2hQ&uwyFHB`_XLM*FGcpQ3J_<fQ3NKT1ZAKt3Q*>lQMhY)ebaF-@FH>}6Lq-ZOPemX+"
    "GdDLmFk&?`IbvlpGG;O~Gh#I}Ib|_3G-NqBF=1vnG&473GB#v5W@0ihFk~@gH8^HtVrDmFVP-cuIAt<3J_;{YMIbyg"
    "F=RC|I50G3G&3<YWo2SHWimG~WHL2jWn?vEHZ^84VlZQ7V>x3uFfd{{Vq-EiVL3K1G&nV8GdE#oI5{ys3NKJ)a&2=U"
    "JTx^nVPiKqW-wtlHe+F8IXPi7I5;$BWMg7sIW;q8I6ewKJ_==SWN%_>3V3p5W(qJMISMc^FfcGMFfcGMAT~8MGc_P)"
    "APO)rFfcGMFfcJSATTg6Ffbr)APO)rFfcGMFfchXATTg6Ffbr)APO)rFfcGMFflbTATTg6Ffbr)APO)rFfcGMFf%bV"
    "ATTg6Ffbr)APO)rFfcGMFf=qZATTg6Ffbr)APO)rFfcGMFf}nXATTg6Ffbr)APO)rFfcGMFg7_cATTg6Ffbr)APO)r"
    "FfcGMFgG|hATTg6Ffbr)APRJHVQFk-atb^=3NKS>dSxIv3NKP`Z*(9rATS_O3NJ}+W^W)jATS_O3NJ}SAX^|jG%;mj"
    "H8L?aVmL7{F<~_|VL3Q4W;J0lI5sviW;HN0J|H|aF=b*kGBGw{I599WVKp^jIXE$9HDNM1Ha0S5H83<jAYBSCMQ&qq"
    "d2n<fI3O?}QVKpk3UhQ}a&&ldWo8O7Gc+*@B_%~qMhX"
)
LOCKED_AES = b85decode(
    "B~V00Eio=L3MJy>&(jJqATS_rVrmLJJPI#Vd2nSQFGFE;VQg<_3NKJ$XJvCBG9WM@QVK6YV{&gsZ*pxQJUj|7Mrmbi"
    "WOE=}AYBSRJ_<fQ3T19&Z(?c+G9WM@Z(?c+JUj|7RC#b^ATLm1XJvB=FH31;b0AwFGaxV^QXpLlFGFv2Zge0q3O+sx"
    "Wo~3|VrmLAATS_rVrmLJJPI#Vd2nSQFHm7;WeP7)VRB_|bRaSyFd$M2FHL1+X<<TdcpzIKFd#4>HZd|FH#ssOT?#Kl"
    "Z*FvDZgg`XG$1e_QVK6YZf<XMb0AwFT?#K!Wpi(Ja${w4AUr$@FGg=}bRaxD3NJ=6AT=N`AW{lGJ_;{bPhx6iV{{-q"
    "JPI#RAT}T{AW{lGJ_<fQ3O+sxWo~3|VrmLBATS_rVrmLJJPI#NWo~D5XdpN+3O+sxb98cLVQmVw1QHD!Tj=oEK=qOM"
    "n#_o<UpQWvz(gM+cpA)_z{IC{sF~&|1ro=n8dhHnX(A}CPV81%3^<+hW|TqHN8mFFY@P7DgunyFS$=W6YKhhgWo~41"
    "baG{3Z3<;>WN%_>3N;`wAa7!73OqatFI0JOWgss`Z*Fu7FH?15ba`-PATLyTaAh$HFG68+WkzpqbRaKCWo&k3bZKK@"
    "3O+sxWo~3|VrmLDATS_rVrmLJJPI#Vd2nSQFIZ1vYGq?|3NKT2Vsv?MWgss}ZDD6+3NKe_WOQgCF$yn8Woc(<bRaPb"
    "FGFu^Z*o&`VPj<=FGOW_X=7zaa$$K2FG6W_b5Lb+LvL+xZ*FC7bRakiFHB`_XLM*FGcpQ3J_>Vma%Ev{3TP8!CXji#"
    "Oc{ZU4wTQd6CX{!Ho9k*B>ynNduMFu7Yb!=WOH<KWnpa!Wo~3|VrmLEATS_rVrmLJJPI#VX>@F5AUrT*G&E*4Wn(ik"
    "IW%T7W@R^GH(@qrH)dpJG-5F_VKQZAGdDP7H8){3Hexq0HDxqnF*ao~H!?LjVlXyjI5|EFK0XR%Ze(v_Y6>_YFd%PY"
    "Y6?6&3NKb5H3~0MAT|mwOl59obZ8(lH8u(_P#`oiIW##oH!?Xg3NJ=!Y;<LEATLvNVQyq$a%2iGPar%sWjQitIb%6v"
    "VKp;iHDNS2HaImmIWS~1GiGBqFfn8`WMeTlVL3NAFfchdWH>Q4Ic70qV=y%{IWuBoH(@X}I5s#oWHV(mH)LitGcq(`"
    "V=**iVPi65G+{C|Gc+<j3NKY4JUBCDGc;ymW-&7{WnwroWHL2oH)UgFV`VjDVPRrpH#jq9Gcht^W-?(hW@KVFV>CB4"
    "VK6r|VK8AbH#uQ2H8V9ZHaBE3Wn(uvH)CaGF*r44VPa!AVq!33Vq;@7VLl2kLq;GxJPI#UbYw$DAUr$@FF|#5Xhn8q"
    "Zge0oL~mnHaAj@^FGEI6ATL2hQ&uwyFHB`_XLM*FGcpQ3J_<fQ3NKT1ZAKt3Q*>lQMhY)ebaF-@FH>}6Lq-ZOPemX+"
    "VKy>1Wi>E0IWc82VL3NsH8Wy1W@ctKVPrOBIAmooW;10rFkvz@IAt<3G&C_dVPj!tIWc85Vr67zIA$<0J_;{YMIbyi"
    "Ffd~|F*jj0VPs=9V>V-9FgG|jWn(rsFg9ajHZd_XW@KeBG-Ee6W-%~gHDY98Gh=2nWimNAWHm4{W@KeP3NKJ)a&2=U"
    "JZ3XDHZ(XkV>U2mV`DKhGBaZ^W?^D7Gh{GjI5aaeH$DnJJ_==SWN%_>3V3p5W(qJMISMc^FfcGMFfcGMAT~8MGc_P)"
    "APO)rFfcGMFfcJSATTg6Ffbr)APO)rFfcGMFfchXATTg6Ffbr)APO)rFfcGMFflbTATTg6Ffbr)APO)rFfcGMFf%bV"
    "ATTg6Ffbr)APO)rFfcGMFf=qZATTg6Ffbr)APO)rFfcGMFf}nXATTg6Ffbr)APO)rFfcGMFg7_cATTg6Ffbr)APO)r"
    "FfcGMFgG|hATTg6Ffbr)APRJHVQFk-atb^=3NKS>dSxIv3NKP`Z*(9rATS_O3NJ}+W^W)jATS_O3NJ}SAX^|jI5#n7"
    "IAUcpF)=bQVlX#mVP-WnW??flI5lK4IW;n6J|H|eH!)^7Vr4TiF)}b>FgIplW;HZsVKX#1HDoe5H8N#BAYBSCMQ&qq"
    "d2n<fI3O?}QVKpk3UhQ}a&&ldWo8O7Gc+*@B_%~qMhX"
)


def nested_forms(levels, fan=10, *, name=b"/X"):
    """A page of a form that draws another `fan` times, and so on: `fan` to the power of `levels`
    words. `name`: of the form in what draws it."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"",
        FONT,
    ]
    for level in range(levels):
        content = name + b" Do "
        content = content * fan if level else b"BT /F1 12 Tf 10 10 Td (lighthouse) Tj ET " * fan
        own = b"/Font << /F1 4 0 R >>"
        if level:
            own = b"/XObject << /X %d 0 R >>" % len(objects)
        objects.append(
            b"<< /Type /XObject /Subtype /Form /BBox [0 0 100 100] /Resources << %b >> /Length %d >>\nstream\n%b\nendstream"
            % (own, len(content), content)
        )
    last = len(objects)
    objects.append(b"<< /Length 5 >>\nstream\n/X Do\nendstream")
    objects[2] = (
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 100 100] /Contents %d 0 R /Resources << /XObject << /X %d 0 R >> >> >>"
        % (last + 1, last)
    )
    data, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    rows = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        data
        + table
        + rows
        + b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
        % (len(objects) + 1, len(data))
    )
