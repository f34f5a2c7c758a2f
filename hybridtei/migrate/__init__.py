"""A collection changes its model, or how it keeps multi-vectors, while it is searched and written.

The command's flags are read off `MigrateOptions`, so nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from hybridtei.config import MultivectorDtype

Step = Literal["migrate", "flip", "rollback", "finish", "cancel", "status"]


class MigrateOptions(Struct, frozen=True, kw_only=True):
    """Options of a migration."""

    collection: str
    step: Step = "migrate"
    to: str | None = None
    multivector_tokens: int | None = None
    multivector_dtype: MultivectorDtype | None = None
    dense_dim: Annotated[int | None, Meta(description="keep so many dimensions of dense vectors [default: all]")] = None
    sample: Annotated[int, Meta(description="stored documents whose beginnings are queries of the comparison; 0: none")] = 50
    judged: Annotated[
        str | None,
        Meta(description="BEIR folder of queries.jsonl and qrels, as `eval` reads it: nDCG@10 of both copies; extra `eval`"),
    ] = None
    split: Annotated[str, Meta(description="of the judgements: qrels/NAME.tsv")] = "test"
    require_overlap: Annotated[
        float | None, Meta(description="do not flip where less of the top 10 stays, such as 0.5, on average over the queries")
    ] = None
    no_flip: Annotated[bool, Meta(description="fill and compare only; --flip later")] = False
    quiet: Annotated[bool, Meta(description="no progress")] = False
