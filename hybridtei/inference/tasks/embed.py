"""Embedding: texts or ids -> dense, sparse and multi-vectors, or token states.

Options that need no separate pass, such as cutting and normalisation, are applied in `finish`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hybridtei.batch import (
    EMBEDDINGS,
    UNKNOWN,
    Encoding,
    Head,
    Ids,
    LocatedEncoding,
    Offsets,
    Ragged,
    WindowPlace,
    kept_tokens,
    offsets_of,
    runs,
    with_shared_prefix,
)
from hybridtei.errors import InvalidDimensions, InvalidInput, UnsupportedHead
from hybridtei.inference.tasks.base import Model, Task
from hybridtei.inference.tasks.pooling import (
    budgeted,
    heaviest,
    pooled,
    splade_vectors,
    without_marks,
    without_rows,
)
from hybridtei.inference.tasks.windows import (
    BEGINNING,
    MAX_CHUNK_CHARACTERS,
    WINDOWS_AT_ONCE,
    in_windows,
    joined,
)
from hybridtei.models.checkpoint.kinds import Late
from hybridtei.models.checkpoint.late import USUAL, Side
from hybridtei.models.checkpoint.sentence import PROMPTS
from hybridtei.models.checkpoint.spec import ModelSpec, Router
from hybridtei.models.text.reader import Input, TextReader, of_side
from hybridtei.models.text.tokenizer import Prompts
from hybridtei.options import EmbedOptions, InputType, MultivectorBudget
from hybridtei.outputs import Embeddings, Floats, HeadOutputs, SparseVectors, cut, max_weights, unit

# Of a text whose windows' vectors are averaged, so it is read at once
MAX_WINDOWS = WINDOWS_AT_ONCE

WITHOUT_PROMPT = (
    "the model pools without a prompt's tokens (`include_prompt` false), which is not supported"
)


# Not frozen: each request makes one, and a frozen class sets its fields three times slower.
@dataclass(slots=True, unsafe_hash=True)
class Embed(Task[Embeddings]):
    """Embed `inputs`. `dimensions` cuts dense vectors, and wider multi-vectors. `input_type`: for
    models that treat queries differently; None means "document" for these."""

    embeds: ClassVar[bool] = True
    inputs: Sequence[Input]
    heads: frozenset[Head]
    options: EmbedOptions = field(default_factory=EmbedOptions)

    def for_model(self, spec: ModelSpec) -> Embed | LookUp:
        """`LookUp` if the request asks for the table, or for a query of a model that looks queries
        up; `EmbedWindows` if long texts are read in windows."""
        options = self.options
        side = options.input_type or getattr(spec.kind, "default", None)
        is_query = side == "query" and spec.sparse and spec.sparse.queries
        if is_query or options.query_encoder == "table":
            return LookUp(self)
        if options.long_inputs == "mean":
            return EmbedWindows(self.inputs, self.heads, options)
        return self

    def lacks_side(self, prompts: Prompts) -> bool:
        if self.options.query_encoder == "table" or self.options.input_type is not None:
            return False
        return not prompts.named(self.prompt(prompts))

    def check(self, spec: ModelSpec) -> None:
        options = self.options
        if options.dimensions is not None and options.dimensions < 1:
            # TEI checks this before it checks the model
            raise InvalidDimensions("`dimensions` should be positive")
        if spec.role != "embedding":
            raise UnsupportedHead("Model is not an embedding model")
        missing = self.heads - spec.heads
        if missing:
            raise UnsupportedHead(
                f"Model has no {_listed(missing)} output. It has: {', '.join(sorted(spec.heads))}"
            )
        if isinstance(spec.kind, Router) and self.route(spec) is None:
            raise InvalidInput(
                "`input_type` is missing: the model has a router with a query and a document "
                "route, and no `default_route`"
            )
        if options.query_encoder == "table" and (
            self.heads != {Head.SPARSE} or options.input_type == "document"
        ):
            raise InvalidInput(
                '`query_encoder` "table" makes sparse vectors of queries and nothing else'
            )
        if options.query_encoder == "table" and not (spec.sparse and spec.sparse.can_look_up):
            raise UnsupportedHead(
                '`query_encoder` "table": the model has no table of what tokens weigh in queries'
            )
        if options.long_inputs == "mean" and not self.reads_windows(spec):
            raise InvalidInput(
                '`long_inputs` "mean" is not for `tokens`, nor for queries that the model expands '
                "or looks up: leave it out"
            )

    def reads_windows(self, spec: ModelSpec) -> bool:
        """True if long texts can be read in windows."""
        side = self.side(spec)
        if isinstance(self.for_model(spec), LookUp) or Head.TOKENS in self.heads:
            return False
        return side.expansion is None

    def prepare(self, model: Model) -> list[Encoding]:
        if self.options.max_tokens is not None:
            model = model.limited(self.options.max_tokens)
        encodings = self.read(model, allow_empty=False)
        if self.options.long_inputs == "mean":
            encodings = self._not_cut(model, encodings)
        if self.options.dimensions is not None:
            self.check_width(model.spec)
        return with_shared_prefix(encodings) if model.spec.pooling == ("lasttoken",) else encodings

    def check_width(self, spec: ModelSpec) -> None:
        """Raises InvalidDimensions if the model's vectors are shorter than requested."""
        dimensions = self.options.dimensions
        if dimensions is not None and dimensions > self._width(spec):
            raise InvalidDimensions(
                "`dimensions` should be smaller than the maximum embedding dimension.",
                self._width(spec),
            )

    def read(self, model: Model, *, allow_empty: bool = True) -> list[Encoding]:
        """Tokenise without further checks. Raises RequestError."""
        if model.query is not None and self.route(model.spec) == "query":
            return [
                replace(encoding, route=1)
                for encoding in self.read(model.query, allow_empty=allow_empty)
            ]
        reader, name = self._reader(model)
        if (
            not model.spec.kind.pools_prompts
            and Head.DENSE in self.heads
            and reader.prompts.named(name)
        ):
            raise InvalidInput(
                f"a prompt goes before the inputs, and {WITHOUT_PROMPT}: send an empty one, or none"
            )
        return reader.read(
            self.inputs,
            truncate=self.options.truncate is not False,
            direction=self.options.truncation_direction,
            prompt_name=name,
            allow_empty=allow_empty,
        )

    def in_windows(
        self, model: Model, limit: int, first: int = 0, start: WindowPlace = BEGINNING
    ) -> list[Encoding]:
        """Tokenise texts, long ones in at most `limit` windows. `first`, `start`: as for
        `windows.in_windows`. Raises RequestError."""
        of_route = model
        if model.query is not None and self.route(model.spec) == "query":
            of_route = model.query
        # Some tokenizers make no token of an empty text
        (point,) = replace(self, inputs=["."]).read(model)
        return in_windows(
            of_route.reader,
            [str(item) for item in self.inputs],
            len(point) - 1,
            self.longest(of_route),
            lambda parts: replace(self, inputs=parts).read(model),
            limit=limit,
            truncate=self.options.truncate is not False,
            first=first,
            start=start,
        )

    def _not_cut(self, model: Model, encodings: Sequence[Encoding]) -> list[Encoding]:
        """Replace the encodings of texts that were cut by those of their windows."""
        replaced: list[Encoding] = []
        for place, encoding in enumerate(encodings):
            if encoding.extent in (None, UNKNOWN):
                replaced.append(encoding)
                continue
            text = replace(self, inputs=self.inputs[place : place + 1])
            replaced += text.in_windows(model, MAX_WINDOWS, place)
        return replaced

    def locate(
        self, model: Model, *, times: int = 1, allow_empty: bool = False
    ) -> list[LocatedEncoding]:
        """Tokenise texts like `read`, with each token's place. Late-interaction models need inputs
        that are not expanded.
        `times`: as for `TextReader.locate`. Raises RequestError."""
        reader, name = self._reader(model)
        return reader.locate(
            [str(item) for item in self.inputs],
            truncate=self.options.truncate is not False,
            direction=self.options.truncation_direction,
            prompt_name=name,
            allow_empty=allow_empty,
            times=times,
        )

    def longest(self, model: Model) -> int:
        """The most tokens of an input."""
        side = self.side(model.spec)
        return min(side.length or model.reader.max_input_length, model.reader.max_input_length)

    def _reader(self, model: Model) -> tuple[TextReader, str | None]:
        """Return the reader of the inputs, and the name of their prompt."""
        if isinstance(model.spec.kind, Late):
            reader = of_side(model.reader, self.side(model.spec))
            if self.options.prompt_name in PROMPTS:
                reader.prompts.named(self.options.prompt_name)
                return reader, None
            return reader, self.options.prompt_name
        return model.reader, self.prompt(model.reader.prompts)

    def prompt(self, prompts: Prompts) -> str | None:
        """Return the name of the inputs' prompt: the request's, else their type's, else, of inputs
        without a type, the checkpoint's default. None: the server's default."""
        options = self.options
        name = options.prompt_name or prompt_of(options.input_type, prompts.table or ())
        if name is None and options.input_type is None and options.uses_default_prompt:
            return prompts.own
        return name

    def route(self, spec: ModelSpec) -> str | None:
        """Return the router's route of the inputs."""
        return self.kind or getattr(spec.kind, "default", None)

    @property
    def kind(self) -> str | None:
        """The inputs' type: the request's, or that of a prompt with a type's name."""
        of_prompt = next(
            (kind for kind, names in PROMPTS.items() if self.options.prompt_name in names), None
        )
        return self.options.input_type or of_prompt

    def max_numbers(self, spec: ModelSpec, tokens: int) -> int:
        states = spec.hidden_size if Head.TOKENS in self.heads else 0
        if Head.MULTIVECTOR not in self.heads or spec.multivector is None:
            return tokens * states
        width, rows = spec.multivector_width, tokens
        if self._budget is not None:
            rows = min(tokens, len(self.inputs) * (self._budget.max_tokens or tokens))
        return tokens * states + rows * min(self.options.dimensions or width, width)

    def finishes_aside(self, spec: ModelSpec) -> bool:
        return Head.MULTIVECTOR in self.heads and (
            self._budget is not None or self.side(spec).pooling is not None
        )

    def finish(
        self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs
    ) -> Embeddings:
        """Cut, normalise and merge the pass's outputs."""
        outputs = outputs.only(self.heads)
        if self.options.long_inputs == "mean":
            outputs = joined(encodings, outputs)
        spec, columns = model.spec, dict[str, Any]()
        if outputs.dense is not None:
            columns["dense"] = self.scaled(spec, outputs.dense)
        if outputs.multivector is not None:
            columns["multivector"] = self._multivector(model, encodings, outputs.multivector)
        if outputs.token_weights is not None:
            weights = outputs.token_weights
            input_ids = np.concatenate([encoding.input_ids for encoding in encodings])
            columns["sparse"] = max_weights(
                input_ids, weights.values, weights.offsets, spec.removed_ids, spec.vocab_size
            )
        elif outputs.splade is not None:
            columns["sparse"] = splade_vectors(spec, outputs.splade)
        if outputs.tokens is not None:
            columns["tokens"] = outputs.tokens
        return Embeddings(**columns)

    def _width(self, spec: ModelSpec) -> int:
        if Head.MULTIVECTOR in self.heads and Head.DENSE not in self.heads:
            return spec.multivector_width
        return spec.dense_width

    def scaled(self, spec: ModelSpec, dense: Floats) -> Floats:
        """Cut and normalise."""
        dense = cut(dense, self.options.dimensions or spec.dense_width)
        return unit(dense) if self.options.normalize else np.ascontiguousarray(dense)

    def _multivector(self, model: Model, encodings: Sequence[Encoding], rows: Ragged) -> Ragged:
        spec, side, budget = model.spec, self.side(model.spec), self._budget
        if side is USUAL and budget is None:
            return Ragged(unit(cut(rows.values, self.options.dimensions)), rows.offsets)
        merges = budget is not None and budget.max_tokens is not None
        if not (merges or side.skipped):
            return self.merged(model, side, rows)
        input_ids = np.concatenate([encoding.input_ids for encoding in encodings])
        cu_seqlens = offsets_of([len(encoding) for encoding in encodings])
        input_ids = input_ids[have_vectors(spec, input_ids, cu_seqlens)]
        if side.skipped:
            skipped = np.isin(input_ids, list(side.skipped))
            rows, input_ids = without_rows(rows, skipped), input_ids[~skipped]
        return self.merged(model, side, rows, input_ids)

    def merged(
        self, model: Model, side: Side, rows: Ragged, input_ids: Ids | None = None
    ) -> Ragged:
        """Cut, merge and normalise multi-vectors as the checkpoint and the request specify.
        `input_ids`: each row's token, if the request's budget merges."""
        rows = Ragged(cut(rows.values, self.options.dimensions), rows.offsets)
        budget, pooling = self._budget, side.pooling
        if side.is_unit and (pooling is not None or budget is None):
            rows = Ragged(unit(rows.values), rows.offsets)
        if pooling is not None:
            rows = pooled(rows, pooling)
        elif budget is not None and budget.max_tokens is not None and input_ids is not None:
            is_mark = np.isin(input_ids, list(model.mark_ids))
            rows = without_marks(rows, is_mark, budget.max_tokens)
        return rows if budget is None else budgeted(rows, budget)

    @property
    def _budget(self) -> MultivectorBudget | None:
        budget = self.options.multivector
        if budget is None or budget.is_full or self.options.input_type == "query":
            return None
        return budget

    def bits_of(self, spec: ModelSpec) -> int | None:
        """Return the width of the multi-vectors if they are bits, else None."""
        if self._budget is None or self._budget.dtype != "binary" or spec.multivector is None:
            return None
        return min(self.options.dimensions or spec.multivector_width, spec.multivector_width)

    @property
    def is_small(self) -> bool:
        """True if multi-vectors are quantised."""
        return self._budget is not None and self._budget.dtype != "float"

    def side(self, spec: ModelSpec) -> Side:
        """Return the model's settings for the inputs."""
        is_query = isinstance(spec.kind, Late) and self.kind == "query"
        return spec.kind.query if is_query else spec.kind.document


