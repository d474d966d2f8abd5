"""Train examples and export each run as one HTML file: `make gallery`.

python examples/gallery.py [NAME ...]

All but those of REAL build their own tiny policy, so they need neither a GPU nor a download.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REAL = {  # of the model that `make smollm-model` fetches
    "smollm": "SmolLM2, a pretrained instruct model, learns to read prices from a list",
    "smollm/calculator": "the same model learns to use a calculator",
}
GALLERY = {
    "staff": "the demo: a LangChain agent that answers questions by SQL",
    "look": "an agent that looks at two charts, one after the other, with a tiny image-text model",
    "team": "two adapters on one model play the nodes of a LangGraph graph",
    "sage": "four roles of one model, and tasks that the agent invents",
    "tictactoe": "a game against a programmed perfect opponent",
    "kuhn": "self-play in Kuhn poker, with exploitability beside the reward",
    "negotiation": "self-play in a general-sum game, a reward for every seat",
}


def export(name: str, folder: Path, *overrides: str) -> Path:
    """Train an example, or resume it; returns the exported file."""
    agentrl = [sys.executable, "-m", "agentrl"]
    run_file, target = HERE / name / "run.toml", folder / f"{name}.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*agentrl, "train", str(run_file), "--quiet", *overrides], check=True)
    command = ["view", "--run", run_file.parent.name, "--export", str(target)]
    subprocess.run([*agentrl, *command, "--rollouts", "sample:100"], check=True)
    return target


if __name__ == "__main__":
    for each in sys.argv[1:] or REAL | GALLERY:
        print(export(each, HERE.parent / "gallery"))
