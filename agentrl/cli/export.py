"""`agentrl export`: export traces and models of a run to other tools."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from gzip import compress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from agentrl.config import store_of
from agentrl.errors import AgentRLError, ConfigError, NotFound, Unavailable
from agentrl.types import Span

if TYPE_CHECKING:
    import httpx

    from agentrl.store.base import Store

ROUTE = "/v1/traces"
SPANS_PER_REQUEST = 500  # spans per request, unless one attempt has more
MOST_TRIES = 6
FIRST_PAUSE = 0.5  # seconds before the second try; doubles
TRANSIENT = frozenset({429, 502, 503, 504})  # retryable statuses of the OTLP specification
REQUEST_TIMEOUT = 30.0  # seconds of one request
CARD = """---
library_name: {kind}
tags: [agentrl, reinforcement-learning]
---
Trained by reinforcement learning with agentrl.
"""


@click.group()
def export() -> None:
    """Export traces and models to other tools."""


@export.command()
@click.option("--store", required=True, help="Store URL.")
@click.option("--run", required=True, help="Name of the run.")
@click.option("--rollout", "rollouts", multiple=True, help="Only this rollout; may be repeated.")
@click.option("--to", "url", required=True, help="OTLP/HTTP endpoint, such as a Phoenix's URL.")
@click.option("--header", "headers", multiple=True, help="KEY=VALUE to send, such as an API key.")
def otlp(
    store: str, run: str, rollouts: tuple[str, ...], url: str, headers: tuple[str, ...]
) -> None:
    """Send the last attempt of each rollout of a run as a trace to Phoenix, Langfuse, Jaeger or any
    OTLP receiver.

    Sending twice changes nothing, because the ids stay the same."""
    pairs = {name: value for name, _, value in (header.partition("=") for header in headers)}
    if wrong := [header for header in headers if header.find("=") < 1]:
        raise ConfigError(f"--header {wrong[0]!r}: write it as KEY=VALUE")
    attempts, spans = asyncio.run(send(store, run, rollouts, url, pairs))
    click.echo(f"sent {attempts} attempts as {spans} spans")


@export.command()
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


async def send(
    store_url: str, run: str, rollouts: Sequence[str], url: str, headers: Mapping[str, str]
) -> tuple[int, int]:
    """Send traces; returns the numbers of attempts and spans. Raises NotFound for an unknown run or
    rollout, Unavailable if the receiver is unreachable, AgentRLError if it refuses spans."""
    import httpx

    from agentrl.base import otlp as wire
    from agentrl.store import open_store

    attempts = spans = 0
    target = url if url.rstrip("/").endswith(ROUTE) else url.rstrip("/") + ROUTE
    about = {"service.name": "agentrl", "openinference.project.name": run}
    async with (
        open_store(store_url, readonly=True) as store,
        httpx.AsyncClient(timeout=REQUEST_TIMEOUT, headers=dict(headers)) as client,
    ):
        batch: list[Span] = []
        async for found in _traces(store, run, rollouts):
            attempts, spans = attempts + 1, spans + len(found)
            if batch and len(batch) + len(found) > SPANS_PER_REQUEST:
                await _post(client, target, wire.encode(batch, about))
                batch = []
            batch += found
        if batch:
            await _post(client, target, wire.encode(batch, about))
    return attempts, spans


async def _traces(store: Store, run: str, rollouts: Sequence[str]) -> AsyncIterator[list[Span]]:
    from agentrl.telemetry.genai import spans_of

    if await store.run(run) is None:
        raise NotFound(f"there is no run {run!r} in {store.url}; it has {await store.runs()}")
    for rollout in rollouts or [row.id for row in await store.rollouts(run) if row.attempt]:
        trace = await store.trace(rollout)
        if trace is None or trace.rollout.run != run:
            raise NotFound(f"run {run!r} has no rollout {rollout!r} with an attempt to send")
        yield spans_of(trace)


async def _post(client: httpx.AsyncClient, url: str, body: bytes) -> None:
    import httpx

    from agentrl.base.otlp import PROTOBUF

    headers = {"content-type": PROTOBUF, "content-encoding": "gzip"}
    failure, pause = "", 0.0
    for attempt in range(MOST_TRIES):
        await asyncio.sleep(pause)
        pause = FIRST_PAUSE * 2**attempt * random.uniform(0.5, 1.0)
        try:
            answer = await client.post(url, content=compress(body), headers=headers)
        except httpx.TransportError as error:
            failure = f"{type(error).__name__}: {error}"
            continue
        if answer.status_code not in TRANSIENT:
            return _accept(answer)
        failure = f"status {answer.status_code}"
        wait = answer.headers.get("retry-after", "")
        pause = float(wait) if wait.isdigit() else pause
    raise Unavailable(
        f"nothing receives traces at {url} ({failure}); start the receiver and try again"
    )


def _accept(answer: httpx.Response) -> None:
    from google.protobuf.message import DecodeError
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    if not answer.is_success:
        key = "give its key with --header 'Authorization=...'"
        hint = key if answer.status_code in (401, 403) else f"{answer.text:.200}"
        raise AgentRLError(
            f"{answer.url} refuses the traces with status {answer.status_code}: {hint}"
        )
    if answer.headers.get("content-type", "").startswith("application/x-protobuf"):
        try:
            response = trace_service_pb2.ExportTraceServiceResponse.FromString(answer.content)
        except DecodeError:
            raise AgentRLError(
                f"{answer.url} did not answer with OTLP; is it the URL of an OTLP/HTTP receiver?"
            ) from None
        partial = response.partial_success
        if partial.rejected_spans:
            reason = partial.error_message or "no reason given"
            raise AgentRLError(f"{answer.url} rejected {partial.rejected_spans} spans: {reason}")
