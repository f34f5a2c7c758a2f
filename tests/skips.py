"""The only reasons for which CI may skip a test: a skip is a hole, through which a fault goes
unseen.

With `CI=true` a test that is skipped for another reason fails, and more tests than a row allows
fail the run. Elsewhere tests may be skipped for programs and packages that are not installed.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable

IN_CI = os.environ.get("CI") == "true"

# A pattern that the whole reason matches -> the number of tests that may be skipped for it.
ALLOWED = {
    r"needs a CUDA device": 14,
    r"this processor has no bfloat16": 3,
    r".*this processor does not compute in bfloat16.*": 1,
    r"root reads everything": 1,
    # `conformance/clients/run.py` calls these in environments of their own
    r"compiled only: (haystack.*|infinity_client|langchain_openai|litellm|llama_index) not installed": 5,
    # The pages for those who come from them have a block of each
    r"compiled only: (fastembed|infinity_emb|txtai) not installed": 3,
    r"compiled only: wants a Qdrant server": 2,
}


def reason_of(message: object) -> str:
    """The reason within a report's `longrepr`: (path, line, "Skipped: reason")."""
    text = message[2] if isinstance(message, tuple) else str(message)
    return text.removeprefix("Skipped: ")


def is_allowed(reason: str) -> bool:
    return any(re.fullmatch(pattern, reason) for pattern in ALLOWED)


def excess(reasons: Iterable[str]) -> list[str]:
    """A line for each row of `ALLOWED` that more tests were skipped for than it allows."""
    counts: Counter[str] = Counter()
    for reason in reasons:
        counts.update(pattern for pattern in ALLOWED if re.fullmatch(pattern, reason))
    return [
        f"{counts[pattern]} tests were skipped for {pattern!r}; tests/skips.py allows {limit}"
        for pattern, limit in ALLOWED.items()
        if counts[pattern] > limit
    ]
