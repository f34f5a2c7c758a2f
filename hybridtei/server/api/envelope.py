"""What all objects but TEI's carry around their data."""

from __future__ import annotations

import time
import uuid
from typing import Any

from hybridtei.server.context import Context
from hybridtei.server.observe import Usage


def envelope(context: Context, kind: str, prefix: str) -> dict[str, Any]:
    """`{"id", "object", "created", "model"}`."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": context.served_name,
    }


def used(usage: Usage) -> dict[str, int]:
    """`{"prompt_tokens", "total_tokens"}`."""
    return {"prompt_tokens": usage.tokens, "total_tokens": usage.tokens}
