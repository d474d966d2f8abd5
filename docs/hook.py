"""The pages of the site: the repository's Markdown files at their own paths, and their links.

A link to a source file or a folder leads to a page that shows it, so the same relative link works
here and in the repository. `<!-- built: NAME -->` is replaced by `reference.NAME()`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import reference  # noqa: E402

ANSI = re.compile(r"\x1b\[[0-9;]*m")
LINK = re.compile(r"(?:(?<=\]\()|(?<=src=\")|(?<=srcset=\"))(?!\w+:|#)[^)#\s\"]+")
MARKER = re.compile(r"<!-- built: (\w+) -->")
PICTURES = {  # of the first page, in light and dark
    f"{name}-{scheme}.png"
    for name in (
        "examples/staff/view-run",
        "examples/staff/view-rollout",
        "docs/pictures/run-team",
    )
    for scheme in ("light", "dark")
}
COPIED = {".png", ".svg", ".html"}  # copied unchanged
LANGUAGES = {".py": "python", ".mjs": "javascript", ".toml": "toml", ".jsonl": "json"}
HOME = "---\ntemplate: home.html\n---\n"  # of the first page, which shows README.md below its own
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n"  # of source files and folders
FIRST = (
    "---\nsearch:\n  boost: 3\n---\n"  # of the pages in docs/, before what is about single parts
)
SKILL = "agentrl/cli/SKILL.md"
SHOWN = {*COPIED, *LANGUAGES, ".txt", ".jinja", ".sql", ".md", ".ipynb"}  # listed for a folder


def on_files(files: Files, config: Any) -> None:
    """Add README.md, the pages of docs/ and everything that these link to, recursively."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    pages = [path.relative_to(ROOT).as_posix() for path in sorted(HERE.rglob("*.md"))]
    waiting = ["README.md", *pages, *sorted(PICTURES)]
    for name in waiting:  # grows during the loop
        path = ROOT / name
        if path.suffix in COPIED:
            files.append(File.generated(config, name, abs_src_path=str(path)))
            continue
        text = page(path)
        folder = name if path.is_dir() else dirname(name)

        def follow(match: re.Match[str], folder: str = folder) -> str:
            target = normpath(join(folder, match[0]))
            if not (ROOT / target).exists():
                return match[0]  # a dead link, which mkdocs reports
            if (ROOT / target / "README.md").is_file():
                target = f"{target}/README.md"
            if target not in waiting:
                waiting.append(target)
            return site_path(match[0].rstrip("/"), ROOT / target)

        text = LINK.sub(follow, text)
        files.append(File.generated(config, site_path(name, path), content=head(name) + text))


def head(name: str) -> str:
    """What the site must know of a page: its template, and whether a search finds it."""
    if name == "README.md":
        return HOME
    if not name.endswith((".md", ".ipynb")) or name == "CHANGELOG.md":
        return UNSEARCHED
    return FIRST if name.startswith("docs/") and "/algorithms/" not in name else ""


def on_post_build(config: Any) -> None:
    """Write llms.txt, for language models: the pages of the navigation with their first sentences,
    and the text of each beside it."""
    site, lines = Path(config.site_dir), ["# agentrl\n", f"> {config.site_description}\n"]
    lines.append(f"To train an agent, read [the skill]({SKILL}) first.\n")
    for title, name in [*listed(config.nav), ("", SKILL)]:
        if not name:
            lines.append(f"\n## {title}\n")
            continue
        text = page(ROOT / name)
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
        prose = (one for one in text.split("\n\n")[1:] if re.match(r"[A-Z[]|`[^`]", one))
        first = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", next(prose, "")).split())
        sentence = first.partition(". ")[0][:200]
        if name != SKILL:
            own = title or text.partition("\n")[0].lstrip("# ")
            lines.append(f"- [{own}]({name}): {sentence}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def listed(nav: Any, title: str = "") -> Iterator[tuple[str, str]]:
    """The titles and pages of the navigation; a heading of it has no page."""
    if isinstance(nav, str):
        yield title, nav
    elif isinstance(nav, dict):
        for name, inner in nav.items():
            if isinstance(inner, list):
                yield name, ""
            yield from listed(inner, name)
    else:
        for inner in nav or []:
            yield from listed(inner)


def site_path(name: str, path: Path) -> str:
    """The site's path of a link target `name`, absolute or relative like `name`."""
    if path.is_dir():
        return f"{name}/index.md"
    if path.name == "README.md" and not name.endswith(".md"):
        return f"{name}/README.md"
    return name if path.suffix in COPIED | {".md"} else f"{name}.md"


def page(path: Path) -> str:
    """A page, a source file or a folder as Markdown."""
    if path.is_dir():
        files = (file for file in sorted(path.rglob("*")) if file.suffix in SHOWN)
        names = [file.relative_to(path).as_posix() for file in files if "/runs/" not in str(file)]
        return f"# {path.relative_to(ROOT)}\n\n" + "".join(f"- [`{n}`]({n})\n" for n in names)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return "\n\n".join(cell_parts(json.loads(text)))
    if path.suffix == ".md":
        return MARKER.sub(lambda match: getattr(reference, match[1])(), text)
    name = f"# {path.relative_to(ROOT)}\n\n"
    return f"{name}````` {LANGUAGES.get(path.suffix, 'text')}\n{text}`````\n"


def cell_parts(book: dict[str, Any]) -> Iterator[str]:
    """The cells of a notebook with their output, as Markdown."""
    for cell in book["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"````` python\n{source}\n`````"
        for output in cell.get("outputs", []):
            text = output.get("text") or output.get("data", {}).get("text/plain") or ""
            yield f"````` text\n{ANSI.sub('', ''.join(text))}\n`````"
