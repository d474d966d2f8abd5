"""The table [prompts]: the agent's texts that a search rewrites, and the budget of the search."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from msgspec.structs import replace

from agentrl.base.loading import is_installed
from agentrl.base.parts import has
from agentrl.config.base import Count, Name, Natural, NonNegative, Section
from agentrl.errors import ConfigError, install_command
from agentrl.types import PromptText


class PromptComponent(Section, frozen=True):
    """A text of the agent in the system or developer message of a role's calls, or in the
    description of one of their tools."""

    file: str  # file with the text as the agent sends it
    role: str = ""  # Role whose calls have the text; default: the component's name.
    tool: str = ""  # the tool whose description the text is; default: a message
    # Whether to add the text as a system message, which the agent does not have.
    insert: bool = False


class PromptsConfig(Section, frozen=True):
    """A search for better texts with rollouts on `tasks.train`: `agentrl prompts`."""

    # Texts by name, each as a file or a table; none: no search.
    components: dict[Name, str | PromptComponent] = {}
    # Method of the search: GEPA (arXiv 2507.19457) or APO (arXiv 2305.03495).
    algorithm: Literal["gepa", "apo"] = "gepa"
    reflector: str = ""  # the upstream or policy that proposes texts
    budget: Count = 400  # rollouts of a search, without held-out evaluations
    max_reflection_tokens: Natural = 0  # Tokens of all reflections; 0: unlimited.
    max_seconds: NonNegative = 0.0  # Seconds of a search; 0: unlimited.
    validation: Count = 12  # tasks (the last of tasks.train) on which candidates are compared
    minibatch: Count = 3  # tasks whose traces the reflector reads for a proposal
    proposals: Count = 1  # concurrent proposals
    max_length: Count = 4000  # characters of a text
    directory: str = ""  # folder of the texts to use; default: the result of the search
    perfect_score: float = 1.0  # mean score at which the search ends
    show: list[str] = []  # fields of a task that the reflector may read
    # Order of search and training, for `agentrl train`. off: train with the texts that `agentrl
    # prompts` found. before: search, then train. alternate: search again after every `every` steps,
    # with the current policy.
    schedule: Literal["off", "before", "alternate"] = "off"
    every: Count = 50  # steps between two searches, with schedule = "alternate"

    plays: ClassVar[bool] = True

    def evaluated(self, config: Any) -> Self:
        if not self.components:
            return self
        directory = self.directory or str(Path(config.output, "prompts"))
        return replace(self, schedule="off", directory=directory)

    def problems(self, config: Any) -> Iterator[str]:
        if not self.components:
            if self != PromptsConfig():
                yield "[prompts] has no effect without prompts.components, the texts to rewrite"
            return
        if not has("chat-completions"):
            yield "[prompts] needs the part 'chat-completions', which is not installed here"
        known = {*config.upstreams, *(config.policies or {"policy"})}
        if self.reflector not in known:
            yield (
                f"prompts.reflector = {self.reflector!r}; name who proposes texts: "
                f"{', '.join(sorted(known))}"
            )
        if self.algorithm == "apo" and self.proposals != 1:
            yield "prompts.proposals is for algorithm = 'gepa'; apo asks for a whole beam at a time"
        if self.schedule != "alternate" and self.every != PromptsConfig().every:
            yield "prompts.every has no effect without prompts.schedule = 'alternate'"
        if self.schedule == "alternate" and config.algorithm.max_staleness:
            yield (
                "prompts.schedule = 'alternate' with algorithm.max_staleness: rollouts requested "
                "ahead would use the previous texts; remove one of them"
            )
        least = self.validation + 3 * (self.minibatch + self.validation)
        if self.budget < least:
            yield (
                f"prompts.budget = {self.budget} rollouts are too few to evaluate; give at least "
                f"{least}, validation + 3 x (minibatch + validation)"
            )
        if self.algorithm == "gepa" and not is_installed("gepa"):
            yield f"prompts.algorithm: 'gepa' is not installed: {install_command('prompts')}"


def prompts_of(config: Any) -> PromptsConfig:
    settings: PromptsConfig = config.prompts
    return settings


def prompt_texts(config: Any, directory: Path | None = None) -> list[PromptText]:
    """The components of a run with the texts of their files, or of the files in `directory`. Raises
    ConfigError for missing or empty files, and for texts of which one contains another."""
    found: list[PromptText] = []
    for name, given in prompts_of(config).components.items():
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


def found_texts(config: Any) -> Path | None:
    """The folder of texts from the settings or from a search; None if it does not exist."""
    folder = Path(prompts_of(config).directory or Path(config.output, "prompts"))
    return folder if folder.is_dir() else None


def _text(name: str, file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"prompts.components.{name}: there is no file {file}")
    if not (text := file.read_text(encoding="utf-8").strip()):
        raise ConfigError(f"prompts.components.{name}: {file} is empty")
    return text
