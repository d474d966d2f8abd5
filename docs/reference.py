"""The parts of the reference that follow from the code's docstrings and comments, as Markdown.

`make reference` writes them into the pages of docs/reference, which a test compares with them. What
depends on more than the code, such as exported runs, is added when the site is built."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import sqlite3
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import fields

from agentrl.algorithms import LATE
from agentrl.algorithms.objective import core
from agentrl.algorithms.presets import registry
from agentrl.cli.main import cli
from agentrl.lab.catalogue import record
from agentrl.run_files.command import comments, run_file_schema, sections
from agentrl.store import open_store

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples.gallery import GALLERY, REAL  # noqa: E402

FAMILIES = ROOT / "docs/reference/algorithms"
ARXIV = re.compile(r"\b(\d{4}\.\d{5})\b")
FIRST = (  # settings that people change first
    "steps", "agent.path", "agent.timeout", "tasks.train", "tasks.heldout", "verifier.path",
    "policy.model", "policy.lora.rank", "sampling.max_tokens", "engine.max_context",
    "algorithm.preset", "algorithm.lr", "algorithm.groups", "algorithm.group_size", "eval.every",
    "runner.concurrency",
)  # fmt: skip
GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
WRITTEN = "<!-- written by `make reference` -->\n"  # above a page that is generated as a whole
API = {  # what is public, by the heading of its section
    "Training": [
        "agentrl.trainer.Trainer",
        "agentrl.results.TrainingResult",
    ],
    "A tiny policy": [
        "agentrl.tiny.imitator",
    ],
    "Inside an agent": [
        "agentrl.runners.scoring.rewards.reward",
        "agentrl.runners.tracing.roles.role",
        "agentrl.environments.endpoints.endpoint",
    ],
    "Environments": [
        "agentrl.environments.base.Environment",
        "agentrl.environments.base.Episode",
        "agentrl.environments.endpoints.Endpoint",
    ],
    "Records": [
        "agentrl.types.Task",
        "agentrl.types.NewRollout",
        "agentrl.types.Rollout",
        "agentrl.types.Attempt",
        "agentrl.types.Group",
        "agentrl.types.Trace",
        "agentrl.types.Transition",
        "agentrl.types.Span",
        "agentrl.types.Reward",
        "agentrl.types.Scope",
        "agentrl.types.Credit",
        "agentrl.types.Branch",
        "agentrl.types.Sampling",
        "agentrl.types.Failure",
        "agentrl.types.ErrorKind",
        "agentrl.types.PolicyVersion",
        "agentrl.types.RunState",
        "agentrl.types.StepCommit",
        "agentrl.types.StepRow",
    ],
    "The store": [
        "agentrl.store.open_store",
        "agentrl.store.base.Store",
    ],
    "Extensions": [
        "agentrl.runners.executors.Executor",
        "agentrl.runners.executors.ExecutionResult",
        "agentrl.algorithms.learners.base.Learner",
        "agentrl.algorithms.engines.base.PolicyServer",
        "agentrl.telemetry.sinks.base.Sink",
    ],
    "Building blocks of presets": [],  # of LATE
    "Rewards in a team": [
        "agentrl.teams.rewards",
        "agentrl.algorithms.replays.coalitions",
    ],
    "Notebooks": [
        "agentrl.view.notebook.show",
    ],
    "Errors": [
        "agentrl.errors",
    ],
}
LONGEST_DEFAULT = 30  # characters
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def settings() -> str:
    """The settings that are changed first, and a section for each table of the run file, with the
    comments beside its fields."""
    defs = run_file_schema()["$defs"]
    waiting, done, tables = [("", ["RunConfig"])], {}, dict[str, list[str]]()
    for path, kinds in waiting:  # grows during the loop
        title = f"[{path}]" if path else "Top level"
        lines = tables[path] = [f"\n## `{title}`\n"]
        common: set[str] = set()
        for name in kinds:
            table = defs[name]
            tag = sections()[name].__struct_config__
            if len(kinds) > 1:
                shown = tag.tag if tag.tag != "external" else "file.py:name"
                lines.append(f'\n### `{path}` with `{tag.tag_field} = "{shown}"`\n')
            lines += [line(table.get("description", "")), "\n| setting | type | default | |"]
            lines.append("|---|---|---|---|")
            notes = comments(sections()[name])
            for key, one in table["properties"].items():
                inner = tables_in(one)
                full = f"{path}.{key}" if path else key
                deeper = f"{full}.NAME" if "additionalProperties" in one else full
                if inner and tuple(inner) not in done:
                    done[tuple(inner)] = deeper
                    waiting.append((deeper, inner))
                if key in common:
                    continue
                kind = f"[table](#{slug(done[tuple(inner)])})" if inner else type_of(one)
                default = "" if inner or "default" not in one else code(one["default"])
                lines.append(row(f"`{full}`", kind, default, plain(notes.get(key, ""))))
            common |= set(table["properties"])
    every = [line for _, lines in sorted(tables.items()) for line in lines]
    rows = {line.split("`")[1]: line for line in every if line.startswith("| `")}
    first = ["## Changed first\n", "| setting | type | default | |", "|---|---|---|---|"]
    first += [rows[name] for name in FIRST]
    return "\n".join([*first, *every]) + "\n"


def tables_in(one: dict[str, Any]) -> list[str]:
    """The types of a setting's tables: of itself, or of its values by name."""
    inner = one.get("additionalProperties") or one.get("items") or one
    kinds = inner.get("anyOf", [inner]) if isinstance(inner, dict) else []
    return [kind["$ref"].rpartition("/")[2] for kind in kinds if "$ref" in kind]