def heads_named(names: Iterable[str]) -> frozenset[Head]:
    """Return the heads of these names. Raises InvalidInput for an unknown name or an empty list."""
    names = [names] if isinstance(names, str) else list(names)
    choices = sorted(EMBEDDINGS)
    unknown = [repr(name) for name in names if name not in choices]
    if not names or unknown:
        wrong = unknown[0] if unknown else "nothing"
        raise InvalidInput(f"`outputs` names {wrong}; known: {', '.join(choices)}")
    return frozenset(map(Head, names))


def no_rows(heads: frozenset[Head], spec: ModelSpec) -> Embeddings:
    """Return the embeddings of an empty list, with the right widths."""
    # The offsets of no rows, and their values
    offsets = np.zeros(1, dtype=np.int64)
    empty = np.zeros(0, dtype=np.float32)
    columns: dict[Head, Any] = {
        Head.DENSE: empty.reshape(0, spec.dense_width),
        Head.SPARSE: SparseVectors(offsets[:0], empty, offsets, spec.sparse_width),
        Head.MULTIVECTOR: Ragged(empty.reshape(0, spec.multivector_width), offsets),
        Head.TOKENS: Ragged(empty.reshape(0, spec.hidden_size), offsets),
    }
    return Embeddings(**{head: columns[head] for head in heads})


