"""Parts: features in folders of their own, which the rest of the library does not import.

A part is described by one record, named by an entry point in the group `agentrl.parts`, whether it
is the library's own or another package's. A package that adds a single thing, such as a preset,
names it in a group of its kind (`agentrl.presets`) and needs no record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path

import msgspec

GROUP = "agentrl.parts"
KNOWN = Path(__file__).with_name("parts.json")  # the library's own parts: {kind: {name: part}}
Objects = Mapping[str, str]  # name -> "package.module:object", imported at its first use


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What a feature contributes. Nothing of it is imported before it is used."""

    name: str  # in messages, such as "prompt search"
    summary: str  # what a user gets, in a sentence
    uses: tuple[str, ...] = ()  # names of the other parts that it imports, at their first use
    needs: tuple[str, ...] = ()  # those without which nothing of it can be imported
    outputs: tuple[str, ...] = ()  # names in the folder of a run, which `--fresh` deletes
    tables: Objects = {}  # of the run file, by path: `config.base.Section`, or type of a text
    kinds: Objects = {}  # of tables with several kinds, as "engine vllm": `config.base.KindSection`
    commands: Objects = {}  # of the command line, as "store serve": `click.Command`
    derives: Objects = {}  # settings that follow from others of a run file: config -> config
    unplaced: Objects = {}  # settings without where something of theirs is: config -> config
    checks: Objects = {}  # before a run starts: config -> None; raises ConfigError
    starts: Objects = {}  # before `agentrl train`: config -> warnings; raises ConfigError
    settles: Objects = {}  # before a run starts: (store, config) -> config; raises ConfigError
    restarts: Objects = {}  # by option: (config, the checkpoint, whether to take over) -> None
    hints: Objects = {}  # at what a mistake in a run file means, by its kind: see `hint`
    forecasts: Objects = {}  # of a run, for `train --dry-run`: config -> lines
    estimates: Objects = {}  # of a run, before it starts: (a policy's view, its model) -> lines
    memory: Objects = {}  # of a run: (a policy's view, its model) -> (frozen weights, bytes by use)
    beside: Objects = {}  # beside a run: (config, its file, console) -> its process, or None
    follows: Objects = {}  # (store, run, a `Trainer`'s callbacks) -> context of what calls them
    presets: Objects = {}
    learners: Objects = {}
    engines: Objects = {}
    executors: Objects = {}
    harnesses: Objects = {}
    rewards: Objects = {}
    added_rewards: Objects = {}  # by the reference of a reward that is added to groups
    sinks: Objects = {}
    patches: Objects = {}  # of a model before it is trained, by setting: model -> None
    initial: Objects = {}  # weights, by table: (a policy's view, its model) -> whether it made them
    imitated: Objects = {}  # a tiny model, of its conversations: (model, rows) -> problem, or ""
    training: Objects = {}  # of a training run: config -> `algorithms.train.hooks.Hooks`, or None
    runner: Objects = {}  # by setting: (config, root) -> `runners.hooks.RunnerHooks`, or None
    tracing: Objects = {}  # in processes of agents, before each attempt: () -> None
    candidates: Objects = {}  # without policies: (store, config, state) -> id of its texts, or None
    figures: Objects = {}  # of a step, on the console: its metrics -> {label: text}
    examples: Objects = {}  # of a finished run: (store, config, steps) -> titles, what rich prints
    reports: Objects = {}  # of a finished run: its `StepRow`s -> something rich prints, or None
    adapters: Objects = {}  # by setting: see `algorithms.model.adapters.load_adapted`
    loaders: Objects = {}  # of models: (name, shape, config, options) -> (model, info), or None
    tokenizers: Objects = {}  # of a policy, once loaded: (tokenizer, the policy's view) -> None
    tool_formats: Objects = {}  # of tool calls, by name: `model.tool_parser.ToolParser`
    cures: Objects = {}  # for a chat template without tools: its tokenizer -> what to do
    dialects: Objects = {}  # of a gateway, by the path of calls: `runners.dialects.ModelApi`
    spans: Objects = {}  # that others send, by path: `base.span_names.Receive`
    files: Objects = {}  # of a finished run: (config, its `StepRow`s) -> path of one, or None
    verdicts: Objects = {}  # on a finished run: (config, its `StepRow`s) -> sentence, or ""
    findings: Objects = {}  # on a run: (store, run) -> what `agentrl view` shows of each policy
    causes: Objects = {}  # of steps that trained nothing: (store, run, their number) -> sentence
    gateway: Objects = {}  # (store, config) -> `runners.gateway.features.Feature`, or None
    pages: Objects = {}  # of the view, by address: store -> `view.pages.PartPage`
    finders: Objects = {}  # of a run's store: the name of a run or rollout -> URL
    stores: Objects = {}  # by the scheme of their URLs
    row_files: Objects = {}  # of tasks and items, by suffix or scheme: source -> (place, row)s
    media: Objects = {}  # of rows of items: row -> (the row that names its images, `Image`s)
    references: Objects = {}  # of settings, by their scheme: (reference, root, key) -> object
    environments: Objects = {}  # `environments.Environment`
    libraries: Objects = {}  # by the name of a module that users import: an object in it


KINDS = Part.__struct_fields__[5:]  # of what parts contribute


@cache
def parts() -> tuple[Part, ...]:
    """The installed parts that have what they need, by name. A module of a part's record imports
    nothing but this one."""
    found: list[Part] = [point.load() for point in _entry_points(GROUP, tuple(sys.path))]
    there = {part.name for part in found}
    whole = (part for part in found if there.issuperset(part.needs))
    return tuple(sorted(whole, key=lambda part: part.name))


def installed_plugins(kind: str) -> EntryPoints:
    """What parts contribute of a kind, and the entry points in the group `agentrl.<kind>`."""
    group = f"agentrl.{kind}"
    own = [
        EntryPoint(name, value, group)
        for part in parts()
        for name, value in getattr(part, kind, {}).items()
    ]
    return EntryPoints([*own, *_entry_points(group, tuple(sys.path))])


def hint(kind: str, *about: object) -> str:
    """A sentence of an installed part about a mistake; empty if none knows more."""
    points = (point for point in installed_plugins("hints") if point.name == kind)
    return next((str(point.load()(*about)) for point in points), "")


def index() -> dict[str, dict[str, str]]:
    """The name of the installed part that contributes each thing, by kind."""
    return {
        kind: {name: part.name for part in parts() for name in getattr(part, kind)}
        for kind in KINDS
    }


def missing(kind: str, name: str) -> str | None:
    """A sentence about the library's part that contributes this and is not installed, if so."""
    part = known(kind).get(name)
    if part is None or has(part):
        return None
    return f"it belongs to the part {part!r}, which is not installed here"


def has(part: str) -> bool:
    """Whether the part of this name is installed."""
    return any(one.name == part for one in parts())


@cache
def known(kind: str) -> Mapping[str, str]:
    """The library's part, installed or not, that contributes each thing of a kind."""
    names: dict[str, str] = json.loads(KNOWN.read_bytes()).get(kind, {})
    return names


def _entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    return _every_entry_point(path).get(group, EntryPoints())


@cache
def _every_entry_point(path: tuple[str, ...]) -> dict[str, EntryPoints]:
    """Those of this library's groups. Cached by `path` (`sys.path`), because reading them takes
    10 ms, for one group or for all."""
    found = entry_points()
    groups = {group for group in found.groups if group.startswith("agentrl.")}
    return {group: found.select(group=group) for group in groups}
