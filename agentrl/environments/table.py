"""The settings `environment` and `[environment_options]`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

Name = Annotated[
    str,
    msgspec.Meta(
        description='"PLUGIN:WHAT", or your own as "file.py:Class:WHAT": it stands for agent, tasks'
        " and verifier"
    ),
]
Options = Annotated[
    dict[str, Any],
    msgspec.Meta(
        description="arguments of the plug-in, and `python`, its own interpreter; default:"
        " .venv-PLUGIN beside the run file or in the working directory, if there is one"
    ),
]
