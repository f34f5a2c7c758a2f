"""The windows in which the spans of a text longer than its model are read.

Windows are counted in tokens. They have the model's length and start half a length apart; the last one starts early enough to
be full. Each span is read in the window that contains it whole and has the most context on the span's shorter side; of equals,
in the first. So the result depends only on the text, its spans and the model's length.
"""

from __future__ import annotations

import numpy as np

from hybridtei.batch import Ids

CANDIDATES = 4  # windows that can contain a token: three that start half a length apart, and the last, which may start earlier


def windows_over(starts: Ids, ends: Ids, room: int) -> Ids:
    """Return windows int64[w, 2] of at most `room` tokens, each from one of `starts` to one of `ends`. Both are sorted.

    Every part of at most `room // 2` tokens, from one of `starts` to one of `ends`, is inside a window.
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
    """Return the window int64[n] in which each of the spans int64[n, 2] is read; -1 for a span that fits no window."""
    latest = np.searchsorted(windows[:, 0], spans[:, 0], "right") - 1
    places = np.maximum(latest[:, None] - np.arange(CANDIDATES)[::-1], 0)
    begins, ends = windows[places, 0], windows[places, 1]
    left, right = spans[:, :1] - begins, ends - spans[:, 1:]
    poorer = np.maximum(np.minimum(left, right), -1)
    best = poorer.argmax(axis=1)[:, None]
    chosen = np.take_along_axis(places, best, 1)[:, 0]
    return np.where(np.take_along_axis(poorer, best, 1)[:, 0] < 0, -1, chosen)
