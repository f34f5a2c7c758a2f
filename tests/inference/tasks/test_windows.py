"""Windows over long texts: full, half a length apart, and each span in the one with the most
context on its poorer side."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridtei.inference.tasks.spans import window_of_each, windows_over


def over_tokens(length, room):
    places = np.arange(length)
    return windows_over(places, places + 1, room)


def test_windows_begin_half_a_length_apart_and_the_last_is_full():
    assert over_tokens(100, 40).tolist() == [[0, 40], [20, 60], [40, 80], [60, 100]]
    assert over_tokens(95, 40).tolist() == [[0, 40], [20, 60], [40, 80], [55, 95]]
    assert over_tokens(40, 40).tolist() == [[0, 40]]
    assert over_tokens(41, 40).tolist() == [[0, 40], [1, 41]]


def test_a_span_is_read_where_its_poorer_side_has_the_most():
    windows = over_tokens(100, 40)
    spans = np.array([[0, 10], [22, 30], [25, 35], [26, 36], [38, 42], [99, 100], [10, 50]])
    assert window_of_each(windows, spans).tolist() == [0, 0, 0, 1, 1, 3, -1]


@given(st.integers(1, 300), st.integers(2, 60), st.data())
def test_every_span_of_half_a_window_has_one_and_none_is_better(length, room, data):
    windows = over_tokens(length, room)
    assert ((windows[:, 1] - windows[:, 0]) <= room).all()
    begin = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(begin + 1, min(length, begin + room // 2)))
    (place,) = window_of_each(windows, np.array([[begin, end]])).tolist()

    def poorer(window):
        left = np.inf if window[0] == 0 else begin - window[0]
        right = np.inf if window[1] == length else window[1] - end
        return min(left, right) if begin >= window[0] and end <= window[1] else -1

    assert place == int(np.argmax([poorer(window) for window in windows]))
    assert poorer(windows[place]) >= 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=60))
def test_chunks_are_never_cut_by_the_window_they_are_read_in(
    lengths,
):
    """Chunks of 1 to 10 tokens, of which the next repeats some; windows begin and end with
    chunks."""
    starts, ends, at = [], [], 0
    for length, repeated in lengths:
        starts.append(max(at - min(repeated, length), starts[-1] + 1 if starts else 0))
        ends.append(max(starts[-1] + length + 1, ends[-1] + 1 if ends else 0))
        at = ends[-1]
    spans = np.stack([starts, ends], axis=1)
    room = 2 * int((spans[:, 1] - spans[:, 0]).max())
    windows = windows_over(spans[:, 0], spans[:, 1], room)
    chosen = window_of_each(windows, spans)
    assert (chosen >= 0).all()
    assert (np.diff(chosen) >= 0).all()
    assert set(windows[:, 0]) <= set(starts)
    assert set(windows[:, 1]) <= set(ends)
