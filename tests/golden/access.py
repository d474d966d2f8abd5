"""What golden tests need of the library's insides. It is the only file here that changes when
modules of the library move; everything else goes through commands, HTTP and names of presets.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

from click.testing import CliRunner

ROOT = Path(__file__).parents[2]
WIDTH = 100  # columns of a terminal


@dataclass(frozen=True, slots=True)
class Printed:
    """What a command printed, and its exit code."""

    code: int
    text: str


def commands() -> Any:
    """The click group of `agentrl`, which raises errors instead of ending the process."""
    (script,) = entry_points(group="console_scripts", name="agentrl")
    return sys.modules[script.load().__module__].cli


def command(*words: str, folder: Path | None = None) -> Printed:
    """Run an `agentrl` command in this process, as in a terminal without colours."""
    environment = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb", "LINES": "50"}
    main, path = commands(), list(sys.path)
    with mock.patch.dict("os.environ", environment), working_in(folder or ROOT):
        try:
            done = CliRunner().invoke(main, words, prog_name="agentrl")
        finally:
            sys.path[:] = path
    text = done.output
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        text += f"error: {done.exception}\n"
    return Printed(done.exit_code, text)


class working_in:  # noqa: N801 - reads as a statement
    """The working directory is this folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        import os

        self.before = Path.cwd()
        os.chdir(self.folder)

    def __exit__(self, *error: object) -> None:
        import os

        os.chdir(self.before)


# -- algorithms ------------------------------------------------------------------------------------


def algorithm_options(name: str) -> dict[str, Any]:
    """The options of a preset, or of a modifier ("+tis"), with their defaults."""
    return {option: default for option, (_, default) in _algorithm(name).options().items()}


def is_recipe(name: str) -> bool:
    """Whether it is a preset or modifier with other options."""
    return bool(_algorithm(name).of)


def _algorithm(name: str) -> Any:
    from agentrl.algorithms.presets.registry import library_presets

    presets, modifiers = library_presets()
    return modifiers[name[1:]] if name[0] == "+" else presets[name]


