"""Distillation of the teacher into the heads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

from hybridtei.batch import kept_tokens
from hybridtei.models.checkpoint.heads import METADATA_KEY
from hybridtei.models.heads.models import (
    MultivectorHeadModule,
    SparseHeadModule,
    TokenStates,
    autocast,
    maxsim,
    term_matrix,
)

# Share of the steps in which the learning rate rises; then it falls linearly to 0
WARMUP = 0.05


@dataclass(frozen=True)
class Recipe:
    """Settings of a training run."""

    epochs: int
    learning_rate: float
    # Neighbours in a group
    group_size: int
    # Groups in a batch
    groups: int
    # Leading dimensions of the multi-vector head that are trained to work alone
    prefixes: tuple[int, ...]
    # Tokens without a vector: "first", "specials" or "none"
    drop: str
    seed: int
    # Dtype of the heads' matrix products
    dtype: torch.dtype = torch.float32


class Students(nn.Module):
    """The heads in training, with one free temperature for each way of scoring."""

    def __init__(
        self,
        sparse: SparseHeadModule,
        multivector: MultivectorHeadModule,
        special_ids: Sequence[int],
        recipe: Recipe,
    ) -> None:
        super().__init__()
        self.sparse, self.multivector = sparse, multivector
        self.special_ids, self.recipe = torch.tensor(list(special_ids)), recipe
        self.log_scale = nn.ParameterDict({"sparse": torch.tensor(0.0)})
        self.log_scale.update({f"maxsim{dim}": torch.tensor(3.5) for dim in recipe.prefixes})

    def losses(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """Return the distillation loss (Kullback-Leibler) of each way of scoring, in nats a
        query."""
        target = batch.teacher.log_softmax(-1)
        scores = {"sparse": self.sparse_scores(batch)} | self.maxsim_scores(batch)
        return {
            name: functional.kl_div(
                (score * self.log_scale[name].exp()).log_softmax(-1),
                target,
                reduction="batchmean",
                log_target=True,
            )
            for name, score in scores.items()
        }

    def sparse_scores(self, batch: TrainingBatch) -> Tensor:
        """Return the dot products [queries, texts] over the terms of the queries.

        Without the idf: a head trained with idf on the query's weights ranked no better with it,
        and worse without it.
        """
        terms = torch.unique(batch.queries.input_ids)
        terms = terms[~torch.isin(terms, self.special_ids)]
        largest_id = int(max(side.input_ids.max() for side in (batch.queries, batch.texts)))
        columns = torch.full((largest_id + 1,), -1)
        columns[terms] = torch.arange(len(terms))
        queries, texts = (self._terms(side, columns) for side in (batch.queries, batch.texts))
        return queries @ texts.T

    def _terms(self, side: PackedTexts, columns: Tensor) -> Tensor:
        with autocast(self.recipe.dtype):
            weights = self.sparse(side.hidden_states, side.embeddings)
        return term_matrix(weights, side.input_ids, side.cu_seqlens, columns)

    def maxsim_scores(self, batch: TrainingBatch) -> dict[str, Tensor]:
        """Return the late interaction scores [queries, texts] of every trained prefix."""
        scores: dict[str, Tensor] = {}
        with autocast(self.recipe.dtype):
            (queries, query_cu), (texts, text_cu) = (
                self._projected(side) for side in (batch.queries, batch.texts)
            )
            for dim in self.recipe.prefixes:
                query_vectors, text_vectors = (
                    functional.normalize(side[:, :dim], dim=-1) for side in (queries, texts)
                )
                scores[f"maxsim{dim}"] = maxsim(query_vectors, query_cu, text_vectors, text_cu)
        return scores

    def _projected(self, side: PackedTexts) -> tuple[Tensor, Tensor]:
        """Return the projections [kept tokens, dim], fp32, and their cu_seqlens."""
        ids, offsets, specials = (
            tensor.numpy() for tensor in (side.input_ids, side.cu_seqlens, self.special_ids)
        )
        mask, mask_offsets = kept_tokens(self.recipe.drop, ids, offsets, specials)
        vectors = self.multivector(side.hidden_states[torch.from_numpy(mask)]).float()
        return vectors, torch.from_numpy(mask_offsets)


def fit(students: Students, data: PairStates) -> list[dict[str, float]]:
    """Train the heads in place; return the mean losses of each epoch. The same seed gives the same
    weights."""
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
                progress.set_postfix(
                    {name: f"{value:.3f}" for name, value in values.items()}, refresh=False
                )
                progress.update()
            history.append({name: total * recipe.epochs / steps for name, total in sums.items()})
    return history


def _rate(step: int, steps: int) -> float:
    warmup = max(1, math.ceil(steps * WARMUP))
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


PIVOT_SAMPLE = 256
LLOYD_STEPS = 2


def neighbour_groups(vectors: Tensor, size: int, generator: torch.Generator) -> list[Tensor]:
    """Split the rows of `vectors` [n, hidden_size] into groups of near neighbours; return their row
    numbers.

    Every group has exactly `size` rows, but one has the remainder if n is no multiple. The rows are
    halved again and again at the median along the line between two means: n log n work (exact
    neighbours: n^2), and the grouping depends on `generator`.
    """
    groups: list[Tensor] = []
    pending = [torch.arange(len(vectors))]
    while pending:
        rows = pending.pop()
        if len(rows) <= size:
            groups.append(rows)
            continue
        along = vectors[rows] @ _split_direction(vectors[rows], generator)
        order = rows[along.argsort(stable=True)]
        # A multiple of `size`, so that only one group can be smaller
        middle = max(1, round(len(rows) / size / 2)) * size
        pending += [order[middle:], order[:middle]]
    return groups


def _split_direction(vectors: Tensor, generator: torch.Generator) -> Tensor:
    """Return the line [hidden_size] between two means (two-means clustering of a sample, from two
    far points)."""
    draw = torch.randint(len(vectors), (min(PIVOT_SAMPLE, len(vectors)),), generator=generator)
    sample = vectors[draw]
    near = sample[0]
    far = sample[(sample @ near).argmin()]
    for _ in range(LLOYD_STEPS):
        side = sample @ (near - far) > 0
        if side.all() or not side.any():
            break
        near, far = sample[side].mean(0), sample[~side].mean(0)
    return near - far


@dataclass(frozen=True)
class Teacher:
    """Turns the trunk's similarities into logits: dense cosine and mean MaxSim, each divided by its
    temperature."""

    dense_temperature: float
    maxsim_temperature: float
    # Dtype of the matrix products
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class PackedTexts:
    """Texts of one side of a batch, packed."""

    # [tokens, hidden_size]
    hidden_states: Tensor
    # [tokens, hidden_size], layer-normed word embeddings
    embeddings: Tensor
    # [tokens]
    input_ids: Tensor
    # [texts + 1]
    cu_seqlens: Tensor


@dataclass(frozen=True)
class TrainingBatch:
    """Queries and texts (text i answers query i), and the teacher's logits of all combinations."""

    queries: PackedTexts
    texts: PackedTexts
    # [queries, texts], logits
    teacher: Tensor


