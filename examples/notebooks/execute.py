"""Run notebooks in a temporary folder and save their output:

python examples/notebooks/execute.py [NAME.ipynb ...]

Pages of `agentrl.show` are not saved: they are large, and Jupyter draws them again.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def execute(file: Path, seconds: int = 300) -> nbformat.NotebookNode:
    """The notebook with its outputs. Raises CellExecutionError with the failing cell."""
    book = nbformat.read(file, as_version=4)
    with TemporaryDirectory() as folder:
        examples = Path(folder, "examples")
        shutil.copytree(
            HERE.parent, examples, ignore=shutil.ignore_patterns("runs", "node_modules")
        )
        where = {"metadata": {"path": str(examples / "notebooks")}}
        NotebookClient(book, timeout=seconds, kernel_name="python3", resources=where).execute()
    for cell in book.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = merged(cell.outputs)
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("text/html", None)
            if "text" in output:
                output["text"] = output["text"].replace(f"{examples}/notebooks/", "")
    return book


def merged(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """The outputs with adjacent parts of a stream joined."""
    found: list[nbformat.NotebookNode] = []
    for output in outputs:
        if found and output.get("name") and output["name"] == found[-1].get("name"):
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    return found


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(HERE.glob("*.ipynb")):
        nbformat.write(execute(path), path)
        print(f"ran {path.name}")
