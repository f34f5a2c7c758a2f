"""How many replicas for how many waiting tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hybridtei.on_ray.cluster import WAITING_TOKENS, QueuedTokens, wanted_replicas


@pytest.mark.parametrize(
    ("waiting", "requests", "running", "wanted"),
    [
        (0, 0, 1, 1),
        (0, 0, 5, 1),
        (1000, 3, 1, 1),
        (1001, 3, 1, 2),
        (7500, 1, 2, 8),
        (0, 2, 5, 2),  # two may be busy though nothing waits
        (0, 90, 5, 5),  # busy replicas alone call for no more
    ],
)
def test_by_tokens_up_and_never_below_the_busy(waiting, requests, running, wanted):
    assert wanted_replicas(waiting, requests, running, 1000) == wanted


def test_the_policy_adds_up_what_replicas_tell():
    context = SimpleNamespace(
        aggregated_metrics={WAITING_TOKENS: {"a": 600.0, "b": 500.0}}, total_num_requests=2.0, current_num_replicas=2
    )
    assert QueuedTokens(500)(context) == (3, {})
    context.aggregated_metrics = {}  # before the first replica has told anything
    assert QueuedTokens(500)(context) == (2, {})
