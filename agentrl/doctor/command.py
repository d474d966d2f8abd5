"""`agentrl doctor`: problems of this machine and a run file, with their fixes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import msgspec
from msgspec.structs import replace

from agentrl import trainer
from agentrl.config import RunConfig, load
from agentrl.config.policies import has_no_own_policy, trained_policies, view
from agentrl.config.run_file import tasks_of
from agentrl.doctor import Finding, machine, run_check
from agentrl.errors import AgentRLError


@click.command()
@click.argument("run_file", type=click.Path(path_type=Path), required=False)
@click.argument("overrides", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(run_file: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check this machine and, with RUN_FILE, everything that its run would rely on.

    Each line is ok, warn or fail, with the fix. Exit code: 1 if a check failed."""
    findings = []
    for finding in examine(run_file, overrides):
        findings.append(finding._asdict())
        if not as_json:
            text = f"{finding.status:<5}{finding.name}: {finding.sentence}; {finding.cure}"
            click.echo(text.removesuffix("; "))
    failed = any(finding["status"] == "fail" for finding in findings)
    if as_json:
        click.echo(msgspec.json.encode({"ok": not failed, "findings": findings}))
    sys.exit(failed)


def examine(run_file: Path | None, overrides: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Yield each finding as soon as it is known; a run file that cannot be loaded is the last."""
    try:
        config = load(run_file, overrides) if run_file else RunConfig()
        if run_file:
            trainer.check(config)
        for check in machine.CHECKS:
            yield from run_check(check, config)
        if run_file and find_spec("torch") and not has_no_own_policy(config):
            with TemporaryDirectory() as folder:
                yield from _examine_policy(config, folder)
    except AgentRLError as error:
        sentence, _, cure = str(error).partition("; ")
        yield Finding("settings", "fail", sentence, cure)


def _examine_policy(config: RunConfig, folder: str) -> Iterator[Finding]:
    """Check the run's policies. folder: for outputs, such as the model of `policy.build`."""
    from transformers.utils.logging import disable_progress_bar

    from agentrl.algorithms.train.load_policies import load_policies, policy_directory
    from agentrl.doctor import policy, proofs, templates

    disable_progress_bar()
    config = config.without_warmup()  # what it makes has the same shapes
    if config.policy.build and not Path(config.model_path() or "?").is_dir():
        config = replace(config, output=f"{folder}/run")
    names = trained_policies(config)
    for name in names:
        sizes = list(run_check(policy.memory, config, policy_directory(view(config, name))[0]))
        said = f"memory of {name}" if len(names) > 1 else "memory"
        yield from (one._replace(name=said) for one in sizes)
        if sizes[0].status == "fail":
            return
    own = replace(config.policy, model=config.model_path())
    config = replace(config, policy=own, output=f"{folder}/run")
    task = next(iter(tasks_of(config, "train") or tasks_of(config, "heldout")), {})
    for model in load_policies(config):
        yield from run_check(policy.tokenizer, model)
        yield from run_check(policy.context, model, config, task)
        for check in (templates.tool_calls, templates.thinking, templates.turns):
            yield from run_check(check, model.tokenizer)
        yield from run_check(proofs.trie, model, config)
        yield from run_check(proofs.sampler, model, config)
    if task and config.runner.processes:
        yield from run_check(proofs.rollout, config, task)