@dataclass(frozen=True)
class PairStates:
    """The data of all batches. Of n pairs, states 0..n-1 are the queries, n..2n-1 the texts."""

    states: TokenStates
    # [2n, hidden_size], unit
    dense: Tensor
    # [vocabulary, hidden_size]
    word_embeddings: Tensor
    teacher: Teacher

    def __len__(self) -> int:
        return len(self.states) // 2

    def packed(self, rows: list[int]) -> PackedTexts:
        """Return the chosen texts with their embeddings looked up."""
        hidden_states, input_ids, cu_seqlens = self.states.rows(rows)
        embeddings = self.word_embeddings[input_ids]
        return PackedTexts(
            hidden_states,
            functional.layer_norm(embeddings, embeddings.shape[-1:]),
            input_ids,
            cu_seqlens,
        )


def batches(
    data: PairStates, group_size: int, groups: int, generator: torch.Generator
) -> Iterator[TrainingBatch]:
    """Yield one epoch of batches, each of `groups` groups of `group_size` neighbouring texts, in
    random order."""
    grouped = neighbour_groups(data.dense[len(data) :], group_size, generator)
    order = torch.randperm(len(grouped), generator=generator).tolist()
    for start in range(0, len(order), groups):
        rows: list[int] = torch.cat(
            [grouped[group] for group in order[start : start + groups]]
        ).tolist()
        yield _batch(data, rows)


def batch_count(data: PairStates, group_size: int, groups: int) -> int:
    """Return how many batches an epoch has."""
    return math.ceil(math.ceil(len(data) / group_size) / groups)


@torch.no_grad()
def _batch(data: PairStates, rows: list[int]) -> TrainingBatch:
    texts_at = [row + len(data) for row in rows]
    queries, texts = data.packed(rows), data.packed(texts_at)
    dense = data.dense[rows] @ data.dense[texts_at].T
    query_vectors, text_vectors = (
        functional.normalize(side.hidden_states, dim=-1) for side in (queries, texts)
    )
    with autocast(data.teacher.dtype):
        late = maxsim(query_vectors, queries.cu_seqlens, text_vectors, texts.cu_seqlens)
    return TrainingBatch(
        queries,
        texts,
        dense / data.teacher.dense_temperature + late / data.teacher.maxsim_temperature,
    )


FORMAT_VERSION = 1


@dataclass(frozen=True)
class Origin:
    """The origin of the heads: recorded in the file, but not needed to read it."""

    base_name: str
    # SHA-256 of the base model's model.safetensors
    base_sha256: str
    # Data, licence, date, command, seed
    training: Mapping[str, str | int | float]


def write_head_file(path: Path, students: Students, origin: Origin) -> None:
    """Write the heads to `path`, the same bytes for the same values.

    Raises ValueError if a weight is not finite in fp16.
    """
    tensors: dict[str, torch.Tensor] = {}
    for prefix, head in (("sparse", students.sparse), ("multivector", students.multivector)):
        for name, value in head.state_dict().items():
            half = value.to(torch.float16).contiguous()
            if not half.isfinite().all():
                raise ValueError(f"{prefix}.{name} does not fit fp16")
            tensors[f"{prefix}.{name}"] = half
    text = json.dumps(_describe(students, origin), sort_keys=True, separators=(",", ":"))
    path.write_bytes(save(dict(sorted(tensors.items())), metadata={METADATA_KEY: text}))


def _describe(students: Students, origin: Origin) -> dict[str, object]:
    sparse, multivector, recipe = students.sparse, students.multivector, students.recipe
    sparse_part: dict[str, object] = {"inputs": sparse.inputs, "idf": True}
    if sparse.hidden is not None:
        sparse_part["activation"] = sparse.activation
    return {
        "version": FORMAT_VERSION,
        "hidden_size": multivector.in_features,
        "base": {"name": origin.base_name, "sha256": origin.base_sha256},
        "sparse": sparse_part,
        "multivector": {
            "dim": multivector.out_features,
            "drop": recipe.drop,
            "prefixes": list(recipe.prefixes),
        },
        "training": dict(origin.training),
    }
