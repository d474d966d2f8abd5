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
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import Any

import click
import msgspec
from msgspec.structs import fields

from agentrl.advise import composition, record
from agentrl.algorithms import LAZY
from agentrl.algorithms.objective import core
from agentrl.algorithms.presets import registry
from agentrl.cli.init import comments, run_file_schema, sections
from agentrl.cli.main import cli
from agentrl.store import open_store

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from examples.gallery import GALLERY, REAL  # noqa: E402

FAMILIES = ROOT / "docs/reference/algorithms"
ARXIV = re.compile(r"\b(\d{4}\.\d{5})\b")
FIRST = (  # settings that most runs set
    "steps", "agent.path", "agent.timeout", "tasks.train", "tasks.heldout", "verifier.path",
    "policy.model", "policy.lora.rank", "sampling.max_tokens", "engine.max_context",
    "algorithm.preset", "algorithm.lr", "algorithm.groups", "algorithm.group_size", "eval.every",
    "runner.concurrency",
)  # fmt: skip
GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)
WRITTEN = "<!-- written by `make reference` -->\n"  # above a page that is generated as a whole
ERRORS = "agentrl.core.errors"  # of which only the classes are public
API = {  # what is public, by the heading of its section
    "Training": [
        "agentrl.trainer.Trainer",
        "agentrl.core.types.TrainingResult",
    ],
    "A tiny policy": [
        "agentrl.tiny.imitator",
    ],
    "Inside an agent": [
        "agentrl.runners.scoring.reward",
        "agentrl.runners.tracing.attempt_log.role",
        "agentrl.environments.playing.endpoint",
    ],
    "Environments": [
        "agentrl.environments.base.Environment",
        "agentrl.environments.base.Episode",
        "agentrl.environments.playing.Endpoint",
    ],
    "Records": [
        "agentrl.core.types.Task",
        "agentrl.core.types.NewRollout",
        "agentrl.core.types.Rollout",
        "agentrl.core.types.Attempt",
        "agentrl.core.types.Group",
        "agentrl.core.types.Trace",
        "agentrl.core.types.Transition",
        "agentrl.core.types.Span",
        "agentrl.core.types.Reward",
        "agentrl.core.types.Scope",
        "agentrl.core.types.Credit",
        "agentrl.core.types.Branch",
        "agentrl.core.types.Sampling",
        "agentrl.core.types.Failure",
        "agentrl.core.types.ErrorKind",
        "agentrl.core.types.PolicyVersion",
        "agentrl.core.types.RunState",
        "agentrl.core.types.StepCommit",
        "agentrl.core.types.StepRow",
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
        "agentrl.telemetry.sinks.Sink",
    ],
    "Building blocks of presets": [],  # of LAZY
    "Rewards in a team": [
        "agentrl.algorithms.team_rewards",
    ],
    "Notebooks": [
        "agentrl.view.export.show",
    ],
    "Errors": [
        ERRORS,
    ],
}
EXPLAINED = ("Training", "A tiny policy", "Inside an agent")  # with their whole docstrings
OTHER_PARTS = (  # where a family's page does not describe them
    "Others: [parts of several families](README.md#parts) and\n"
    "[building blocks](../api.md#building-blocks-of-presets).\n"
)
MAX_DEFAULT_CHARS = 30  # characters
MAX_REPEATED_CHARS = 100  # characters of a description that two settings have
MAX_LINE_CHARS = 100  # characters of a signature
SIMPLE = ("integer", "number", "boolean", "string")  # types that a default shows
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


