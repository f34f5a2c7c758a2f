"""What every task offers to the engine that runs it: heads, encodings, chunks of a large request, and the joined answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

from hybridtei.batch import Encoding, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.outputs import Floats, HeadOutputs
from hybridtei.text.reader import TextReader

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Model:
    """What tasks need to know of a loaded model. `query_weights` float32[v]: of one that looks its queries up."""

    spec: ModelSpec
    reader: TextReader
    query_weights: Floats | None = None


class Chunk(Protocol[Answer]):
    """What goes through the engine at once: a whole task, or some inputs of one that was split."""

    @property
    def size(self) -> int: ...

    @property
    def heads(self) -> frozenset[Head]: ...

    def prepare(self, model: Model) -> list[Encoding]: ...

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Answer: ...

    def knowing(self, first: Answer) -> Chunk[Answer]: ...

    def max_numbers(self, spec: ModelSpec, tokens: int) -> int: ...

    def numbers(self, answer: Answer) -> int: ...


class Task(Protocol[Answer]):
    """What a caller can ask; asking the same twice gives the same answer. `ListTask` has what most tasks share."""

    needs_first: ClassVar[bool]

    @property
    def size(self) -> int: ...

    def for_model(self, spec: ModelSpec) -> Task[Answer]: ...

    def check(self, spec: ModelSpec) -> None: ...

    def split(self, max_inputs: int) -> Iterator[Chunk[Answer]]: ...

    def join(self, answers: Sequence[Answer]) -> Answer: ...


class ListTask:
    """A task about each of `inputs`. `needs_first`: the first chunk's answer has to be known before the others run."""

    __slots__ = ()
    needs_first: ClassVar[bool] = False
    inputs: Sequence[Any]

    @property
    def size(self) -> int:
        """How many inputs; each takes a permit."""
        return len(self.inputs)

    def for_model(self, spec: ModelSpec) -> Any:
        """The task that answers this one on a model."""
        return self

    def split(self, max_inputs: int) -> Iterator[Self]:
        """The same task about at most `max_inputs` inputs each, in order; always at least one."""
        if len(self.inputs) <= max_inputs:
            yield self
            return
        for begin in range(0, len(self.inputs), max_inputs):
            yield replace(self, inputs=self.inputs[begin : begin + max_inputs])  # type: ignore[type-var,unused-ignore]

    def knowing(self, first: Any) -> Self:
        """With what the answer of the first chunk spares this one."""
        return self

    def join(self, answers: Sequence[Any]) -> Any:
        """One answer from those of all chunks, in order."""
        return [item for answer in answers for item in answer]

    def max_numbers(self, spec: ModelSpec, tokens: int) -> int:
        """How many numbers the answer holds at most of those that it has for each of so many tokens."""
        return 0

    def numbers(self, answer: Any) -> int:
        """How many numbers an answer holds, about; 0 where they are few."""
        return 0
