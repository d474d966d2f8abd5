"""The table [prompts]: which texts of the agent a search rewrites, and what it may spend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from agentrl.config.base import Count, Name, Natural, NonNegative, Section
from agentrl.errors import ConfigError
from agentrl.types import PromptText


class PromptComponent(Section, frozen=True):
    """A text of the agent. It stands in the system or developer message of a role's calls, or in
    the description of a tool that they offer."""

    file: str  # with the text, as the agent sends it
    role: str = ""  # default: the component's name
    tool: str = ""  # whose description the text is; default: none's
    insert: bool = False  # the agent has no such text: it becomes a system message of its own


class PromptsConfig(Section, frozen=True):
    """A search for better texts by rollouts on tasks of `tasks.train`: `agentrl prompts`."""

    components: dict[Name, str | PromptComponent] = {}  # a file, or a table; none: no search
    algorithm: Literal["gepa", "apo"] = "gepa"  # arXiv 2507.19457, arXiv 2305.03495
    reflector: str = ""  # the upstream or policy that proposes texts
    budget: Count = 400  # rollouts of a search; held-out scores are not in it
    max_reflection_tokens: Natural = 0  # 0: any number
    max_seconds: NonNegative = 0.0  # 0: any time
    validation: Count = 12  # tasks, the last of tasks.train, that choose between candidates
    minibatch: Count = 3  # tasks whose traces a proposal is made from
    proposals: Count = 1  # at a time
    max_length: Count = 4000  # characters of a text
    directory: str = ""  # of the texts to train and evaluate with; default: what a search found
    perfect: float = 1.0  # a mean score at which the search ends
    show: list[str] = []  # fields of a task that the reflector reads; it never sees others
    # With `agentrl train`. off: train with the texts that `agentrl prompts` found. before: search,
    # then train. alternate: search again after every so many steps, with the policy of that step.
    schedule: Literal["off", "before", "alternate"] = "off"
    every: Count = 50  # steps between two searches, with schedule = "alternate"


def prompt_texts(config: Any, directory: Path | None = None) -> list[PromptText]:
    """The components of a run with the texts of their files, or of those in `directory`. Raises
    ConfigError for files that are missing or empty, and for texts that cannot be told apart."""
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
                    "one text is in the other; make them one component"
                )
        found.append(PromptText(component=name, role=role, seed=known, text=text, tool=own.tool))
    return found


def found_texts(config: Any) -> Path | None:
    """The folder of texts that a search has left, or that the settings name, if there is one."""
    folder = Path(config.prompts.directory or Path(config.output, "prompts"))
    return folder if folder.is_dir() else None


def _text(name: str, file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"prompts.components.{name}: there is no file {file}")
    if not (text := file.read_text(encoding="utf-8").strip()):
        raise ConfigError(f"prompts.components.{name}: {file} is empty")
    return text


def problems(config: Any) -> Iterator[str]:
    """What is wrong with [prompts] in a run's settings."""
    prompts: PromptsConfig = config.prompts
    if not prompts.components:
        if prompts != PromptsConfig():
            yield "[prompts] is nothing without prompts.components, the texts that it rewrites"
        return
    known = {*config.upstreams, *(config.policies or {"policy"})}
    if prompts.reflector not in known:
        yield (
            f"prompts.reflector = {prompts.reflector!r}; name who proposes texts: "
            f"{', '.join(sorted(known))}"
        )
    if prompts.algorithm == "apo" and prompts.proposals != 1:
        yield "prompts.proposals is for algorithm = 'gepa'; apo asks for a whole beam at a time"
    if prompts.schedule != "alternate" and prompts.every != PromptsConfig().every:
        yield "prompts.every means nothing without prompts.schedule = 'alternate'"
    if prompts.schedule == "alternate" and config.algorithm.max_staleness:
        yield (
            "prompts.schedule = 'alternate' with algorithm.max_staleness: rollouts that are asked "
            "for ahead would have the texts of before; leave one of them out"
        )
    least = prompts.validation + 3 * (prompts.minibatch + prompts.validation)
    if prompts.budget < least:
        yield (
            f"prompts.budget = {prompts.budget} rollouts evaluate next to nothing; give at least "
            f"{least}, validation + 3 x (minibatch + validation)"
        )
