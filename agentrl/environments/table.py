"""The settings `environment` and `[environment_options]`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

Name = Annotated[
    str,
    Meta(
        description='Environment, as "PLUGIN:WHAT", or your own as "file.py:Class:WHAT"; stands'
        " for agent, tasks and verifier"
    ),
]
Options = Annotated[
    dict[str, Any],
    Meta(
        description="Arguments of the plug-in. `python` is not: it is its own interpreter, by"
        " default .venv-PLUGIN beside the run file or in the working directory, if there is one"
    ),
]
