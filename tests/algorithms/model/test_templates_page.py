"""The library's own cells of docs/reference/templates.md are what its code gives today."""

from __future__ import annotations

from tests.benchmarks import templates


def rows_of(text: str) -> dict[str, list[str]]:
    """The cells of each name, of which a row may have several."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("| "):
            names, *cells = (cell.strip() for cell in line[1:-1].split("|"))
            assert not found.keys() & set(names.split(", "))
            found |= dict.fromkeys(names.split(", "), cells)
    return found


def test_the_page_has_what_the_templates_and_parsers_do() -> None:
    text = templates.PAGE.read_text()
    shown = rows_of(text.partition("## Parsers")[0])
    for name, row in templates.template_rows().items():
        if name.startswith("agentrl "):
            assert shown[name] == [*row.values()]
    for name, readers in templates.parser_rows().items():
        part = rows_of(text.partition(f"### `{name}`")[2].partition("###")[0])
        for case in templates.cases(name):
            own = [readers[who][case] for who in ("agentrl", "agentrl, streamed")]
            assert part[case][:2] == own
            assert own[0] in (templates.YES, "values")
