"""Two models as one: one reads documents, the other, which is smaller, queries, and their vectors are in one space.

A batch that holds both is computed in two passes. Source: the Router of sentence-transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hybridtei.backends.base import Backend, Measured
from hybridtei.batch import PackedBatch, gather_index, offsets_of
from hybridtei.checkpoint.spec import ModelSpec
from hybridtei.outputs import HeadOutputs
from hybridtei.system.machine import LaneKind


class Routed:
    """See `Backend`. `routes`: the backends of documents and of queries, by `Encoding.route`; they have the same lanes."""

    shares_prefixes = False

    def __init__(self, spec: ModelSpec, routes: Sequence[Backend]) -> None:
        first = routes[0]
        self.spec, self.routes = spec, routes
        self.name, self.dtype, self.lanes = first.name, first.dtype, first.lanes
        self.padding, self.busy_tokens = first.padding, first.busy_tokens
        self.fills_cores = all(one.fills_cores for one in routes)

    @property
    def forwards(self) -> int:
        """Passes of both."""
        return sum(one.forwards for one in self.routes)

    @forwards.setter
    def forwards(self, count: int) -> None:
        raise AttributeError("the routes count their passes themselves")

    def forward(self, batch: PackedBatch, *, use_all_cores: bool = False) -> HeadOutputs:
        """See `Backend.forward`."""
        if batch.routes is None:
            return self.routes[0].forward(batch, use_all_cores=use_all_cores)
        order, found = list[int](), list[HeadOutputs]()
        for number, backend in enumerate(self.routes):
            rows = np.flatnonzero(batch.routes == number)
            if len(rows):
                found.append(backend.forward(_of_route(batch, rows, backend.spec), use_all_cores=use_all_cores))
                order += rows.tolist()
        return found[0] if len(found) == 1 else HeadOutputs.concat(found).take(np.argsort(order))

    def enter_lane(self, kind: LaneKind) -> None:
        """See `Backend.enter_lane`."""
        for one in self.routes:
            one.enter_lane(kind)

    def max_tokens(self, limit: int, longest: int, fraction: float, sharing: int = 1) -> int:
        """See `Measured`: both share what is free."""
        for one in self.routes:
            if isinstance(one, Measured):
                limit = one.max_tokens(limit, min(longest, one.spec.max_input_length), fraction, sharing * len(self.routes))
        return limit

    def close(self) -> None:
        """Close both."""
        for one in self.routes:
            one.close()


def _of_route(batch: PackedBatch, rows: NDArray[np.intp], spec: ModelSpec) -> PackedBatch:
    """Some sequences of a batch, with the positions of the model that reads them."""
    tokens, cu_seqlens = gather_index(batch.cu_seqlens, rows), offsets_of(batch.lengths[rows])
    input_ids, types = batch.input_ids[tokens], batch.token_type_ids
    return replace(
        batch,
        input_ids=input_ids,
        position_ids=spec.positions.of(input_ids, cu_seqlens),
        token_type_ids=None if types is None else types[tokens],
        cu_seqlens=cu_seqlens,
        unseen=None,
        adapter_ids=None,
        routes=None,
    )