def type_of(one: dict[str, Any]) -> str:
    if "anyOf" in one:
        return " or ".join(type_of(kind) for kind in one["anyOf"])
    if "enum" in one:
        return " ".join(map(code, one["enum"]))
    bounds = " and ".join(f"{sign} {one[key]}" for key, sign in BOUNDS.items() if key in one)
    items = f" of {type_of(one['items'])}s" if isinstance(one.get("items"), dict) else ""
    word = {"null": "none", "object": "table", "array": "list"}.get(one.get("type", ""))
    return f"{word or one.get('type', 'any value')}{items} {bounds}".strip()


def commands() -> str:
    """A section for each command that `agentrl --help` shows."""
    return "".join(command("agentrl", cli))


def command(name: str, one: click.Command) -> Iterator[str]:
    context = click.Context(one, info_name=name)
    if not isinstance(one, click.Group):
        pieces = " ".join(one.collect_usage_pieces(context))
        yield f"\n## `{name}`\n\n```text\n{name} {pieces}\n```\n\n{plain(one.help or '')}\n\n"
        options = [p for p in one.params if isinstance(p, click.Option)]
        if options:
            yield "| option | |\n|---|---|\n"
        for option in options:
            written = option.get_help_record(context) or ("", "")
            yield row(f"`{written[0]}`", plain(written[1])) + "\n"
        return
    if name != "agentrl" and one.invoke_without_command:
        yield f"\n## `{name}`\n\n{plain(one.help or '')}\n"
    for inner in sorted(one.commands.values(), key=lambda c: str(c.name)):
        if not inner.hidden:
            yield from command(f"{name} {inner.name}", inner)


def schema_tables() -> str:
    """The tables of a new store, with their columns and indexes."""

    async def create(file: Path) -> None:
        async with open_store(f"sqlite:///{file}"):
            pass

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "store.db")
        asyncio.run(create(file))
        db = sqlite3.connect(file)
        lines: list[str] = []
        tables = (
            "select name from sqlite_master where type = 'table' and sql is not null order by 1"
        )
        for (table,) in db.execute(tables).fetchall():
            lines += [f"\n## `{table}`\n", "| column | type | |", "|---|---|---|"]
            links = {r[3]: f"of `{r[2]}`" for r in db.execute(f"pragma foreign_key_list({table})")}
            for _, column, kind, required, _, key in db.execute(f"pragma table_info({table})"):
                notes = ["key" if key else "required" if required else "", links.get(column, "")]
                lines.append(row(f"`{column}`", kind.lower(), ", ".join(filter(None, notes))))
        db.close()
    return "\n".join(lines) + "\n"


def gallery() -> str:
    """A row per example of `make gallery`, with a link if it is exported."""
    lines = ["| run | |", "|---|---|"]
    for name, text in (REAL | GALLERY).items():
        there = (ROOT / "gallery" / f"{name}.html").is_file()
        shown = f"[{name}](../gallery/{name}.html)" if there else name
        lines.append(row(shown, f"{text} ([`examples/{name}`](../examples/{name}))"))
    return "\n".join(lines) + "\n"


