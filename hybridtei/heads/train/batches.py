"""Training batches with their teacher."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hybridtei.heads.train.cache import TokenStates
from hybridtei.heads.train.groups import neighbour_groups
from hybridtei.heads.train.heads import maxsim
from hybridtei.heads.train.trunk import autocast


@dataclass(frozen=True)
class Teacher:
    """How the trunk's own similarities become logits: dense cosine and mean MaxSim, each over its temperature."""

    dense_temperature: float
    maxsim_temperature: float
    dtype: torch.dtype = torch.float32  # the matrix products are computed in


@dataclass(frozen=True)
class Packed:
    """Texts of one side of a batch, packed."""

    hidden_states: Tensor  # [tokens, hidden_size]
    embeddings: Tensor  # [tokens, hidden_size], layer-normed word embeddings
    input_ids: Tensor  # [tokens]
    cu_seqlens: Tensor  # [texts + 1]


@dataclass(frozen=True)
class Batch:
    """Queries and texts, row i of one answering row i of the other, and the teacher's opinion of all combinations."""

    queries: Packed
    texts: Packed
    teacher: Tensor  # [queries, texts], logits


@dataclass(frozen=True)
class PairStates:
    """Everything the batches are cut from. Of n pairs, states 0..n-1 are the queries, n..2n-1 the texts."""

    states: TokenStates
    dense: Tensor  # [2n, hidden_size], unit
    word_embeddings: Tensor  # [vocabulary, hidden_size]
    teacher: Teacher

    def __len__(self) -> int:
        return len(self.states) // 2

    def packed(self, rows: list[int]) -> Packed:
        """Return the chosen texts with their embeddings looked up."""
        hidden_states, input_ids, cu_seqlens = self.states.rows(rows)
        embeddings = self.word_embeddings[input_ids]
        return Packed(hidden_states, functional.layer_norm(embeddings, embeddings.shape[-1:]), input_ids, cu_seqlens)


def batches(data: PairStates, group_size: int, groups: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield one epoch of batches, each of `groups` groups of `group_size` neighbouring texts, in random order."""
    grouped = neighbour_groups(data.dense[len(data) :], group_size, generator)
    order = torch.randperm(len(grouped), generator=generator).tolist()
    for start in range(0, len(order), groups):
        rows: list[int] = torch.cat([grouped[group] for group in order[start : start + groups]]).tolist()
        yield _batch(data, rows)


def batch_count(data: PairStates, group_size: int, groups: int) -> int:
    """Return how many batches an epoch has."""
    return math.ceil(math.ceil(len(data) / group_size) / groups)


@torch.no_grad()
def _batch(data: PairStates, rows: list[int]) -> Batch:
    texts_at = [row + len(data) for row in rows]
    queries, texts = data.packed(rows), data.packed(texts_at)
    dense = data.dense[rows] @ data.dense[texts_at].T
    query_vectors, text_vectors = (functional.normalize(side.hidden_states, dim=-1) for side in (queries, texts))
    with autocast(data.teacher.dtype):
        late = maxsim(query_vectors, queries.cu_seqlens, text_vectors, texts.cu_seqlens)
    return Batch(queries, texts, dense / data.teacher.dense_temperature + late / data.teacher.maxsim_temperature)
