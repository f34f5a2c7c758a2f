"""Named prompts, as checkpoints declare them: text put directly before an input, nothing between."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from hybridtei.errors import InvalidInput, LoadError

LONGEST_SHOWN = 200  # characters of a name given back in a message


@dataclass(frozen=True, slots=True)
class Prompts:
    """The checkpoint's table (None: it has none) and the text used where a request names no prompt."""

    table: Mapping[str, str] | None = None
    default: str | None = field(default=None)

    @classmethod
    def configure(
        cls, table: Mapping[str, str] | None, *, default_prompt: str | None, default_prompt_name: str | None
    ) -> Prompts:
        """Apply the server's default. Raises LoadError on an unknown name or on two defaults at once."""
        if default_prompt is not None and default_prompt_name is not None:
            raise LoadError("`default-prompt` and `default-prompt-name` exclude each other: give one")
        if default_prompt_name is None:
            return cls(table, default_prompt)
        try:
            return cls(table, cls(table).named(default_prompt_name))
        except InvalidInput as error:
            raise LoadError(str(error)) from error

    def named(self, name: str | None) -> str | None:
        """The prompt called `name`, or the default for None. Raises InvalidInput, in TEI's words, which clients parse."""
        if name is None:
            return self.default
        shown = name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…"
        set_to = f"`default-prompt-name` is set to `{shown}` but"
        if self.table is None:
            raise InvalidInput(f"{set_to} no prompts were found in the Sentence Transformers configuration")
        if name not in self.table:
            known = json.dumps(list(self.table), ensure_ascii=False)
            raise InvalidInput(f"{set_to} it was not found in the Sentence Transformers prompts. Available prompts: {known}")
        return self.table[name]
