"""The model card (README.md) of an exported policy: what it was trained on, how well it does, and
how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from agentrl import __version__
from agentrl.algorithms.model.tool_parser import TOOL_FORMAT
from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.model_files.chosen import Chosen
from agentrl.scores import score_text
from agentrl.types import StepRow

LICENCE = re.compile(r"^license:\s*(\S+)", re.M)
UNKNOWN = "unknown; that of the base model applies"
MADE = "made by "  # before the name of a run's own function, instead of a base model
ROWS = 12  # evaluations in the table
PROCESSOR = "preprocessor_config.json"  # of a model that reads images


def card(directory: Path, chosen: Chosen | None, policy: str | None) -> str:
    """directory: of the exported model. chosen: None for a checkpoint without its run."""
    base = base_of(directory, chosen, policy)
    licence = licence_of(base)
    kind = "peft" if (directory / "adapter_config.json").is_file() else "transformers"
    lines = ["---", f"library_name: {kind}", "tags: [agentrl, reinforcement-learning]"]
    named = base and not base.startswith(MADE) and not Path(base).is_absolute()
    lines += [f"base_model: {base}"] if named else []
    lines += [f"license: {licence}"] if licence else []
    title = chosen.config.name if chosen else directory.name
    lines += ["---", f"# {title}", "", "Trained by reinforcement learning with agentrl "
              f"{__version__}."]  # fmt: skip
    lines += ["", "| | |", "|---|---|", f"| base model | {base or 'unknown'} |"]
    known = licence or ("none: it was made from nothing" if base.startswith(MADE) else UNKNOWN)
    lines += [f"| licence of the base | {known} |"]
    if chosen is not None:
        lines += [*_about(chosen.config, chosen), *_curve(chosen)]
    return "\n".join([*lines, *_loading(directory, kind, base), ""])


def base_of(directory: Path, chosen: Chosen | None, policy: str | None) -> str:
    """The model that training began with, as far as it is known."""
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        return str(json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path") or "")
    if chosen is None:
        return ""
    own = team.view(chosen.config, policy or team.trained_policies(chosen.config)[0]).policy
    return f"{MADE}{own.build}" if own.build else own.model


def licence_of(base: str) -> str:
    """What the card of a model in a folder, or in the cache of the hub, says; empty: nothing."""
    folder = Path(base)
    if base and not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            found = try_to_load_from_cache(base, "README.md")
        except HFValidationError:
            return ""
        folder = Path(found).parent if isinstance(found, str) else folder
    file = folder / "README.md"
    found = LICENCE.search(file.read_text("utf-8", "replace")) if base and file.is_file() else None
    return found[1] if found else ""


def _about(config: RunConfig, chosen: Chosen) -> Iterator[str]:
    own = config.algorithm
    trained = [row for row in chosen.steps if row.committed and row.step < chosen.saved.steps]
    rollouts = sum(row.metrics.get("rollouts", 0.0) for row in trained)
    yield f"| checkpoint | after {chosen.saved.steps} steps of {config.steps}: {chosen.why} |"
    yield f"| training tasks | `{config.tasks.train or 'none'}` |"
    yield f"| held-out tasks | `{config.tasks.heldout or 'none'}` |"
    yield f"| verifier | `{config.verifier.path or 'none'}` |"
    yield f"| algorithm | `{own.preset}`, learning rate {own.lr:g}, {own.groups} groups of "\
        f"{own.group_size} |"  # fmt: skip
    yield f"| rollouts | {rollouts:.0f} |"
    yield f"| sampling | temperature {config.sampling.temperature:g}, at most "\
        f"{config.sampling.max_tokens or 'the context'} tokens a call |"  # fmt: skip
    yield f"| seed | {config.seed} |"


def _curve(chosen: Chosen) -> Iterator[str]:
    rows = [row for row in chosen.steps if "eval/score" in row.metrics]
    if not rows:
        yield "\nNo held-out tasks were evaluated."
        return
    yield f"\nHeld-out score at temperature {chosen.config.eval.temperature:g}, with 95 % "\
        "confidence intervals over tasks:\n"  # fmt: skip
    share = chosen.shares
    yield "| after step | score | interval |"
    yield "|--:|--:|---|"
    for row in _thinned(rows, chosen.saved.steps):
        low, high = (row.metrics.get(f"eval/score_{end}") for end in ("low", "high"))
        ends = [score_text(x, share) for x in (low, high) if x is not None]
        known = " to ".join(ends) if len(ends) > 1 else "unknown"
        mark = " (this model)" if row.step == chosen.saved.steps else ""
        yield f"| {row.step}{mark} | {score_text(row.metrics['eval/score'], share)} | {known} |"


def _thinned(rows: Sequence[StepRow], steps: int) -> list[StepRow]:
    """At most about `ROWS`, with the first, the last and that of this model."""
    every = -(-len(rows) // ROWS)
    last = len(rows) - 1
    return [row for i, row in enumerate(rows) if i % every == 0 or i == last or row.step == steps]


def _loading(directory: Path, kind: str, base: str) -> Iterator[str]:
    looks = (directory / PROCESSOR).is_file()
    auto = "AutoModelForImageTextToText" if looks else "AutoModelForCausalLM"
    yield "\n## Load it\n\n```python"
    yield f"from transformers import {auto}, AutoTokenizer" + "\n" * (not looks)
    if looks:  # from its module, because transformers has it only with torchvision
        yield "from transformers.models.auto.image_processing_auto import AutoImageProcessor\n"
    if kind == "peft":
        yield "from peft import PeftModel\n"
        yield f"base = {auto}.from_pretrained({base!r})"
        yield f"model = PeftModel.from_pretrained(base, {directory.name!r})"
    else:
        yield f"model = {auto}.from_pretrained({directory.name!r})"
    if looks:
        of_training = 'backend="pil")  # as in training'
        yield f"images = AutoImageProcessor.from_pretrained({directory.name!r}, {of_training}"
    yield f"tokenizer = AutoTokenizer.from_pretrained({directory.name!r})\n```\n"
    adapter = f"{base} --enable-lora --lora-modules mine={directory.name}"
    served = adapter if kind == "peft" else directory.name
    yield f"or, for agents with tools:\n\n```bash\nvllm serve {served}{tool_flags(directory)}\n```"


def tool_flags(directory: Path) -> str:
    """vLLM's options for tool calls, with the parser of the format in which the model writes them;
    none if that is a user's own."""
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    parser = settings.get(TOOL_FORMAT, "hermes")
    known = ":" not in parser
    return f" --enable-auto-tool-choice --tool-call-parser {parser}" if known else ""
