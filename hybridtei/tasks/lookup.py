"""Queries of an inference-free model: no pass, only a look into a table. Each word counts once, however often it comes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridtei.batch import Encoding, Head
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.outputs import Embeddings, HeadOutputs, SparseVectors
from hybridtei.ragged import Ragged
from hybridtei.tasks.embed import Embed, Model


@dataclass(frozen=True, slots=True)
class LookUp:
    """What `task` asks, without a pass: it wants no head of one."""

    task: Embed

    @property
    def heads(self) -> frozenset[Head]:
        return frozenset()

    def check(self, spec: ModelSpec) -> None:
        """Raises as `Embed.check` does."""
        self.task.check(spec)

    def prepare(self, model: Model) -> list[Encoding]:
        """Tokenise, without special tokens. Raises RequestError."""
        task = self.task
        return model.reader.read(
            task.inputs, truncate=task.truncate, direction=task.direction, prompt_name=task.prompt_name, special_tokens=False
        )

    def finish(self, model: Model, encodings: Sequence[Encoding], outputs: HeadOutputs) -> Embeddings:
        """The weights of each query's words."""
        assert model.query_weights is not None
        rows = [np.unique(encoding.input_ids) for encoding in encodings]
        rows = [row[model.query_weights[row] != 0] for row in rows]
        found = Ragged.from_rows(rows)
        return Embeddings(
            sparse=SparseVectors(found.values, model.query_weights[found.values], found.offsets, len(model.query_weights))
        )


def embed_task(spec: ModelSpec, task: Embed) -> Embed | LookUp:
    """The task that answers what `task` asks of a model."""
    looks_up = spec.sparse is not None and spec.sparse.queries is not None
    return LookUp(task) if looks_up and task.input_type == "query" else task
