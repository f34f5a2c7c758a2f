"""Distillation of the teacher into the heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from hybridtei.heads.train.batches import Batch, Packed, PairStates, batch_count, batches
from hybridtei.heads.train.heads import MultiVectorHead, SparseHead, keep_tokens, maxsim, term_matrix, text_of_token
from hybridtei.heads.train.trunk import autocast

WARMUP = 0.05  # share of the steps over which the learning rate rises; after them it falls linearly to 0


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    epochs: int
    learning_rate: float
    group_size: int  # neighbours that stay together
    groups: int  # groups in a batch
    prefixes: tuple[int, ...]  # dimensions of the multi-vector head that are each trained to do on their own
    drop: str  # tokens without a vector: "first", "specials" or "none"
    seed: int
    dtype: torch.dtype = torch.float32  # the heads' matrix products are computed in


class Students(nn.Module):
    """The heads in training, with one free temperature for each way in which they score."""

    def __init__(self, sparse: SparseHead, multivector: MultiVectorHead, special_ids: Sequence[int], recipe: Recipe) -> None:
        super().__init__()
        self.sparse, self.multivector = sparse, multivector
        self.special_ids, self.recipe = torch.tensor(list(special_ids)), recipe
        self.log_scale = nn.ParameterDict({"sparse": torch.tensor(0.0)})
        self.log_scale.update({f"maxsim{dim}": torch.tensor(3.5) for dim in recipe.prefixes})

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Return the distillation loss (Kullback-Leibler) of each way of scoring, in nats a query."""
        target = batch.teacher.log_softmax(-1)
        scores = {"sparse": self.sparse_scores(batch)} | self.maxsim_scores(batch)
        return {
            name: functional.kl_div(
                (score * self.log_scale[name].exp()).log_softmax(-1), target, reduction="batchmean", log_target=True
            )
            for name, score in scores.items()
        }

    def sparse_scores(self, batch: Batch) -> Tensor:
        """Return the dot products [queries, texts] over the terms of the queries.

        The idf stays out: trained with it on the query's weights, the head ranked no better with it and worse without.
        """
        terms = torch.unique(batch.queries.input_ids)
        terms = terms[~torch.isin(terms, self.special_ids)]
        columns = torch.full((1 + int(max(side.input_ids.max() for side in (batch.queries, batch.texts))),), -1)
        columns[terms] = torch.arange(len(terms))
        queries, texts = (self._terms(side, columns) for side in (batch.queries, batch.texts))
        return queries @ texts.T

    def _terms(self, side: Packed, columns: Tensor) -> Tensor:
        with autocast(self.recipe.dtype):
            weights = self.sparse(side.hidden_states, side.embeddings)
        return term_matrix(weights, side.input_ids, side.cu_seqlens, columns)

    def maxsim_scores(self, batch: Batch) -> dict[str, Tensor]:
        """Return the late interaction scores [queries, texts] of every trained prefix."""
        scores: dict[str, Tensor] = {}
        with autocast(self.recipe.dtype):
            (queries, query_cu), (texts, text_cu) = (self._projected(side) for side in (batch.queries, batch.texts))
            for dim in self.recipe.prefixes:
                query_vectors, text_vectors = (functional.normalize(side[:, :dim], dim=-1) for side in (queries, texts))
                scores[f"maxsim{dim}"] = maxsim(query_vectors, query_cu, text_vectors, text_cu)
        return scores

    def _projected(self, side: Packed) -> tuple[Tensor, Tensor]:
        """Return the projections [kept tokens, dim], fp32, and their cu_seqlens."""
        keep = keep_tokens(side.input_ids, side.cu_seqlens, self.recipe.drop, self.special_ids)
        lengths = torch.bincount(text_of_token(side.cu_seqlens)[keep], minlength=len(side.cu_seqlens) - 1)
        return self.multivector(side.hidden_states[keep]).float(), functional.pad(lengths.cumsum(0), (1, 0))


def fit(students: Students, data: PairStates) -> list[dict[str, float]]:
    """Train the heads in place; return the mean losses of each epoch. The same seed gives the same weights."""
    recipe = students.recipe
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(students.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    steps = recipe.epochs * batch_count(data, recipe.group_size, recipe.groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    history: list[dict[str, float]] = []
    with tqdm(total=steps, desc="training", unit="batch") as progress:
        for _ in range(recipe.epochs):
            sums: dict[str, float] = {}
            for batch in batches(data, recipe.group_size, recipe.groups, generator):
                losses = students.losses(batch)
                optimizer.zero_grad()
                torch.autograd.backward(torch.stack(list(losses.values())).sum())
                optimizer.step()
                schedule.step()
                values = {name: loss.item() for name, loss in losses.items()}
                sums = {name: sums.get(name, 0.0) + value for name, value in values.items()}
                progress.set_postfix({name: f"{value:.3f}" for name, value in values.items()}, refresh=False)
                progress.update()
            history.append({name: total * recipe.epochs / steps for name, total in sums.items()})
    return history


def _rate(step: int, steps: int) -> float:
    warmup = max(1, math.ceil(steps * WARMUP))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