def check_spelled(spec: ModelSpec) -> None:
    """Raises UnsupportedHead if sparse vectors are over latents, which have no pieces in the
    vocabulary."""
    if spec.sparse is not None and spec.sparse.kind == "code":
        raise UnsupportedHead(
            "Sparse vectors of a SparseAutoEncoder are over latents, which no token of the "
            "vocabulary spells"
        )


def prompt_of(input_type: InputType | None, names: Collection[str]) -> str | None:
    """Return the name of a model's prompt for a type of inputs, or None."""
    if input_type is not None:
        for name in PROMPTS[input_type]:
            if name in names:
                return name
    return None


def have_vectors(spec: ModelSpec, input_ids: Ids, cu_seqlens: Offsets) -> NDArray[np.bool_]:
    """Return the mask bool[t] of a batch's tokens that have a row in its multi-vectors."""
    assert spec.multivector is not None
    special = np.array(sorted(spec.removed_ids), dtype=np.int64)
    return kept_tokens(spec.multivector.drop, input_ids, cu_seqlens, special)[0]


def _listed(heads: frozenset[Head]) -> str:
    return ", ".join(f"`{head}`" for head in sorted(heads))


class EmbedWindows(Embed):
    """Embed texts, long ones in windows. Its chunks have at most `MAX_CHUNK_CHARACTERS`, or one
    text."""

    __slots__ = ()
    splits_itself: ClassVar[bool] = True

    def for_model(self, spec: ModelSpec) -> EmbedWindows:
        return self

    def split(self, max_inputs: int) -> Sequence[EmbedWindows]:
        sizes = [len(item) for item in self.inputs]
        return [
            self._of(begin, end) for begin, end in runs(sizes, MAX_CHUNK_CHARACTERS, max_inputs)
        ]


