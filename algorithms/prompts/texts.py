"""The agent's texts that a search rewrites, of their files or of the search's result."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.learning import PromptComponent
from agentrl.errors import ConfigError
from agentrl.types import PromptText


def prompt_texts(config: RunConfig, directory: Path | None = None) -> list[PromptText]:
    """The components of a run with the texts of their files, or of the files in `directory`. Raises
    ConfigError for missing or empty files, and for texts of which one contains another."""
    found: list[PromptText] = []
    for name, given in config.prompts.components.items():
        own = PromptComponent(file=given) if isinstance(given, str) else given
        seed = _text(name, config.path(own.file))
        text = _text(name, directory / f"{name}.txt") if directory else seed
        role, known = own.role or name, "" if own.insert else seed
        for other in (one for one in found if (one.role, one.tool) == (role, own.tool)):
            if known in other.seed or other.seed in known:
                raise ConfigError(
                    f"prompts.components.{name}: {other.component} has the same role {role!r}, and "
                    "one text contains the other; make them one component"
                )
        found.append(PromptText(component=name, role=role, seed=known, text=text, tool=own.tool))
    return found


def found_texts(config: RunConfig) -> Path | None:
    """The folder of texts from the settings or from a search; None if it does not exist."""
    folder = Path(config.prompts.directory or Path(config.output, "prompts"))
    return folder if folder.is_dir() else None


def _text(name: str, file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"prompts.components.{name}: there is no file {file}")
    if not (text := file.read_text(encoding="utf-8").strip()):
        raise ConfigError(f"prompts.components.{name}: {file} is empty")
    return text
