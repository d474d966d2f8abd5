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
COPIED = {".png", ".svg", ".html"}  # copied unchanged
LANGUAGES = {".py": "python", ".mjs": "javascript", ".toml": "toml", ".jsonl": "json"}
SHOWN = {*COPIED, *LANGUAGES, ".txt", ".jinja", ".sql", ".md", ".ipynb"}  # listed for a folder


def on_files(files: Files, config: Any) -> None:
    """Add README.md, the pages of docs/ and everything that these link to, recursively."""
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)
    pages = [path.relative_to(ROOT).as_posix() for path in sorted(HERE.rglob("*.md"))]
    waiting = ["README.md", *pages]
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
        files.append(File.generated(config, site_path(name, path), content=text))


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
