"""Changes a collection's model, or its format of multi-vectors, while it is searched and written.

The command's flags come from `MigrateOptions`, so this module imports nothing large.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from hybridtei.config import MultivectorDtype, flag

Step = Literal["migrate", "rollback", "status", "delete_old"]


class MigrateOptions(Struct, frozen=True, kw_only=True):
    """Options of a migration."""

    collection: str
    step: Step = "migrate"
    to: str | None = None
    multivector_tokens: int | None = None
    multivector_dtype: MultivectorDtype | None = None
    dense_dim: Annotated[int | None, flag("dimensions to keep of dense vectors [default: all]")] = (
        None
    )
    drop_outputs: Annotated[
        str | None,
        flag("outputs to drop because the new model lacks them, such as sparse,multivector"),
    ] = None
    no_switch: Annotated[
        bool, flag("fill the copy only; the same command without this flag switches")
    ] = False
    yes: Annotated[bool, flag("let an alias replace the collection of that name")] = False
    quiet: Annotated[bool, flag("no progress")] = False