def settings() -> str:
    """The settings that most runs set, and a section for each table of the run file, with the
    comments beside its fields. The row that names a table has the first sentence about it."""
    defs = run_file_schema()["$defs"]
    waiting, done, tables = [("", ["RunConfig"])], {}, dict[str, list[str]]()
    documented: dict[tuple[str, str], str] = {}  # key and description -> the setting that has it
    for path, kinds in waiting:  # grows during the loop
        title = f"[{path}]" if path else "Top level"
        lines = tables[path] = [f"\n## `{title}`\n"]
        common: set[str] = set()
        for name in kinds:
            table = defs[name]
            tag = sections()[name].__struct_config__
            new = [key for key in table["properties"] if key not in common]
            if len(kinds) > 1 and new:
                lines.append(f'\n### `{path}` with `{tag.tag_field} = "{tag_of(name)}"`\n')
            about = line(table.get("description", ""))
            lines += [about] if ". " in about and new else []
            lines += ["\n| setting | default | |", "|---|---|---|"] if new else []
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
                value = f"[table](#{slug(done[tuple(inner)])})" if inner else value_of(one)
                if len(kinds) > 1 and key == tag.tag_field:
                    own, *others = (code(tag_of(kind)) for kind in kinds)
                    value = f"{own} ({' '.join(others)})"
                note = plain(notes.get(key, ""))
                same = documented.setdefault((key, note), full)
                if same != full and len(note) > MAX_REPEATED_CHARS:
                    note = f"As {quoted(same)}."
                lines.append(row(f"`{full}`", value, note))
            common |= set(table["properties"])
    every = [line for _, lines in sorted(tables.items()) for line in lines]
    rows = {line.split("`")[1] for line in every if line.startswith("| `")}
    assert rows.issuperset(FIRST), set(FIRST) - rows
    return "\n".join([f"Most runs set only {', '.join(map(quoted, FIRST))}.", *every]) + "\n"


def tag_of(kind: str) -> str:
    """The value that chooses a kind of a table."""
    tag = str(sections()[kind].__struct_config__.tag)
    return "file.py:name" if tag == "external" else tag


def value_of(one: dict[str, Any]) -> str:
    """A setting's default and, in brackets, what else it may be: other values, bounds, or types
    that the default does not show. Without a default its type."""
    default, kind = one.get("default"), type_of(one)
    if default in (None, [], {}):
        return kind
    if "enum" in one:
        kind = " ".join(code(value) for value in one["enum"] if value != default)
    elif one.get("type") in SIMPLE:
        kind = kind.partition(" ")[2]
    return f"{code(default)} ({kind})" if kind else code(default)


def quoted(name: str) -> str:
    return f"`{name}`"


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
    for each in one.list_commands(context):
        inner = one.get_command(context, each)
        if inner is not None and not inner.hidden:
            yield from command(f"{name} {each}", inner)


def schema_tables() -> str:
    """The statements that make the tables and indexes of a new store, with their comments."""

    async def create(file: Path) -> None:
        async with open_store(f"sqlite:///{file}"):
            pass

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "store.db")
        asyncio.run(create(file))
        db = sqlite3.connect(file)
        found = db.execute("select sql from sqlite_master where sql is not null and name not like ?"
                           " order by tbl_name, type desc, rowid", ["%sqlite%"])  # fmt: skip
        statements = [f"{statement};" for (statement,) in found.fetchall()]
        db.close()
    return "```sql\n" + "\n".join(statements) + "\n```"


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
    """A section for each public name: its signature or fields, and the first sentence about it, of
    a building block the first paragraph, and about each of its methods. `help(name)` prints all."""
    found = list[str]()
    for title, names in API.items():
        found.append(f"## {title}\n")
        if not names:
            found.append("Import them from `agentrl.algorithms`.\n")
            homes = ((home, name) for home, own in LAZY.items() for name in own.split())
            names = [f"agentrl.algorithms.{home}.{name}" for home, name in homes]
        for path in names:
            found += public(path, whole=title in EXPLAINED)
    return "\n".join(found)


def public(path: str, *, whole: bool = False) -> Iterator[str]:
    """The section of an object, or of each object of a module, by its path."""
    home, _, name = path.rpartition(".")
    thing = getattr(importlib.import_module(home), name, None)
    if thing is None:
        thing = importlib.import_module(path)
    if not inspect.ismodule(thing):
        yield from described(path, thing, whole=whole)
        return
    for name, inner in vars(thing).items():
        own = getattr(inner, "__module__", "") == thing.__name__ and not name.startswith("_")
        kinds = inspect.isclass(inner) or (inspect.isfunction(inner) and path != ERRORS)
        if own and kinds:
            yield from described(f"{path}.{name}", inner)