@dataclass(frozen=True, slots=True)
class LookUp(Task[Embeddings]):
    """Answers `task` without a pass. Its `heads` are empty."""

    task: Embed
    heads: ClassVar[frozenset[Head]] = frozenset()

    @property
    def size(self) -> int:
        return self.task.size

    def check(self, spec: ModelSpec) -> None:
        self.task.check(spec)

    def prepare(self, model: Model) -> list[Encoding]:
        """Tokenise, without special tokens. Raises RequestError."""
        options = self.task.options
        reader = model.query_words(options.max_tokens)
        name = options.prompt_name
        if model.query_reader is not None:
            name = self.task.prompt(reader.prompts)
        return reader.read(
            self.task.inputs,
            truncate=options.truncate is not False,
            direction=options.truncation_direction,
            prompt_name=name,
            special_tokens=False,
        )

    def _of(self, begin: int, end: int) -> LookUp:
        return LookUp(self.task._of(begin, end))

    def finish(
        self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs
    ) -> Embeddings:
        """Return the weights of each query's words."""
        assert model.query_weights is not None
        rows = [np.unique(encoding.input_ids) for encoding in encodings]
        rows = [row[model.query_weights[row] != 0] for row in rows]
        words = Ragged.from_rows(rows)
        sparse = SparseVectors(
            words.values, model.query_weights[words.values], words.offsets, len(model.query_weights)
        )
        limit = 0 if model.spec.sparse is None else model.spec.sparse.active
        return Embeddings(sparse=heaviest(sparse, limit) if limit else sparse)


def cosine(vector: Floats, many: Floats) -> Floats:
    """The cosines float32[n] of float32[d] to each row of float32[n, d]."""
    return np.asarray(unit(many) @ unit(vector[None])[0])
