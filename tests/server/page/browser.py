"""What tests do with the page in a browser: fill it in, and read what its table shows."""

from collections.abc import Callable
from typing import Any

import numpy as np

QUERY = "hybrid search"
DOCUMENTS = [
    "the search engine finds text",
    "one two three",
    "a hybrid search, by words and meaning",
    "seven <b>zwölf</b> café",
]
Open = Callable[..., Any]
# Elements beyond the right edge of the window that nothing scrolls or cuts
OVERFLOWING = """() => [...document.querySelectorAll("body *")].filter((element) => {
  if (element.getBoundingClientRect().right <= innerWidth + 1) return false;
  for (let box = element.parentElement; box !== document.body; box = box.parentElement) {
    if (getComputedStyle(box).overflowX !== "visible") return false;
  }
  return true;
}).map((element) => element.outerHTML.slice(0, 120))"""


def score(page, documents=DOCUMENTS, query=QUERY, *, is_refused=False):
    """Ask, and wait until the table shows these documents: none of them is in the example that it
    showed before."""
    page.locator("#facts").filter(has_text="·").wait_for()
    page.fill("#query", query)
    page.fill("#documents", "\n".join(documents))
    page.click("#score")
    if not is_refused:
        page.locator('#table tr[data-row="0"] .pick').get_by_text(
            documents[0], exact=True
        ).wait_for()


def column(page, kind, rows):
    """As the table shows it, in the documents' order."""
    cells = [
        page.locator(f'#table tr[data-row="{row}"] td[data-kind="{kind}"]') for row in range(rows)
    ]
    return [float(cell.get_attribute("data-value")) for cell in cells]


def order(page, place="#table tbody tr"):
    return [int(row.get_attribute("data-row")) for row in page.locator(place).all()]


def vectors(server, inputs, prompt_name=None):
    return server.post(
        "/embed_hybrid", {"inputs": inputs, "prompt_name": prompt_name, "truncate": True}
    ).json()


def weights(entries):
    return {entry["index"]: entry["value"] for entry in entries}


def competition_ranks(scores):
    return np.array([1 + sum(other > one for other in scores) for one in scores])
