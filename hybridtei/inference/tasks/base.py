"""What every task offers to the engine that runs it: heads, encodings, chunks of a large request, and the joined answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, Self, TypeVar

from hybridtei.batch import Encoding, Head
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.reader import TextReader
from hybridtei.outputs import Floats, HeadOutputs

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model as tasks see it. `query_weights` float32[v]: of a model that looks its queries up. `query`: the model that
    reads queries, see `ModelSpec.query`."""

    spec: ModelSpec
    reader: TextReader
    query_weights: Floats | None = None
    query: Model | None = None

    @property
    def mark_ids(self) -> frozenset[int]:
        """Return the ids of punctuation and special tokens."""
        return self.spec.removed_ids | self.reader.tokenizer.punctuation_ids


class Chunk(Protocol[Answer]):
    """The part of a task that goes through the engine at once: all of its inputs, or some."""

    @property
    def size(self) -> int: ...

    @property
    def heads(self) -> frozenset[Head]: ...

    def prepare(self, model: Model) -> list[Encoding]: ...

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Answer: ...

    def knowing(self, first: Answer) -> Chunk[Answer]: ...

    def max_numbers(self, spec: ModelSpec, tokens: int) -> int: ...

    def numbers(self, answer: Answer) -> int: ...

    def finishes_aside(self, spec: ModelSpec) -> bool: ...


class Task(Protocol[Answer]):
    """What a caller can ask of a model; equal tasks have equal answers. `ListTask` has what most tasks share."""

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
        """Return the task that answers this one on a model."""
        return self

    def split(self, max_inputs: int) -> Iterator[Self]:
        """Yield the same task for at most `max_inputs` inputs each, in order; at least once."""
        if len(self.inputs) <= max_inputs:
            yield self
            return
        for begin in range(0, len(self.inputs), max_inputs):
            yield replace(self, inputs=self.inputs[begin : begin + max_inputs])  # type: ignore[type-var,unused-ignore]

    def knowing(self, first: Any) -> Self:
        """Return the chunk with what it can reuse of the first chunk's answer."""
        return self

    def join(self, answers: Sequence[Any]) -> Any:
        """Return one answer from those of all chunks, in order."""
        return [item for answer in answers for item in answer]

    def max_numbers(self, spec: ModelSpec, tokens: int) -> int:
        """Return an upper bound of the numbers that the answer holds for so many tokens; 0 where they are few."""
        return 0

    def numbers(self, answer: Any) -> int:
        """Return about how many numbers an answer holds; 0 where they are few."""
        return 0

    def finishes_aside(self, spec: ModelSpec) -> bool:
        """Whether `finish` computes for so long that it would block an event loop."""
        return False
