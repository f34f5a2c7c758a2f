"""Which part of a text that is longer than its model is read with each of its spans.

Windows are as long as the model reads and begin half that length apart, the last one so early that it is full; they are counted
in tokens. A span is read in the one window that holds it whole and has the most context on the span's poorer side, the first of
several. So all depends on the text, its spans and the model's length, and on nothing else.
"""

from __future__ import annotations

import numpy as np

from hybridtei.batch import Ids

CANDIDATES = 4  # windows that can hold one token: three that begin half a length apart, and the last, which may begin earlier


def windows_over(starts: Ids, ends: Ids, room: int) -> Ids:
    """Return windows int64[w, 2] of at most `room` tokens, each from one of `starts` to one of `ends`, which are sorted.

    They hold every part of at most `room // 2` tokens from one of `starts` to one of `ends`.
    """
    found: list[tuple[int, int]] = []
    place = 0
    while True:
        begin = int(starts[place])
        end = int(ends[max(0, int(np.searchsorted(ends, begin + room, "right")) - 1)])
        if end >= ends[-1]:
            begin = min(begin, int(starts[int(np.searchsorted(starts, end - room))]))
        found.append((begin, end))
        following = max(place + 1, int(np.searchsorted(starts, begin + room // 2)))
        if end >= ends[-1] or following >= len(starts):
            return np.array(found, dtype=np.int64)
        place = following


def window_of_each(windows: Ids, spans: Ids) -> Ids:
    """Return the place of the window that each of int64[n, 2] spans is read in: int64[n], -1 for a span that none holds."""
    latest = np.searchsorted(windows[:, 0], spans[:, 0], "right") - 1
    places = np.maximum(latest[:, None] - np.arange(CANDIDATES)[::-1], 0)
    begins, ends = windows[places, 0], windows[places, 1]
    left, right = spans[:, :1] - begins, ends - spans[:, 1:]
    poorer = np.maximum(np.minimum(left, right), -1)
    best = poorer.argmax(axis=1)[:, None]
    chosen = np.take_along_axis(places, best, 1)[:, 0]
    return np.where(np.take_along_axis(poorer, best, 1)[:, 0] < 0, -1, chosen)