def objective() -> str:
    """The formulas of every algorithm."""
    return f"```text\n{inspect.getdoc(core)}\n```"


def api() -> str:
    """A section for each public name: its signature or fields, its description and its methods."""
    found = list[str]()
    for title, names in API.items():
        found.append(f"## {title}\n")
        if not names:
            found.append("Import them from `agentrl.algorithms`.\n")
            homes = ((home, name) for home, own in LATE.items() for name in own.split())
            names = [f"agentrl.algorithms.{home}.{name}" for home, name in homes]
        for path in names:
            found += public(path)
    return "\n".join(found)


def public(path: str) -> Iterator[str]:
    """The section of an object, or of each object of a module, by its path."""
    home, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(home), name, None)
    if thing is None:
        thing = importlib.import_module(path)
    if not inspect.ismodule(thing):
        yield from described(path, thing)
        return
    for name, inner in vars(thing).items():
        own = getattr(inner, "__module__", "") == thing.__name__ and not name.startswith("_")
        if own and (inspect.isclass(inner) or inspect.isfunction(inner)):
            yield from described(f"{path}.{name}", inner)


def described(path: str, thing: Any) -> Iterator[str]:
    name = path.rpartition(".")[2]
    yield f"### `{name}`\n"
    is_record = inspect.isclass(thing) and issubclass(thing, msgspec.Struct)
    yield f"```text\n{path}{'' if is_record else signature(thing)}\n```\n"
    yield papers(plain(own_doc(thing))) + "\n"
    if inspect.isclass(thing) and issubclass(thing, Enum):
        yield f"Values: {', '.join(code(each.value) for each in thing)}.\n"
    if is_record:
        said = comments(thing)
        rows = [(f"`{f.name}`", annotation(f.type), said.get(f.name, "")) for f in fields(thing)]
        yield (
            "\n".join(["| field | type | |", "|---|---|---|", *(row(*each) for each in rows)])
            + "\n"
        )
    for key, method in vars(thing).items() if inspect.isclass(thing) else ():
        function = getattr(method, "__func__", method)
        if inspect.isfunction(function) and not key.startswith("_") and own_doc(function):
            call = line(f"{key}{signature(function)}")
            yield f"- `{call}`  \n  {papers(plain(line(own_doc(function))))}\n"


def own_doc(thing: Any) -> str:
    """Its docstring, unless Python or a library made it."""
    doc = inspect.cleandoc(thing.__doc__ or "")
    return "" if doc.startswith(f"{getattr(thing, '__name__', '')}(") else doc


def signature(thing: Any) -> str:
    """Parameters and result, without annotations' modules."""
    if inspect.isclass(thing) and (
        issubclass(thing, Exception | Enum) or getattr(thing, "_is_protocol", False)
    ):
        return ""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    own = [
        each.replace(annotation=Shown(annotation(each.annotation)), default=shown(each.default))
        if each.annotation is not each.empty
        else each.replace(default=shown(each.default))
        for each in found.parameters.values()
        if each.name != "self"
    ]
    result = found.return_annotation
    if inspect.isclass(thing) or result is found.empty:
        return str(found.replace(parameters=own, return_annotation=found.empty))
    return str(found.replace(parameters=own, return_annotation=Shown(annotation(result))))


class Shown(str):
    """A text that `inspect` writes without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def shown(default: Any) -> Any:
    """A default as it is written, `...` for a long one."""
    if default is inspect.Parameter.empty:
        return default
    text = (
        f"{type(default).__name__}.{default.name}" if isinstance(default, Enum) else repr(default)
    )
    return Shown(text if len(text) <= LONGEST_DEFAULT and not text.startswith("<") else "...")


def annotation(kind: Any) -> str:
    """An annotation or signature as text; names without their modules and addresses."""
    text = kind.__name__ if inspect.isclass(kind) else str(kind).replace("'", "")
    return re.sub(r"\b(?:\w+\.)+(?=[A-Za-z_])", "", text)


def family_of(made: Any) -> str:
    """The module of a preset of `presets/`, or the package of another's family."""
    module = str(made.function.__module__)
    package = module.rpartition(".")[0]
    return module if package.endswith(".presets") else package


