"""Laws of grouping and scoring, against plain loops."""

import pytest
import torch
from torch.nn import functional

from hybridtei.models.heads.fit import neighbour_groups
from hybridtei.models.heads.models import (
    MultivectorHeadModule,
    SparseHeadModule,
    maxsim,
    term_matrix,
)
from tests.near import near


def unit_rows(count, width, seed):
    return functional.normalize(
        torch.randn(count, width, generator=torch.Generator().manual_seed(seed)), dim=-1
    )


@pytest.mark.parametrize("count", [1, 15, 16, 17, 100, 257])
def test_groups_are_a_partition_into_full_groups(count):
    groups = neighbour_groups(unit_rows(count, 8, seed=count), 16, torch.Generator().manual_seed(0))
    assert sorted(torch.cat(groups).tolist()) == list(range(count))
    assert sorted(map(len, groups)) == sorted(
        [16] * (count // 16) + [count % 16] * (count % 16 > 0)
    )


def test_members_of_a_group_are_neighbours():
    vectors = unit_rows(512, 6, seed=1)
    groups = neighbour_groups(vectors, 16, torch.Generator().manual_seed(0))
    within = torch.stack([(vectors[rows] @ vectors[rows].T).mean() for rows in groups]).mean()
    assert within > (vectors @ vectors.T).mean() + 0.4


def test_groups_depend_on_the_seed_alone():
    vectors = unit_rows(300, 6, seed=2)
    first, again, other = (
        neighbour_groups(vectors, 16, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert torch.equal(torch.cat(first), torch.cat(again))
    assert not torch.equal(torch.cat(first), torch.cat(other))


def test_a_term_weighs_as_much_as_its_strongest_repeat():
    input_ids = torch.tensor([1, 5, 5, 7, 2, 1, 7, 9, 7, 2])
    weights = torch.tensor([9.0, 0.5, 0.75, 0.0, 9.0, 9.0, 0.25, 1.0, 0.125, 9.0])
    columns = torch.full((10,), -1)
    columns[torch.tensor([5, 7])] = torch.tensor([0, 1])
    cu_seqlens = torch.tensor([0, 5, 10])
    assert term_matrix(weights, input_ids, cu_seqlens, columns).tolist() == [
        [0.75, 0.0],
        [0.0, 0.25],
    ]


def test_maxsim_is_the_mean_best_match():
    queries, texts = unit_rows(7, 5, seed=3), unit_rows(9, 5, seed=4)
    query_cu, text_cu = torch.tensor([0, 3, 7]), torch.tensor([0, 4, 4, 9])
    scores = maxsim(queries, query_cu, texts, text_cu)
    for query, (start, stop) in enumerate([(0, 3), (3, 7)]):
        for text, (first, last) in {0: (0, 4), 2: (4, 9)}.items():
            best = [max(float(q @ t) for t in texts[first:last]) for q in queries[start:stop]]
            assert float(scores[query, text]) == pytest.approx(sum(best) / len(best), abs=1e-6)
    # A text without vectors
    assert scores[:, 1].tolist() == [0.0, 0.0]


def test_the_projection_starts_orthonormal_with_the_strongest_direction_first():
    states = torch.randn(400, 6, generator=torch.Generator().manual_seed(7)) * torch.arange(1, 7)
    head = MultivectorHeadModule(6, 4, bias=True)
    head.start_from(states)
    near((head.weight @ head.weight.T).detach(), torch.eye(4), 1e-5)
    energy = (functional.normalize(states, dim=-1) @ head.weight.T).square().sum(0)
    assert energy.diff().lt(0).all()
    torch.testing.assert_close(head(states), states @ head.weight.T)


@pytest.mark.parametrize("width", [0, 8])
@pytest.mark.parametrize("inputs", [["hidden"], ["hidden", "embedding"]])
def test_sparse_weights_are_one_per_token_and_never_negative(width, inputs):
    weights = SparseHeadModule(6, width, inputs, "gelu")(torch.randn(50, 6) * 9, torch.randn(50, 6))
    assert weights.shape == (50,)
    assert weights.min() >= 0


def test_unknown_inputs_are_refused():
    with pytest.raises(ValueError, match="embedding"):
        SparseHeadModule(6, 8, ["embedding"], "gelu")
