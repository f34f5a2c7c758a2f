"""Words of PDF files that are lost, by pdftotext's: python -m conformance.documents.pdf_words
FILE...

For the files of Debian's maint-guide, bash-doc and r-doc-pdf: `apt-get download` them, and unpack
them by `dpkg-deb -x`. Prints a line a file: its words, those that are lost, and the CPU seconds of
reading.
"""

import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from hybridtei.retrieval.ingest.document import Document
from hybridtei.retrieval.ingest.files import documents_of, source_files
from hybridtei.retrieval.ingest.options import ReadOptions
from hybridtei.retrieval.ingest.text import normalised

WORD = re.compile(r"\w+")

if __name__ == "__main__":
    for name in sys.argv[1:]:
        (file,) = source_files(Path(name))
        began = time.process_time()
        ((document, _),) = documents_of(file, ReadOptions())
        seconds = time.process_time() - began
        command = ["pdftotext", name, "-"]
        other = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        expected = Counter(WORD.findall(normalised(other)))
        text = document.text if isinstance(document, Document) else ""
        lost = expected - Counter(WORD.findall(text))
        print(f"{name}: {expected.total():,} words, {lost.total():,} lost, {seconds:.2f} s")
