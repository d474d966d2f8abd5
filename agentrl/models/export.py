"""`agentrl export model`: a trained model as a Hugging Face folder, and its upload.

The checkpoint is the best of a run by its held-out score, the last one, or one by name or number of
steps; an adapter can be merged into its base. The model card (README.md) describes the training
data, the scores, and how to load the model.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from transformers import AutoTokenizer

from agentrl import __version__
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import LoraAdapters, base_of
from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.model.tool_formats import TOOL_FORMAT
from agentrl.algorithms.sampling.evaluate import heldout_scores
from agentrl.core import files
from agentrl.core.config import RunConfig, derived, from_store, store_in
from agentrl.core.errors import AgentRLError, ConfigError, NotFound, PolicyError
from agentrl.core.files import atomic_directory
from agentrl.core.types import RunState, StepRow, are_shares, score_text
from agentrl.store import open_store
from agentrl.store.run_folder import store_with
from agentrl.trainer import SavedCheckpoint, checkpoint_at


@click.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option("--run", help="Name of a run, for its best checkpoint by held-out score.")
@click.option("--step", metavar="N|last", help="With --run: the checkpoint after N steps.")
@click.option("--store", help="Store URL; default: the one that has the run, below this folder.")
@click.option("--to", "directory", required=True, type=click.Path(path_type=Path))
@click.option("--policy", help="The policy, for a run with several.")
@click.option("--merge", is_flag=True, help="Merge an adapter into its base model.")
@click.option("--base", default="", help="With --merge: path of the base, if it has moved.")
@click.option("--push", "repo", metavar="OWNER/NAME", help="Upload it to the Hugging Face hub too.")
@click.option("--private", is_flag=True, help="With --push: make a new repository private.")
def model(
    checkpoint: Path | None,
    run: str | None,
    step: str | None,
    store: str | None,
    directory: Path,
    policy: str | None,
    merge: bool,
    base: str,
    repo: str | None,
    private: bool,
) -> None:
    """Save a trained model, that of CHECKPOINT or the best of a run, as a Hugging Face folder with
    a model card, for transformers, vLLM or Ollama."""
    from agentrl.algorithms.train.checkpoint import export_checkpoint

    if base and not merge:
        raise click.UsageError("--base needs --merge")
    if private and not repo:
        raise click.UsageError("--private needs --push")
    if (checkpoint is None) == (run is None):
        raise click.UsageError("give a checkpoint directory or --run")
    if step and run is None:
        raise click.UsageError("--step needs --run")
    chosen: Chosen | None = None
    if run is not None:
        chosen = asyncio.run(choose(store or store_with(run), run, step or BEST))
        checkpoint = chosen.saved.path
    else:
        assert checkpoint is not None
        chosen = of_its_run(checkpoint.resolve())
    source = _of_policy(checkpoint, policy)
    with files.reading(checkpoint):
        if merge:
            export_merged(source, directory, base=base)
        else:
            export_checkpoint(source, directory)
    (directory / "README.md").write_text(card(directory, chosen, policy), encoding="utf-8")
    which = f": {chosen.why}" if run and chosen else ""
    click.echo(f"wrote {directory} from {source}{which}")
    if repo:
        click.echo(f"uploaded it to {push(directory, repo, private=private)}")


def push(directory: Path, repo: str, *, private: bool) -> str:
    """Upload a model to a repository, which is created if it is missing, with the token of `hf auth
    login` or HF_TOKEN; returns its URL. Raises AgentRLError if the hub refuses."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi()
    try:
        repository = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repository.repo_id, folder_path=directory, commit_message="By agentrl"
        )
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        lines = [line for line in str(error).splitlines() if line] or [type(error).__name__]
        raise AgentRLError(
            f"--push {repo}: {lines[0]} {lines[-1] if len(lines) > 1 else ''}".rstrip()
            + f"; {directory} is written. Log in with `hf auth login`, unset HF_HUB_OFFLINE, or "
            f"upload it later: hf upload {repo} {directory}"
        ) from None
    return str(repository)