def described(path: str, thing: Any, *, whole: bool = False) -> Iterator[str]:
    name = path.rpartition(".")[2]
    yield f"### `{name}`\n"
    calls = [
        text
        for key, function in methods_of(thing)
        for text in (*noted(function), wrapped(f"    {line(key + signature(function))}"))
    ]
    head = path if is_record(thing) else wrapped(f"{path}{signature(thing)}")
    head += f" = {annotation(thing)}" if isinstance(thing, GenericAlias) else ""
    yield "\n".join(["```text", head, *record_fields(thing), *calls, "```\n"])
    if text := papers(plain(own_doc(thing))) if whole else summary(path, thing):
        yield f"{text}\n"
    if inspect.isclass(thing) and issubclass(thing, Enum):
        yield f"Values: {', '.join(code(each.value) for each in thing)}.\n"


def noted(method: Any) -> Iterator[str]:
    """The first sentence about a method, as a comment above its signature."""
    indent = "    # "
    for text in textwrap.wrap(sentence_of(method), MAX_LINE_CHARS - len(indent)):
        yield f"{indent}{text}"


def wrapped(call: str) -> str:
    """A signature with a line for each parameter, if it is too long for one."""
    if len(call) <= MAX_LINE_CHARS:
        return call
    indent = " " * (len(call) - len(call.lstrip()))
    start = call.index("(") + 1
    end = call.rindex(") -> ") if ") -> " in call else call.rindex(")")
    lines, depth = [""], 0
    for letter in call[start:end]:
        depth += (letter in "([{") - (letter in ")]}")
        lines[-1] += letter
        if letter == "," and depth == 0:
            lines.append("")
    inner = [f"{indent}    {one.strip()}" for one in lines]
    return "\n".join([call[:start], *inner, f"{indent}{call[end:]}"])


def is_record(thing: Any) -> bool:
    return inspect.isclass(thing) and issubclass(thing, msgspec.Struct)


def record_fields(thing: Any) -> Iterator[str]:
    """The fields of a record, with the comments beside them."""
    said = comments(thing) if is_record(thing) else {}
    for field in fields(thing) if is_record(thing) else ():
        text = f"    {field.name}: {annotation(field.type)}"
        yield f"{text:38}  # {said[field.name]}" if said.get(field.name) else text


def methods_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """The documented methods of a class, by name."""
    for key, method in vars(thing).items() if inspect.isclass(thing) else ():
        function = getattr(method, "__func__", method)
        if inspect.isfunction(function) and not key.startswith("_") and own_doc(function):
            yield key, function


def summary(path: str, thing: Any) -> str:
    """The first sentence about a thing, or the first paragraph about a building block."""
    home, _, name = path.rpartition(".")
    block = home.startswith("agentrl.algorithms.") and name in building_blocks()
    paragraph = line(own_doc(thing).partition("\n\n")[0])
    return papers(plain(paragraph if block else sentence_of(thing)))


def sentence_of(thing: Any) -> str:
    text = line(own_doc(thing).partition("\n\n")[0])
    return re.split(r"(?<=\.) (?=[A-Z`])", text)[0]


def own_doc(thing: Any) -> str:
    """Its docstring, unless Python or a library made it."""
    if isinstance(thing, GenericAlias):
        return ""
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
    return Shown(text if len(text) <= MAX_DEFAULT_CHARS and not text.startswith("<") else "...")


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
    """All presets with recipes and, with "+", modifiers."""
    presets, modifiers = registry.library_presets()
    return presets | {f"+{name}": made for name, made in modifiers.items()}


def presets() -> str:
    """A row per family: its presets and modifiers, each with the paper that named it."""
    links = defaultdict[str, list[str]](list)
    for name, made in words().items():
        if made.of:
            continue
        family = family_of(made)
        link = f"[`{name}`]({page_of(family)}.md#{slug(name)})"
        paper = [f"[{number}](https://arxiv.org/abs/{number})" for number in named_by(made.doc)]
        links[family].append(" ".join([link, *paper]))
    lines = ["| family | | presets and modifiers |", "|---|---|---|"]
    for family, found in links.items():
        about = line(inspect.getdoc(sys.modules[family]) or "").partition(". ")[0]
        short = page_of(family)
        lines.append(row(f"[{short}]({short}.md)", about.removesuffix("."), ", ".join(found)))
    return "\n".join(lines) + "\n"


