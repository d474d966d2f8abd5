"""The page of a run's audit in `agentrl view`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.audit.report import AuditReport, Example, Finding
from agentrl.audit.subjects import keep
from agentrl.core.config import resolve
from agentrl.store import open_store
from agentrl.view.pages import Pages
from agentrl.view.templates import render

FOUND = Finding(
    attack="negation", kind="pays", share=0.75, tasks=8, reward=0.75, change="read it all",
    example=Example(task="task 'a'", answer="<b>not</b> 16", reward=1.0),
)  # fmt: skip


async def test_a_run_leads_to_its_audit(tmp_path: Path) -> None:
    config = resolve({"name": "r", "policy": {"model": "m"}}, source="test")
    report = AuditReport("v", findings=[FOUND], notes=["a note"], answer="answer", shape="X")
    report.decide()
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run("r", msgspec.to_builtins(config))
        pages = Pages(store)
        assert (await pages.run("r", {})).values["audited"] is False
        empty = render(await pages.audit("r"))
        await keep(report, store, "r")
        assert (await pages.run("r", {})).values["audited"] is True
        page = render(await pages.audit("r"))
    assert "no audit" in empty
    for text in ("exploitable", "negation", "75 % of 8", "read it all", "a note"):
        assert text in page
    assert "<b>not</b>" not in page
