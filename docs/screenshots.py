"""Pictures of real runs for the first page of the site, as `agentrl view` shows them.

    .venv/bin/python docs/screenshots.py runs/team/store.db team docs/pictures/run-team

writes NAME-light.png and NAME-dark.png of a run's page. Needs Chromium and the extra `view-test`.
Run `make demo` and the examples first, or take the runs of `make gallery`. The other two pictures
are those of examples/staff: CONTRIBUTING.md says how they are made."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

SIZE = {"width": 1200, "height": 760}


def main(store: str, run: str, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "run.html")
        words = ["view", store, "--run", run, "--export", str(page), "--rollouts", "sample:20"]
        subprocess.run([sys.executable, "-m", "agentrl", *words], check=True)
        with sync_playwright() as started:
            path = shutil.which("chromium") or shutil.which("chromium-browser")
            browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                shown = browser.new_page(color_scheme=scheme, viewport=SIZE)  # type: ignore[arg-type]
                shown.goto(page.as_uri())
                shown.wait_for_timeout(1000)  # milliseconds, for the curves
                shown.screenshot(path=f"{name}-{scheme}.png")
            browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
