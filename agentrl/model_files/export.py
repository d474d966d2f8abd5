"""`agentrl export model`: a trained model as a Hugging Face folder, and its upload."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agentrl.base import folder_lock
from agentrl.errors import AgentRLError, ConfigError
from agentrl.run_stores import store_with


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
    from agentrl.model_files.card import card
    from agentrl.model_files.chosen import BEST, Chosen, choose, of_its_run

    if base and not merge:
        raise click.UsageError("--base needs --merge")
    if private and not repo:
        raise click.UsageError("--private needs --push")
    if (checkpoint is None) == (run is None):
        raise click.UsageError("give a checkpoint directory or --run")
    if step and run is None:
        raise click.UsageError("--step goes with --run")
    chosen: Chosen | None = None
    if run is not None:
        chosen = asyncio.run(choose(store or store_with(run), run, step or BEST))
        checkpoint = chosen.saved.path
    else:
        assert checkpoint is not None
        chosen = of_its_run(checkpoint.resolve())
    source = _of_policy(checkpoint, policy)
    with folder_lock.reading(checkpoint):
        if merge:
            from agentrl.model_files.merged import export_merged

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
