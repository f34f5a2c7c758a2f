"""What every task offers to the engine that runs it: heads, encodings, chunks of a large request, and the joined answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from hybridtei.batch import Encoding, Head
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.reader import TextReader
from hybridtei.outputs import Embeddings, Floats, HeadOutputs

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


class Task(Generic[Answer]):
    """What a caller can ask of a model about each of `inputs`; equal tasks have equal answers.

    A large task is split into chunks, which are tasks too; each goes through the engine at once. `needs_first`: the first
    chunk's answer has to be known before the others run.
    """

    __slots__ = ()
    needs_first: ClassVar[bool] = False
    inputs: Sequence[Any]
    if TYPE_CHECKING:  # no attribute, which a dataclass would take for its field's default

        @property
        def heads(self) -> frozenset[Head]: ...

    @property
    def size(self) -> int:
        """How many inputs; each takes a permit."""
        return len(self.inputs)

    def for_model(self, spec: ModelSpec) -> Task[Answer]:
        """Return the task that answers this one on a model."""
        return self

    def check(self, spec: ModelSpec) -> None:
        """Raises UnsupportedHead, in TEI's words, or InvalidInput, for what can be told without reading the inputs."""
        raise NotImplementedError

    def split(self, max_inputs: int) -> Iterator[Task[Answer]]:
        """Yield chunks: the same task for at most `max_inputs` inputs each, in order; at least one."""
        for begin in range(0, max(self.size, 1), max_inputs):
            yield self if self.size <= max_inputs else self._of(begin, begin + max_inputs)

    def _of(self, begin: int, end: int) -> Self:
        return replace(self, inputs=self.inputs[begin:end])  # type: ignore[type-var,unused-ignore]

    def knowing(self, first: Answer) -> Task[Answer]:
        """Return the chunk with what it can reuse of the first chunk's answer."""
        return self

    def prepare(self, model: Model) -> list[Encoding]:
        """Tokenise a chunk. Raises RequestError."""
        raise NotImplementedError

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Answer:
        """Return a chunk's answer. Raises NotANumber."""
        raise NotImplementedError

    def join(self, answers: Sequence[Answer]) -> Answer:
        """Return one answer from those of all chunks, in order."""
        kind: Any = type(answers[0])
        joined: Answer = kind.concat(answers)
        return joined

    def max_numbers(self, spec: ModelSpec, tokens: int) -> int:
        """Return an upper bound of the numbers that the answer holds for this number of tokens; 0 where they are few."""
        return 0

    def numbers(self, answer: Answer) -> int:
        """Return about how many numbers an answer holds; 0 where they are few."""
        return answer.numbers if isinstance(answer, Embeddings) else 0

    def finishes_aside(self, spec: ModelSpec) -> bool:
        """Whether `finish` computes for so long that it would block an event loop."""
        return False
