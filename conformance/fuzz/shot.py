"""A fuzzer's messages: bytes for one connection, and the answers to them."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Shot:
    """Bytes for one connection. `answers`: the expected number; 0: the bytes are not a whole
    request, so no answer may come.

    `heads`: places of answers without a body, since HEAD asked for them. `leaves`: the client goes
    away without reading.
    """

    kind: str
    pieces: tuple[bytes, ...]
    answers: int = 1
    heads: frozenset[int] = frozenset()
    leaves: bool = False
    note: str = ""

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


@dataclass(slots=True)
class Reply:
    """One received answer."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Outcome:
    """The outcome of a shot: its replies, and how the connection ended."""

    replies: list[Reply] = field(default_factory=list)
    hung: bool = False
    closed: bool = False
    # The reason why the answer is not HTTP
    broken: str = ""
