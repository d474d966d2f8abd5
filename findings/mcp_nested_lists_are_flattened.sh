#!/usr/bin/env bash
# Natural guess: a tool of the MCP SDK's server that returns a list of lists shows the model JSON, as one that returns a
# dictionary does.
# What is so: lists are taken apart at every depth, each number or text is a block of its own, and nothing says where a row
# ended: [[1, 2], [3]], [[1], [2, 3]] and [1, 2, 3] have the same content. A list that is empty has no content at all, like
# a tool that returned None. Only `structured_content` keeps the lists, and only for a tool that declares what it returns.
# Why it matters: agents give their models the content. A policy that reads boards, tables or grids through such a tool is
# shown other states as one and the same, and "no hits" as silence; no reward can teach it what it was not told.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check mcp==2.3.0 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY'
import asyncio
import sys
from importlib.metadata import version

from mcp.server import MCPServer

server = MCPServer("rooms")
BOARDS = {"two rows": [[1, 2], [3]], "other rows": [[1], [2, 3]], "one row": [1, 2, 3], "no rows": []}


@server.tool()
def board(name: str) -> list:
    """The board."""
    return BOARDS[name]


@server.tool()
def record(name: str) -> dict:
    """The board, in a dictionary."""
    return {"rows": BOARDS[name]}


def told(tool: str, name: str) -> list[str]:
    return [block.text for block in asyncio.run(server.call_tool(tool, {"name": name})).content]


print("mcp", version("mcp"))
seen = {name: told("board", name) for name in BOARDS}
for name, texts in seen.items():
    print(f"{BOARDS[name]}: {texts}")
whole = told("record", "two rows")
print("in a dictionary:", [" ".join(text.split()) for text in whole])
flat = ["1", "2", "3"]
expected = {"two rows": flat, "other rows": flat, "one row": flat, "no rows": []}
sys.exit(seen != expected or len(whole) != 1)
PY
