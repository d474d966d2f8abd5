"""The library's own cells of docs/reference/templates.md are what its code gives today."""

from __future__ import annotations

from tests.benchmarks import templates


def test_the_page_has_what_the_templates_and_parsers_do() -> None:
    lines = templates.PAGE.read_text().splitlines()
    for name, row in templates.template_rows().items():
        if name.startswith("agentrl "):
            assert f"| {' | '.join([name, *row.values()])} |" in lines
    text = templates.PAGE.read_text()
    for name, readers in templates.parser_rows().items():
        part = text.partition(f"### `{name}`")[2].partition("###")[0]
        for case in templates.cases(name):
            own = " | ".join(readers[who][case] for who in ("agentrl", "agentrl, streamed"))
            assert f"| {case} | {own} |" in part
            assert own.split(" | ")[0] in (templates.YES, "values")
