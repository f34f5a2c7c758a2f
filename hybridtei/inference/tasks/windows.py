"""Texts longer than a model, read in windows: parts of a text, each of which is an encoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridtei.batch import Characters, Encoding, WindowEncoding
from hybridtei.errors import RequestError
from hybridtei.models.text.reader import TextReader

# Tokens that a part of a text may have more alone than within the text
SPARE_TOKENS = 2
# Tokens of a document beside a long query, below which it is cut instead
LEAST_WINDOW = 16
Read = Callable[[Sequence[str]], list[Encoding]]


def in_windows(
    reader: TextReader,
    texts: Sequence[str],
    empty: int,
    longest: int,
    read: Read,
    *,
    limit: int,
    truncate: bool,
) -> list[Encoding]:
    """Read texts by `read`, long ones in at most `limit` windows. `empty`: the tokens of an empty
    text, with the query if the model reads both together; `longest`: the most tokens. `truncate`:
    as for `TextReader.windows`. The encodings before those of the texts are the query's. Raises
    RequestError."""
    room = longest - empty - SPARE_TOKENS
    if limit < 2 or room < LEAST_WINDOW:
        return read(texts)
    windows = reader.windows(texts, room, limit, truncate=truncate)
    # (document, characters) of each window
    parts = [(place, part) for place, own in enumerate(windows) for part in own]
    try:
        encodings = read([texts[place][begin:end] for place, (begin, end) in parts])
    except RequestError as error:
        if error.place is not None:
            error.place = parts[error.place][0]
        raise
    of_query = len(encodings) - len(parts)
    for row, (place, (begin, end)) in enumerate(parts, of_query):
        encoding = encodings[row]
        last = windows[place][-1]
        extent: Characters | None = None
        if encoding.extent is not None:
            extent = (0, begin + encoding.extent[1])
        elif end == last[1] < len(texts[place]):
            extent = (0, end)
        encodings[row] = WindowEncoding(
            input_ids=encoding.input_ids,
            token_type_ids=encoding.token_type_ids,
            adapter=encoding.adapter,
            route=encoding.route,
            extent=extent,
            document=place,
            characters=(begin, end),
        )
    return encodings
