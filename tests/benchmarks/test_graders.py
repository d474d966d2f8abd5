"""The page of what graders pay says what its rows say, and how each is known."""

from __future__ import annotations

import re

from tests.benchmarks.graders.__main__ import MARK, PAGE, ROOT, changed, table
from tests.benchmarks.graders.checks import CHECKS
from tests.benchmarks.graders.rows import PAY, SEEDS

TRAINERS = "## Graders of other trainers"


def test_the_page_has_each_row_and_how_it_is_known() -> None:
    page = PAGE.read_text(encoding="utf-8").partition(TRAINERS)[0]
    assert page.count(MARK) == 2
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    rows = [*PAY, *SEEDS]
    above, shown, checked = "", set[tuple[str, str, bool]](), 0
    for line in lines:
        if title := re.match(r"\| \*\*(.+) \S+\*\* \|", line):
            above = title[1]
            version = line.split("**")[1].removeprefix(f"{above} ")
            continue
        read = line.startswith("| *read:* ")
        shown.add((above, line.replace("*read:* ", ""), read))
        assert not read or any(row.version == version for row in rows if row.package == above)
        checked += not read
    assert len(shown) == len(rows) + 2
    for row in rows:
        words = [row.happens, row.pays, *([row.agentrl] if row.agentrl else [])]
        assert (row.package, f"| {' | '.join(words)} |", not row.check) in shown, row
    assert checked - 2 >= 25


def test_graders_of_trainers_are_run_by_scripts() -> None:
    rows = re.findall(r"^\| (\S+ [\d.]+).* `(\w+\.sh)` \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(rows) >= 7
    for package, script in rows:
        pinned = package.replace(" ", "==")
        assert pinned in (ROOT / "findings" / script).read_text(encoding="utf-8"), script


def test_each_check_is_of_a_row() -> None:
    rows = {(row.plugin, row.check) for row in (*PAY, *SEEDS) if row.check}
    assert rows == {(plugin, check) for plugin, each in CHECKS.items() for check in each}


def test_a_row_that_is_no_longer_so_is_named() -> None:
    row = next(row for row in PAY if row.check)
    checks = {one.check: one.found for one in PAY + SEEDS if one.plugin == row.plugin}
    found = {row.plugin: {"versions": {row.package: "9"}, "found": checks}}
    assert changed(found) == {}
    found[row.plugin]["found"] = checks | {row.check: "another"}
    assert changed(found) == {f"{row.plugin}/{row.check}": "another"}
    assert table([row], found, ["a"])[2] == f"| **{row.package} 9** |"
