"""What an ingest reads of `conformance/documents/folder`, in one screen: python -m
conformance.documents [FOLDER]

Exit status 1 if a file of the folder here is read otherwise than `expected.json` says.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from hybridtei.retrieval.ingest.document import Document
from hybridtei.retrieval.ingest.files import documents_of, source_files
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.report import Report

HERE = Path(__file__).parent
FOLDER = HERE / "folder"


def read(folder: Path) -> tuple[dict[str, str], dict[str, str], Report]:
    """(text by file, reason of the refusal by file, what was left out or noted)."""
    texts: dict[str, str] = {}
    refusals: dict[str, str] = {}
    report = Report()
    for file in source_files(folder, "folder"):
        name = file.label.removeprefix("folder/")
        if file.left_out is not None:
            report.add("left out", file.left_out, name)
            continue
        for part, _ in documents_of(file, ReadOptions()):
            if isinstance(part, Document):
                texts[name] = f"{texts.get(name, '')}\n{part.indexed_text}"
                for note in part.notes:
                    report.add("documents", note, name)
            else:
                refusals[name] = part.reason
                report.add("files" if part.location == "file" else "rows", part.reason, name)
    return texts, refusals, report


def differences(texts: dict[str, str], refusals: dict[str, str]) -> list[str]:
    """A line for each file that is read otherwise than expected."""
    expected = json.loads((HERE / "expected.json").read_text(encoding="utf-8"))
    lines = []
    for name, wanted in expected.items():
        if "refuses" in wanted:
            if wanted["refuses"] not in refusals.get(name, "") or name in texts:
                lines.append(f"{name}: {refusals.get(name)!r}, expected {wanted['refuses']!r}")
            continue
        missing = [words for words in wanted["reads"] if words not in texts.get(name, "")]
        if missing:
            lines.append(f"{name}: lacks {missing}: {texts.get(name, refusals.get(name))!r}"[:500])
    return lines + [f"{name}: is not expected" for name in texts if name not in expected]


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    texts, refusals, report = read(folder)
    kinds = Counter(Path(name).suffix or "no ending" for name in texts)
    print(f"{len(texts)} files were read, of {len(kinds)} kinds:")
    print("  " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    for entry in report:
        print(f"{entry.count:>5} {entry.what}: {entry.reason[:100]} ({entry.example})")
    wrong = differences(texts, refusals) if folder == FOLDER else []
    print(*wrong, sep="\n", end="")
    sys.exit(bool(wrong))
