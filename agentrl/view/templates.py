"""The templates of the server, the export and notebooks, and their filters."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markupsafe import Markup
from msgspec.json import encode

from agentrl.core.types import missing_text, step_in_words, step_number
from agentrl.view.pages import Page
from agentrl.view.records import MAX_TEXT_CHARS, gist, placed, text_of

HERE = Path(__file__).parent
STATIC = HERE / "static"
MAX_LINE_CHARS = 400
# A link to a page of the store, but not to the list of runs (`/`, `/runs`) or to styles. Agents'
# texts cannot match, because their quotation marks are escaped.
OWN_ADDRESS = re.compile(r'\b(href|action|src)="/(?=[a-z])(?!static/|at/|runs[?"])')
# Digests of the images of an exported page. Agents' texts cannot match, as above.
EXPORTED = re.compile(r'<img data-image="([0-9a-f]{64})"')


def shown(value: float | None, form: str = ".4g") -> str:
    """A number as text; a dash, not 0, if it is missing."""
    return "–" if value is None or math.isnan(value) else format(value, form)  # noqa: RUF001


def score(value: float | None, percent: bool = True) -> str:
    """A score as text. percent: for scores from 0 to 1."""
    if value is None or math.isnan(value):
        return shown(value)
    if not percent:
        return format(value, ".3g")
    return f"{value * 100:.1f}".removesuffix(".0") + "\u202f%"


def duration(seconds: float) -> str:
    """Seconds as text, in the two largest units."""
    whole, parts = round(seconds), list[str]()
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if whole >= size or (unit == "s" and not parts):
            parts.append(f"{whole // size}\u202f{unit}")
            whole %= size
    return " ".join(parts[:2])


def island(value: Any) -> str:
    """JSON that is safe inside a script element, for any texts."""
    return encode(value).decode().replace("<", "\\u003c")


def quoted(text: str) -> str:
    """A text with its white space visible, as a JSON string; the template escapes it."""
    return encode(text).decode()


def clipped(text: str) -> str:
    """A text of any length in a line or two."""
    return text if len(text) <= MAX_LINE_CHARS else f"{text[: MAX_LINE_CHARS - 1]}…"


def heat(logp: float | None) -> str:
    """The CSS class of a token coloured by its probability, as in `view.js`."""
    bin = 0 if logp is None else round((1 - math.exp(logp)) * 8)
    return f"d{bin}" if bin else ""


@pass_context
def ago(context: Context, at: float) -> str:
    """The time since `at` by this machine's clock; in an exported file, the date."""
    if context.get("export"):
        return time.strftime("%Y-%m-%d", time.gmtime(at))
    seconds, units = max(time.time() - at, 0), ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((pair for pair in units if seconds >= pair[0]), units[-1])
    return f"{seconds / size:.0f} {unit} ago"


@cache
def environment() -> Environment:
    options: Any = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    loader = FileSystemLoader(HERE / "templates")
    env = Environment(loader=loader, undefined=StrictUndefined, **options)
    env.filters |= {"shown": shown, "ago": ago, "text": text_of, "heat": heat, "score": score}
    env.filters["missing"] = missing_text
    env.filters |= {"duration": duration, "gist": gist, "placed": placed}
    env.filters |= {"number": step_number, "step_in_words": step_in_words}
    env.filters |= {"island": island, "quoted": quoted, "clipped": clipped}
    env.globals["cap"] = MAX_TEXT_CHARS
    return env


class Hidden(str):
    """A text that was redacted already; a template still escapes it."""

    __slots__ = ()


def hiding(hide: Callable[[Any], Any]) -> Environment:
    """An environment that passes every output through `hide`, as text or JSON value, before it is
    cut, encoded or escaped. Text of the templates themselves is unchanged."""
    done = (Markup, Hidden)
    env = environment().overlay(
        finalize=lambda value: value if isinstance(value, done) else hide(value)
    )

    def before(filter: Callable[..., Any]) -> Callable[..., Any]:
        return lambda value, *args: filter(hide(value), *args)

    filters = {name: before(env.filters[name]) for name in ("text", "gist", "quoted", "clipped")}
    filters["placed"] = lambda rollout: hide(placed(rollout))
    filters["island"] = lambda value: Hidden(island(hide(value)))
    filters["urlencode"] = lambda value: Markup(quote(hide(value)))
    env.filters = env.filters | filters
    return env


def render(
    page: Page,
    *,
    layout: str = "base.html",
    base: str = "",
    using: Environment | None = None,
    **more: Any,
) -> str:
    """A page as HTML. `layout`: base.html, or bare.html for the content only; `base`: prefix of
    links to pages of the store, which templates omit; `using`: other filters."""
    values: dict[str, Any] = {"title": page.title, "run": None, "layout": layout, "base": base}
    values |= {"export": False, "tokens_of": None, "values_of": None, "image_urls": None}
    text = (using or environment()).get_template(page.template).render(values | page.values | more)
    return OWN_ADDRESS.sub(rf'\1="{base}/', text) if base else text
