"""The rules of `[[roles.match]]`, which presets of coding harnesses have too."""

from __future__ import annotations

from typing import Annotated

import msgspec

from agentrl.config.base import Section


class RoleRule(Section, frozen=True):
    """A call that has all these properties has this role. In a pattern * stands for any text."""

    role: Annotated[str, msgspec.Meta(min_length=1)]
    header: dict[str, str] = {}  # name of a header -> pattern of its value
    field: dict[str, str] = {}  # dotted key in the body -> pattern of its value, or of that as JSON
    model: str = ""  # pattern of the model that it asks for
    system: str = ""  # pattern of the beginning of the system text
    prompt: str = ""  # pattern of the beginning of the last text, which is the user's
    tools: bool | None = None  # whether it offers tools
    schema: bool | None = None  # whether its answer must follow a JSON schema

    def __post_init__(self) -> None:
        given = msgspec.structs.asdict(self)
        if all(value in ({}, "", None) for key, value in given.items() if key != "role"):
            raise ValueError(f"the rule of {self.role!r} says nothing of the calls it is for")