def groups_of(records: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Groups of rollouts as the store returns them, from plain records."""
    from agentrl.core.types import (
        Branch,
        Group,
        Purpose,
        Reward,
        Rollout,
        RolloutState,
        Sampling,
        Scope,
        Transition,
        float32,
        int32,
    )

    def call(attempt: str, index: int, record: Mapping[str, Any]) -> Transition:
        known = {**record, "sampling": Sampling(temperature=record.get("temperature", 1.0))}
        known.pop("temperature", None)
        known["prompt"], known["completion"] = int32(record["prompt"]), int32(record["completion"])
        known["logprobs"] = float32(record["logprobs"])
        known["spans"] = [tuple(span) for span in record.get("spans", [])]
        return Transition(attempt=attempt, index=index, **known)

    def reward(scope: str, name: str, target: str | None, value: float) -> Reward:
        return Reward(value=value, name=name, scope=Scope(scope), target=target)

    def rollout(group: str, index: int, record: Mapping[str, Any]) -> Rollout:
        id = record["id"]
        branch = record.get("branch")
        return Rollout(
            id=id,
            run="golden",
            group=group,
            index=index,
            task=record.get("task", {}),
            purpose=Purpose.TRAIN,
            state=RolloutState(record.get("state", "succeeded")),
            step=0,
            attempts=1,
            attempt=id,
            result=None,
            failure=None,
            rewards=[reward(*row) for row in record["rewards"]],
            transitions=[call(id, i, one) for i, one in enumerate(record["calls"])],
            branch=None if branch is None else Branch(**branch),
        )

    return [
        Group(
            id=record["group"],
            run="golden",
            step=0,
            rollouts=[rollout(record["group"], i, one) for i, one in enumerate(record["rollouts"])],
        )
        for record in records
    ]


@dataclass(frozen=True)
class Step:
    """An optimizer step of an algorithm on a batch, up to the learner."""

    algo: Any
    batch: Any
    advantages: list[float]  # per token; NaN: not in the loss

    @property
    def calls(self) -> list[str]:
        """The call of each token."""
        return [self.batch.transitions[call] for call in self.batch.token_transition.tolist()]

    @property
    def rows(self) -> list[tuple[list[int], list[int], list[float]]]:
        """Each row's tokens, the positions of those that were sampled, and their temperatures."""
        return [
            (row.tokens.tolist(), row.actions.tolist(), row.temperature.tolist())
            for row in self.batch.rows
        ]

    @property
    def candidates(self) -> int:
        """How many tokens it reads at each position; 0: the sampled one."""
        return int(self.algo.topk)

    def psi(self, current: Any, others: Mapping[str, Any], candidates: Any = None) -> Any:
        """The weight of each token [N], or of each candidate [N, K]. current: log-probs of the
        policy; others: those of "old", "reference", "teacher", "old_candidates" and
        "teacher_candidates". candidates: their ids [N, K]."""
        import torch

        from agentrl.algorithms.objective.core import loss_coefficients, loss_terms
        from agentrl.algorithms.objective.ratios import GivenLogProbs

        batch = self.batch
        if candidates is not None:
            batch = dataclasses.replace(batch, topk_tokens=candidates)
        terms = loss_terms(self.algo, batch, GivenLogProbs(**others))
        return loss_coefficients(self.algo, terms, current, torch.arange(batch.n_tokens))

    def entropy_weights(self, others: Mapping[str, Any]) -> Any:
        """The coefficient of the entropy at each token [N], or None."""
        from agentrl.algorithms.objective.core import entropy_weights, loss_terms
        from agentrl.algorithms.objective.ratios import GivenLogProbs

        return entropy_weights(
            self.algo, loss_terms(self.algo, self.batch, GivenLogProbs(**others))
        )


def prepare_step(
    preset: str, options: Mapping[str, Any], groups: list[Any], folder: Path
) -> Callable[[Any, Any], Step]:
    """A function of the critic's values [N] and of the reference's log-probs [N] that returns the
    second of two equal steps, before which the first one was remembered.

    folder: of the files that options name."""
    from agentrl.algorithms.data.merge import build_batch
    from agentrl.algorithms.data.state import AlgorithmState
    from agentrl.algorithms.objective.core import compute_advantages
    from agentrl.algorithms.objective.ratios import ALL_OUTPUTS
    from agentrl.algorithms.presets.registry import make

    algo = make(preset, options, supplies=ALL_OUTPUTS, root=folder)
    side = algo.side
    names = [*algo.rewards, *(() if side is None else side.columns)]
    names = list(dict.fromkeys(names))
    batch = build_batch(groups, reward_names=names)

    def step(values: Any, reference: Any) -> Step:
        ready = dataclasses.replace(batch, values=values, reference=reference)
        if side is not None:
            ready = dataclasses.replace(ready, row_unit=side.row_unit(ready))
        if algo.remembered:
            state = AlgorithmState(algo.remembered)
            state.adopt(state.recall(ready, groups))
            ready = dataclasses.replace(ready, remembered=state.recall(ready, groups).columns)
        return Step(algo, ready, compute_advantages(algo, ready).tolist())

    step.batch = batch  # type: ignore[attr-defined]
    return step


def psi(preset: str, options: Mapping[str, Any], batch: Any, current: Any, old: Any) -> Any:
    """psi [N] of a batch that a test has made, by log-probs of the current and the old policy."""
    import torch

    from agentrl.algorithms.objective.core import loss_coefficients, loss_terms
    from agentrl.algorithms.objective.ratios import ALL_OUTPUTS, GivenLogProbs
    from agentrl.algorithms.presets.registry import make

    algo = make(preset, options, supplies=ALL_OUTPUTS)
    terms = loss_terms(algo, batch, GivenLogProbs(old=old))
    return loss_coefficients(algo, terms, current, torch.arange(batch.n_tokens))


# -- the gateway -----------------------------------------------------------------------------------


class ServedGateway:
    """A gateway on loopback in front of one policy server, and of a frozen endpoint `eyes`, with an
    empty store in a folder."""

    def __init__(self, folder: Path, upstream: str) -> None:
        self.folder, self.upstream, self.count = folder, upstream, 0

    async def __aenter__(self) -> ServedGateway:
        from agentrl.core.config import RunConfig, UpstreamConfig
        from agentrl.core.types import PolicyVersion
        from agentrl.runners.gateway.server import Gateway
        from agentrl.runners.main import run_features
        from agentrl.store import open_store

        self.store = open_store(f"sqlite:///{self.folder / 'store.db'}")
        await self.store.open_run("golden", {})
        await self.store.publish(
            PolicyVersion(
                run="golden", policy="policy", version=3, base_url=self.upstream, model="tiny"
            )
        )
        self.gateway = Gateway(
            self.store,
            "golden",
            upstreams={"eyes": UpstreamConfig(base_url=self.upstream, model="seeing")},
            features=run_features(self.store, RunConfig()),
        )
        self.gateway.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        import asyncio

        await asyncio.to_thread(self.gateway.close)
        await self.store.close()

    @property
    def url(self) -> str:
        """Without the version of an API at its end."""
        return str(self.gateway.base_url).removesuffix("/v1")

    async def attempt(self) -> tuple[str, Any]:
        """The key of a new attempt, and what `recorded` reads it by."""
        from agentrl.core.types import NewRollout, Sampling

        self.count += 1
        id = f"r{self.count}"
        sampling = Sampling(temperature=0.7, max_tokens=64)
        await self.store.enqueue(
            [
                NewRollout(
                    id=id, run="golden", group=id, index=0, task={"input": "x"},
                    sampling=sampling, timeout=60.0,
                )
            ]
        )  # fmt: skip
        (attempt,) = await self.store.claim(1, runner="golden", lease=600.0, run="golden")
        active = self.gateway.register(attempt, sealed=True)
        return active.key, active

    async def recorded(self, active: Any) -> tuple[list[dict[str, Any]], list[str]]:
        """The calls that an attempt left in the store, and what its rollout fails with."""
        import msgspec

        trace = await self.store.trace(active.attempt.rollout.id)
        calls = [] if trace is None else trace.transitions
        rows = [msgspec.to_builtins(call, enc_hook=list) for call in calls]
        return rows, list(active.failures.values())


def without_pauses() -> Any:
    """Repetitions of a call follow at once."""
    from agentrl.runners.gateway import upstream

    return mock.patch.multiple(upstream, FIRST_RETRY_PAUSE=0.001, MAX_RETRY_PAUSE=0.002)


# -- stored runs -----------------------------------------------------------------------------------


class RunWriter:
    """Writes a run into a store, as its processes would, from plain records."""

    def __init__(self, url: str, run: str, settings: Mapping[str, Any], folder: Path) -> None:
        self.url, self.run, self.settings, self.folder = url, run, settings, folder

    async def __aenter__(self) -> RunWriter:
        import msgspec

        from agentrl.core.config import resolve
        from agentrl.store import open_store

        self.store = open_store(self.url)
        given = {"name": self.run, "root": str(self.folder), "output": str(self.folder / "out")}
        config = resolve({**given, **self.settings}, source="run.toml")
        state = await self.store.open_run(self.run, msgspec.to_builtins(config))
        self.epoch = state.epoch
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.store.close()

    async def play(self, rollouts: Iterable[Mapping[str, Any]]) -> None:
        """Queue, claim and end rollouts: each with `id`, `group`, `task`, and what became of it."""
        from agentrl.core.types import (
            ErrorKind,
            Failure,
            NewRollout,
            Outcome,
            Purpose,
            Reward,
            Sampling,
            Scope,
            Span,
            Transition,
            float32,
            int32,
        )

        for record in rollouts:
            sampling = Sampling(temperature=record.get("temperature", 1.0), max_tokens=16)
            new = NewRollout(
                id=record["id"],
                run=self.run,
                group=record["group"],
                index=record.get("index", 0),
                task=record["task"],
                step=record.get("step", 0),
                purpose=Purpose(record.get("purpose", "train")),
                sampling=sampling,
                max_attempts=1,
            )
            await self.store.enqueue([new])
            (attempt,) = await self.store.claim(1, runner="golden", lease=600.0, run=self.run)
            calls = [
                Transition(
                    attempt=attempt.id,
                    index=index,
                    **{
                        **call,
                        "id": f"{record['id']}/call/{index}",
                        "prompt": int32(call["prompt"]),
                        "completion": int32(call["completion"]),
                        "logprobs": float32(call["logprobs"]),
                        "sampling": sampling,
                        "started": 1_700_000_000.0 + index,
                        "seconds": 0.5,
                    },
                )
                for index, call in enumerate(record["calls"])
            ]
            await self.store.add_transitions(calls)
            failure = record.get("failure")
            spans = [
                Span(
                    id=f"{number:016x}",
                    attempt=attempt.id,
                    parent=None,
                    name=name,
                    kind=kind,
                    start=1_700_000_000_000_000_000 + number,
                    end=1_700_000_000_250_000_000 + number,
                    attributes=attributes,
                )
                for number, (name, kind, attributes) in enumerate(record.get("spans", []), 1)
            ]
            outcome = Outcome(
                attempt=attempt.id,
                fence=attempt.fence,
                result=record.get("result"),
                rewards=[
                    Reward(
                        value=value,
                        name=name,
                        scope=Scope(scope),
                        target=f"{record['id']}/call/{target}" if scope == "transition" else target,
                        note=note,
                    )
                    for scope, name, target, value, note in record.get("rewards", [])
                ],
                spans=spans,
                failure=None
                if failure is None
                else Failure(kind=ErrorKind(failure[0]), message=failure[1], traceback=failure[2]),
            )
            await self.store.finish([outcome])

    async def commit(
        self,
        step: int,
        metrics: Mapping[str, float],
        credits: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Train the groups that have settled. credits: what the step stored of calls."""
        from agentrl.core.types import Credit, StepCommit, float32

        groups = await self.store.claim_groups(self.run, self.epoch, 64, timeout=0.0)
        stored = [
            Credit(
                transition=call,
                policy="policy",
                **{name: float32(values) for name, values in own.items()},
            )
            for call, own in (credits or {}).items()
        ]
        await self.store.commit_step(
            StepCommit(
                run=self.run,
                epoch=self.epoch,
                step=step,
                groups=[group.id for group in groups],
                versions={"policy": step + 1},
                checkpoint=None,
                metrics=dict(metrics),
                credits=stored,
            )
        )

    async def log(self, step: int, metrics: Mapping[str, float]) -> None:
        await self.store.log(self.run, step, dict(metrics), epoch=self.epoch)


# -- the learner -----------------------------------------------------------------------------------


def trained(
    settings: Mapping[str, Any],
    groups: list[Any],
    fill: Callable[[int, Any], Any],
    folder: Path,
    reference: bool = False,
) -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
    """A training step of the embedded learner on a small Qwen2 in float64: its metrics, and for
    each weight its gradient and its value afterwards.

    fill: returns the values of weight number i with a shape. reference: there is a reference model,
    with other weights."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from agentrl.algorithms.train.policies import LoadedModel
    from agentrl.algorithms.train.stages import extend_updater, load_algorithm, make_updater
    from agentrl.core.config import resolve

    shape = Qwen2Config(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(shape).to(torch.float64)
    end = "<|endoftext|>"
    names = [end, *(f"t{i}" for i in range(1, 24))]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=end))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=end, unk_token=end)

    def filled(shift: int) -> None:
        with torch.no_grad():
            for number, weight in enumerate(model.parameters()):
                weight.copy_(fill(number + shift, weight.shape))

    own: dict[str, Any] = {"policy": {"model": "-", "dtype": "float32"}, "output": str(folder)}
    if reference:
        filled(7)
        model.save_pretrained(folder / "reference")
        tokenizer.save_pretrained(folder / "reference")
        own["reference"] = {"model": str(folder / "reference")}
    filled(0)
    config = resolve({**own, **settings}, source="golden")
    loaded = LoadedModel("-", model, tokenizer, policies=["policy"])
    updater = make_updater(config, "policy", load_algorithm(config), loaded)
    updater = extend_updater(updater, loaded, Path(config.output))
    gradients: dict[str, Any] = {}

    def keep(name: str) -> Callable[[Any], None]:
        return lambda weight: gradients.update({name: weight.grad.detach().clone()})

    parameters = dict(model.named_parameters())
    for name, weight in parameters.items():
        weight.register_post_accumulate_grad_hook(keep(name))
    metrics = updater.update(0, groups)
    return metrics, gradients, {name: x.detach().clone() for name, x in parameters.items()}