def _of_policy(checkpoint: Path, policy: str | None) -> Path:
    """The directory of a policy in a checkpoint. Raises ConfigError for an unknown policy, or if
    `policy` is None and there are several."""
    held = sorted(path.parent.name for path in checkpoint.glob("*/tokenizer_config.json"))
    if policy is None and not held:
        return checkpoint
    if policy not in held:
        hint = f"give --policy, one of {', '.join(held)}" if held else "remove --policy"
        what = f"{policy!r} is not in it" if policy else "it holds several policies"
        raise ConfigError(f"{checkpoint}: {what}; {hint}")
    return checkpoint / policy


BEST, LAST = "best", "last"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A checkpoint of a run, with the run's metrics."""

    saved: SavedCheckpoint
    why: str  # reason of the choice, for a message
    config: RunConfig
    steps: Sequence[StepRow]

    @property
    def shares(self) -> bool:
        """Whether the run's scores are shown as percentages."""
        return are_shares(row.metrics for row in self.steps)


async def choose(store_url: str, run: str, which: str = BEST) -> Chosen:
    """`which`: "best", "last", a number of steps or a path. Raises NotFound for a run without
    checkpoints, ConfigError for one that is not there."""
    async with open_store(store_url, readonly=True) as store:
        state = await store.run(run)
        if state is None or state.checkpoint is None:
            raise NotFound(
                f"run {run!r} has no checkpoint in {store.url}, which has runs {await store.runs()}"
            )
        scores, steps, url = await heldout_scores(store, run), await store.steps(run), store.url
    folder = _folder(url, state)
    config = from_store(state.config)
    if which in (BEST, LAST) or which.isdecimal():
        share = are_shares(row.metrics for row in steps)
        score_texts = {step: score_text(score, share) for step, score in scores.items()}
        path, why = _named(folder, state, score_texts, which)
    else:
        path, why = Path(which), "as given"
    return Chosen(checkpoint_at(path), why, config, steps)


def of_its_run(checkpoint: Path) -> Chosen | None:
    """A checkpoint with its run's metrics, if the store is next to the checkpoints."""
    output = checkpoint.parent.parent

    async def read() -> Chosen:
        async with open_store(store_in(output), readonly=True) as store:
            (run,) = await store.runs()
        return await choose(store_in(output), run, str(checkpoint))

    if not (output / "store.db").is_file():
        return None
    try:
        return asyncio.run(read())
    except (AgentRLError, ValueError):  # a store of several runs, or of another version
        return None


def _folder(url: str, state: RunState) -> Path:
    """The run's checkpoints: next to the store's file, which may have been moved, or in the run's
    original output folder."""
    assert state.checkpoint is not None
    scheme, _, file = url.partition(":///")
    beside_store = [Path(file.partition("?")[0]).parent] if scheme == "sqlite" else []
    folders = [folder / "checkpoints" for folder in (*beside_store, Path(state.config["output"]))]
    name = Path(state.checkpoint).name
    return next((path for path in folders if (path / name).is_dir()), folders[-1])


def _named(
    folder: Path, state: RunState, scores: Mapping[int, str], which: str
) -> tuple[Path, str]:
    assert state.checkpoint is not None
    last, best = folder / Path(state.checkpoint).name, folder / BEST
    if which.isdecimal():
        matching = sorted(path for path in folder.glob(f"{int(which):06d}*") if path.is_dir())
        if not matching:
            existing = sorted({path.name for path in folder.glob("[0-9]*") if path.is_dir()})
            raise ConfigError(
                f"there is no checkpoint after {which} steps in {folder}, only "
                f"{', '.join(existing) or 'none'}; choose one of them (the newest and the best are "
                "kept: keep_checkpoints)"
            )
        return matching[-1], "as asked for"
    if which == LAST:
        return last, "the last"
    if not scores:
        return last, "the last: no held-out score says which is best"
    if not best.is_dir():
        return last, "the last: the best by held-out score is not on disk"
    score = next(iter(scores.values()))
    return best.resolve(), f"the best by held-out score, {score}"


LICENCE = re.compile(r"^license:\s*(\S+)", re.M)
UNKNOWN = "unknown; that of the base model applies"
MADE = "made by "  # prefix of the function that built the model, in place of a base model's name
ROWS = 12  # evaluations in the table
PROCESSOR = "preprocessor_config.json"  # files of an image-text model's processor