def recipes() -> str:
    """A row per recipe: what it is, and where it is from."""
    lines = ["| | is | |", "|---|---|---|"]
    for name, made in words().items():
        if made.of:
            about = papers(plain(made.doc)).replace("arXiv [", "[")
            lines.append(row(f"`{name}`", f"`{composition(made)}`", about))
    return "\n".join(lines) + "\n"


def named_by(doc: str) -> list[str]:
    """The last paper of a description."""
    return ARXIV.findall(doc)[-1:]


def trace_formats() -> str:
    """A row per format of recorded traces; the page says that none has token ids."""
    from agentrl.recorded.formats import FORMATS, TOKENS

    lines = ["| format | of | read from | missing |", "|---|---|---|---|"]
    for one in FORMATS:
        lost = "; ".join(lost for lost in one.lost if lost != TOKENS)
        lines.append(row(one.name, one.source, one.version, lost))
    return "\n".join(lines) + "\n"


def families() -> dict[str, str]:
    """File name -> page, for each family of presets and modifiers. Recipes are on no page, but what
    they consist of is. Parts of several families are described on the page of all algorithms."""
    pages: dict[str, str] = {}
    for name, preset in words().items():
        if preset.of:
            continue
        family = family_of(preset)
        short, module = page_of(family), sys.modules[family]
        file = family.removeprefix("agentrl.").replace(".", "/")
        file += "" if hasattr(module, "__path__") else ".py"
        head = f"# {short}\n\n{inspect.getdoc(module)}\n\nSource: [`{file}`](../../../{file}).\n"
        text = f"\n## `{name}`\n\n{papers(preset.doc)}\n"
        made = "\n".join(record_of(name))
        pages[short] = pages.get(short, head) + text + f"\n```text\n{made}\n```\n"
    elsewhere = common_parts().keys() | building_blocks()
    for short, described in parts_of_families().items():
        own = [f"- `{name}`: {doc}\n" for name, doc in described.items() if name not in elsewhere]
        own += ["\n"] if own else []
        pages[short] += "\n## Parts\n\n" + "".join(own) + OTHER_PARTS
    return pages


def parts() -> str:
    """The parts of presets of several families that are not in the Python API."""
    return "".join(f"- `{name}`: {doc}\n" for name, doc in common_parts().items())


def common_parts() -> dict[str, str]:
    """Name -> description of the parts of presets of several families, but building blocks."""
    every = [part for own in parts_of_families().values() for part in own.items()]
    uses = Counter(part for part in every if part[0] not in building_blocks())
    return dict(part for part, count in uses.items() if count > 1)


def building_blocks() -> set[str]:
    """Names that a preset of a user's imports from `agentrl.algorithms`."""
    return {name for own in LAZY.values() for name in own.split()}


@cache
def parts_of_families() -> dict[str, dict[str, str]]:
    """Page -> name -> description of the parts of its presets, modifiers and recipes."""
    homes = defaultdict[str, set[ModuleType]](set)
    used = defaultdict[str, list[str]](list)
    for name, preset in words().items():
        short = page_of(family_of(preset))
        homes[short].add(sys.modules[preset.function.__module__])
        used[short] += record_of(name)
    return {
        short: dict(described_classes(made, sorted(homes[short], key=lambda one: one.__name__)))
        for short, made in used.items()
    }


@cache
def record_of(name: str) -> list[str]:
    """The components and options of a preset, or of a modifier on its host."""
    return record(words()[name].host + name if name.startswith("+") else name)


def described_classes(made: list[str], modules: Collection[Any]) -> Iterator[tuple[str, str]]:
    """Name and description of the classes in a preset's record."""
    for part in dict.fromkeys(re.findall(r"\b([A-Z]\w+)\(", "\n".join(made))):
        homes = [
            *modules,
            *(importlib.import_module(f"agentrl.algorithms.{m}") for m in LAZY),
        ]
        doc = next((own_doc(vars(m)[part]) for m in homes if part in vars(m)), None)
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
