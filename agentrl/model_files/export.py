"""`agentrl export model`: a trained model as a Hugging Face folder, and its upload."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agentrl.config import store_of
from agentrl.errors import AgentRLError, ConfigError, NotFound

CARD = """---
library_name: {kind}
tags: [agentrl, reinforcement-learning]
---
Trained by reinforcement learning with agentrl.
"""


@click.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option("--run", help="Name of a run, for its last committed checkpoint.")
@click.option("--store", help="Store URL; default: the one in runs/<run>.")
@click.option("--to", "directory", required=True, type=click.Path(path_type=Path))
@click.option("--policy", help="The policy, for a run with several.")
@click.option("--merge", is_flag=True, help="Merge an adapter into its base model.")
@click.option("--base", default="", help="With --merge: path of the base, if it has moved.")
@click.option("--push", "repo", metavar="OWNER/NAME", help="Upload it to the Hugging Face hub too.")
@click.option("--private", is_flag=True, help="With --push: make a new repository private.")
def model(
    checkpoint: Path | None,
    run: str | None,
    store: str | None,
    directory: Path,
    policy: str | None,
    merge: bool,
    base: str,
    repo: str | None,
    private: bool,
) -> None:
    """Save a trained model, that of CHECKPOINT or the last of a run, as a Hugging Face folder for
    transformers, vLLM or Ollama. A run's best checkpoint is runs/NAME/checkpoints/best."""
    from agentrl.algorithms.model.lora import export_merged
    from agentrl.algorithms.train.checkpoint import export_checkpoint

    if base and not merge:
        raise click.UsageError("--base needs --merge")
    if private and not repo:
        raise click.UsageError("--private needs --push")
    if (checkpoint is None) == (run is None):
        raise click.UsageError("give a checkpoint directory or --run")
    if run is not None:
        url = store or store_of(run)
        checkpoint = asyncio.run(_last_checkpoint(url, run))
    assert checkpoint is not None
    checkpoint = _of_policy(checkpoint, policy)
    if merge:
        export_merged(checkpoint, directory, base=base)
    else:
        export_checkpoint(checkpoint, directory)
    click.echo(f"wrote {directory} from {checkpoint}")
    if repo:
        click.echo(f"uploaded it to {push(directory, repo, private=private)}")


def push(directory: Path, repo: str, *, private: bool) -> str:
    """Upload a model to a repository, which is created if it is missing, with the token of `hf auth
    login` or HF_TOKEN; returns its URL. Raises AgentRLError if the hub refuses."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    kind = "peft" if (directory / "adapter_config.json").is_file() else "transformers"
    (directory / "README.md").write_text(CARD.format(kind=kind), encoding="utf-8")
    api = HfApi()
    try:
        made = api.create_repo(repo, private=private or None, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=directory, commit_message="By agentrl")
    except (OSError, httpx.HTTPError, HFValidationError) as error:
        lines = [line for line in str(error).splitlines() if line] or [type(error).__name__]
        raise AgentRLError(
            f"--push {repo}: {lines[0]} {lines[-1] if len(lines) > 1 else ''}".rstrip()
            + f"; {directory} is written. Log in with `hf auth login`, unset HF_HUB_OFFLINE, or "
            f"upload it later: hf upload {repo} {directory}"
        ) from None
    return str(made)


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


async def _last_checkpoint(store_url: str, run: str) -> Path:
    """The last committed checkpoint of a run: next to the store's file, which may have been moved,
    or in the run's original output folder."""
    from agentrl.store import open_store

    async with open_store(store_url, readonly=True) as store:
        state = await store.run(run)
        if state is None or state.checkpoint is None:
            raise NotFound(
                f"run {run!r} has no checkpoint in {store.url}, which has runs {await store.runs()}"
            )
        url = store.url
    scheme, _, file = url.partition(":///")
    output, name = Path(state.config["output"]), Path(state.checkpoint).name
    folders = [Path(file.partition("?")[0]).parent] if scheme == "sqlite" else []
    found = (folder / "checkpoints" / name for folder in (*folders, output))
    return next((path for path in found if path.is_dir()), output / state.checkpoint)