def page_of(family: str) -> str:
    """The name of a family's page: `teams`, `replays`."""
    return family.removeprefix("agentrl.algorithms.").removeprefix("presets.").replace(".", "-")


def words() -> dict[str, Any]:
    """All presets and, with "+", modifiers; those of the short list first."""
    presets, modifiers = registry.library_presets()
    known = presets | {f"+{name}": made for name, made in modifiers.items()}
    return dict(sorted(known.items(), key=lambda item: (not item[1].usual, item[0])))


def presets() -> str:
    """A row per preset and modifier, with a link to its family's page."""
    lines = ["| | |", "|---|---|"]
    for name, made in words().items():
        link = f"{page_of(family_of(made))}.md#{slug(name)}"
        lines.append(row(f"[`{name}`]({link})", line(made.doc).partition(". ")[0]))
    return "\n".join(lines) + "\n"


def families() -> dict[str, str]:
    """File name -> page, for each family of presets and modifiers."""
    pages: dict[str, str] = {}
    homes, used = defaultdict(set), defaultdict(list)
    for name, preset in words().items():
        family = family_of(preset)
        short, module = page_of(family), sys.modules[family]
        homes[short].add(sys.modules[preset.function.__module__])
        file = family.removeprefix("agentrl.").replace(".", "/")
        file += "" if hasattr(module, "__path__") else ".py"
        head = f"# {short}\n\n{inspect.getdoc(module)}\n\nSource: [`{file}`](../../../{file}).\n"
        made = record(preset.host + name if name.startswith("+") else name)
        used[short] += made
        text = f"\n## `{name}`\n\n{papers(preset.doc)}\n"
        pages[short] = pages.get(short, head) + text + "\n```text\n" + "\n".join(made) + "\n```\n"
    for short, text in pages.items():
        parts = described_classes(used[short], sorted(homes[short], key=lambda one: one.__name__))
        pages[short] = f"{text}\n## Parts\n\n" + "".join(
            f"- `{name}`: {doc}\n" for name, doc in parts
        )
    return pages


def described_classes(made: list[str], modules: Collection[Any]) -> Iterator[tuple[str, str]]:
    """Name and description of the classes in a preset's record."""
    for part in dict.fromkeys(re.findall(r"\b([A-Z]\w+)\(", "\n".join(made))):
        homes = [
            *modules,
            *(importlib.import_module(f"agentrl.algorithms.{m}") for m in LATE),
        ]
        doc = next((inspect.getdoc(vars(m)[part]) for m in homes if part in vars(m)), None)
        if doc:
            yield part, papers(line(doc.partition("\n\n")[0]))


def plain(text: str) -> str:
    """Text with escaped brackets outside of code, which would be links or tags."""
    escaped = {"[": "\\[", "<": "&lt;"}
    return re.sub(r"(`[^`]*`)|([\[<])", lambda m: m[1] or escaped[m[2]], inspect.cleandoc(text))


def papers(text: str) -> str:
    return ARXIV.sub(r"[\1](https://arxiv.org/abs/\1)", text)


def code(value: object) -> str:
    text = msgspec.json.encode(value).decode() if value is not None else "none"
    return f"`{text}`"


def row(*cells: str) -> str:
    return "| " + " | ".join(line(cell).replace("|", "\\|") for cell in cells) + " |"


def line(text: str) -> str:
    return " ".join(text.split())


def slug(text: str) -> str:
    """The anchor of a heading on the site and GitHub."""
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def pages() -> dict[Path, str]:
    """What the pages with generated parts should be."""
    found = {FAMILIES / f"{name}.md": WRITTEN + text for name, text in families().items()}
    for file in sorted((ROOT / "docs").rglob("*.md")):
        text = file.read_text(encoding="utf-8")
        if GENERATED.search(text):
            found[file] = GENERATED.sub(
                lambda match: f"{match[1]}\n{globals()[match[2]]().strip()}\n{match[3]}", text
            )
    return found


def left_over(known: Collection[Path]) -> list[Path]:
    """Written pages of families that there are no more."""
    files = set(FAMILIES.glob("*.md")) - set(known)
    return [file for file in files if file.read_text(encoding="utf-8").startswith(WRITTEN)]


def renew() -> None:
    """Write the pages whose generated parts have changed."""
    now = pages()
    for file in left_over(now):
        file.unlink()
    for file, text in now.items():
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(f"Wrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    renew()
