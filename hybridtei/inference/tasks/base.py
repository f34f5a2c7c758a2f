"""The interface of tasks: their heads, encodings, the chunks of a large request, and the joined
answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from hybridtei.batch import Encoding, Head
from hybridtei.models.checkpoint.spec import ModelSpec
from hybridtei.models.text.reader import TextReader
from hybridtei.models.text.tokenizer import Prompts
from hybridtei.outputs import Embeddings, Floats, HeadOutputs

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Model:
    """A loaded model for tasks. `query_weights` float32[v]: the table of a model that looks queries
    up. `query`: the model that reads queries (`Router.of_queries`). `query_reader`: the table's own
    tokenizer."""

    spec: ModelSpec
    reader: TextReader
    query_weights: Floats | None = None
    query: Model | None = None
    query_reader: TextReader | None = None

    def limited(self, tokens: int | None) -> Model:
        """Return this model, for inputs of at most `tokens` tokens, special tokens included. None
        or below 0: the model's length."""
        if tokens is None or tokens < 0:
            return self
        length = min(max(tokens, 1), self.reader.max_input_length)
        return replace(self, reader=replace(self.reader, max_input_length=length))

    def query_words(self, tokens: int | None) -> TextReader:
        """Return the reader of queries that are looked up, for at most `tokens` tokens."""
        return replace(self, reader=self.query_reader or self.reader).limited(tokens).reader

    @property
    def mark_ids(self) -> frozenset[int]:
        """Return the ids of punctuation and special tokens."""
        return self.spec.removed_ids | self.reader.tokenizer.punctuation_ids


class Task(Generic[Answer]):
    """A caller's question about each of `inputs`. Equal tasks have equal answers.

    A large task is split into chunks, which are tasks too. Each chunk goes through the engine as
    one request. `needs_first`: the others need the first chunk's answer before they run.
    `checks_first`: TEI checks the model before it takes permits.
    `splits_itself`: `split` bounds more than the number of inputs.
    `embeds`: its answer may be large (`max_numbers`), and queries may be looked up (`for_model`).
    """

    __slots__ = ()
    needs_first: ClassVar[bool] = False
    checks_first: ClassVar[bool] = False
    splits_itself: ClassVar[bool] = False
    embeds: ClassVar[bool] = False
    inputs: Sequence[Any]
    # A property, since a dataclass would take an attribute for the field's default
    if TYPE_CHECKING:

        @property
        def heads(self) -> frozenset[Head]: ...

    @property
    def size(self) -> int:
        """The number of inputs. Each takes a permit."""
        return len(self.inputs)

    def for_model(self, spec: ModelSpec) -> Task[Answer]:
        """Return the task that answers this one on `model`."""
        return self

    def lacks_side(self, prompts: Prompts) -> bool:
        """True if texts are embedded without a prompt, and neither as queries nor documents."""
        return False

    def check(self, spec: ModelSpec) -> None:
        """Check everything except the inputs. Raises UnsupportedHead, with TEI's message, or
        InvalidInput."""
        raise NotImplementedError

    def split(self, max_inputs: int) -> Sequence[Task[Answer]]:
        """Return chunks in order, at least one: the same task for at most `max_inputs` inputs
        each."""
        size = self.size
        if size <= max_inputs:
            return (self,)
        return [self._of(begin, begin + max_inputs) for begin in range(0, size, max_inputs)]

    def _of(self, begin: int, end: int) -> Self:
        return replace(self, inputs=self.inputs[begin:end])  # type: ignore[type-var,unused-ignore]

    def knowing(self, first: Answer) -> Task[Answer]:
        """Return the chunk with the reusable parts of the first chunk's answer."""
        return self

    def prepare(self, model: Model) -> list[Encoding]:
        """Tokenise a chunk. Raises RequestError."""
        raise NotImplementedError

    def rest(self, encodings: Sequence[Encoding]) -> Self | None:
        """Return the same task for what `prepare` has left for another pass; None: nothing."""
        return None

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Answer:
        """Return a chunk's answer. Raises NotANumber."""
        raise NotImplementedError

    def join(self, answers: Sequence[Answer]) -> Answer:
        """Return one answer from those of all chunks, in order."""
        kind: Any = type(answers[0])
        joined: Answer = kind.concat(answers)
        return joined

    def max_numbers(self, spec: ModelSpec, tokens: int) -> int:
        """Return an upper bound of the numbers in the answer for this number of tokens; 0 if they
        are few."""
        return 0

    def numbers(self, answer: Answer) -> int:
        """Return the approximate count of numbers in an answer; 0 if they are few."""
        return answer.numbers if isinstance(answer, Embeddings) else 0

    def finishes_aside(self, spec: ModelSpec) -> bool:
        """True if `finish` computes long enough to block an event loop."""
        return False