def card(directory: Path, chosen: Chosen | None, policy: str | None) -> str:
    """The card of the model in `directory`. chosen: None for a checkpoint without its run."""
    base = base_name(directory, chosen, policy)
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
    licence_text = licence or (
        "none: it was made from nothing" if base.startswith(MADE) else UNKNOWN
    )
    lines += [f"| licence of the base | {licence_text} |"]
    if chosen is not None:
        lines += [*_about(chosen.config, chosen), *_curve(chosen)]
    return "\n".join([*lines, *_loading(directory, kind, base), ""])


def base_name(directory: Path, chosen: Chosen | None, policy: str | None) -> str:
    """The model with which training began, if known."""
    adapter = directory / "adapter_config.json"
    if adapter.is_file():
        return str(json.loads(adapter.read_text("utf-8")).get("base_model_name_or_path") or "")
    if chosen is None:
        return ""
    name = policy or derived.trained_policies(chosen.config)[0]
    settings = derived.view(chosen.config, name).policy
    return f"{MADE}{settings.build}" if settings.build else settings.model


def licence_of(base: str) -> str:
    """The licence in a model card, in a folder or in the hub's cache; empty: none."""
    folder = Path(base)
    if base and not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(base, "README.md")
        except HFValidationError:
            return ""
        folder = Path(cached).parent if isinstance(cached, str) else folder
    file = folder / "README.md"
    match = LICENCE.search(file.read_text("utf-8", "replace")) if base and file.is_file() else None
    return match[1] if match else ""


def _about(config: RunConfig, chosen: Chosen) -> Iterator[str]:
    algorithm = config.algorithm
    trained = [row for row in chosen.steps if row.committed and row.step < chosen.saved.steps]
    rollouts = sum(row.metrics.get("rollouts", 0.0) for row in trained)
    yield f"| checkpoint | after {chosen.saved.steps} steps of {config.steps}: {chosen.why} |"
    yield f"| training tasks | `{config.tasks.train or 'none'}` |"
    yield f"| held-out tasks | `{config.tasks.heldout or 'none'}` |"
    yield f"| verifier | `{config.verifier.path or 'none'}` |"
    yield f"| algorithm | `{algorithm.preset}`, learning rate {algorithm.lr:g}, "\
        f"{algorithm.groups} groups of {algorithm.group_size} |"  # fmt: skip
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
        interval = " to ".join(ends) if len(ends) > 1 else "unknown"
        mark = " (this model)" if row.step == chosen.saved.steps else ""
        yield f"| {row.step}{mark} | {score_text(row.metrics['eval/score'], share)} | {interval} |"


def _thinned(rows: Sequence[StepRow], steps: int) -> list[StepRow]:
    """Thin out rows to about `ROWS`, with the first, the last and that of this model."""
    stride = -(-len(rows) // ROWS)
    last = len(rows) - 1
    return [row for i, row in enumerate(rows) if i % stride == 0 or i == last or row.step == steps]


def _loading(directory: Path, kind: str, base: str) -> Iterator[str]:
    looks = (directory / PROCESSOR).is_file()
    auto = "AutoModelForImageTextToText" if looks else "AutoModelForCausalLM"
    yield "\n## Load it\n\n```python"
    yield f"from transformers import {auto}, AutoTokenizer" + "\n" * (not looks)
    if looks:  # from its module, because transformers exports it only with torchvision
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
    none for a user-defined format."""
    file = directory / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    parser = settings.get(TOOL_FORMAT, "hermes")
    built_in = ":" not in parser
    return f" --enable-auto-tool-choice --tool-call-parser {parser}" if built_in else ""


def export_merged(adapter: Path, directory: Path, *, base: str = "") -> None:
    """Write an adapter merged with its base, and the tokenizer, to a new Hugging Face directory in
    float32.

    base: model to use instead of the one that the adapter names. Raises PolicyError and writes
    nothing if base and adapter do not match or `directory` exists."""
    if directory.exists():
        raise PolicyError(f"{directory} exists already; give the name of a new directory")
    model, tokenizer = load_model(base or base_of(adapter), device="cpu")
    adapters = LoraAdapters(model)
    adapters.open("merged", adapter)
    with atomic_directory(directory) as partial:
        adapters.merge("merged", partial)
        if inputs := inputs_of(model):
            inputs.save(partial)
        if (adapter / "tokenizer_config.json").is_file():  # a run may have changed its template
            tokenizer = AutoTokenizer.from_pretrained(adapter)
        tokenizer.save_pretrained(partial)
