#!/usr/bin/env bash
# Natural guess: an argument that a tool of the MCP SDK's server declares as a text or null (`content: str | None = None`)
# arrives as the text that the model sent, as one declared `str` does.
# What is so: the server parses JSON in every text argument whose annotation is not exactly `str`. "null" arrives as None;
# the text of an object or list becomes one, and is then refused, "Input should be a valid string", though the tool's
# schema allows every text. "12" and words arrive as sent.
# Why it matters: an agent that saves a JSON file or a query through such a tool is refused whatever it tries, or clears
# what it wanted to write; the policy is punished for valid calls, and only for those whose text is JSON.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check mcp==2.3.0 2>&1 | grep -v WARNING || true
cd "$folder"
env/bin/python - <<'PY' 2>/dev/null
import asyncio
import sys
from importlib.metadata import version

from mcp import Client
from mcp.server.mcpserver import MCPServer

server = MCPServer("files")
arrived = []


@server.tool()
def note(content: str) -> None:
    arrived.append(content)


@server.tool()
def save(content: str | None = None) -> None:
    arrived.append(content)


async def outcomes() -> dict[tuple[str, str], object]:
    found = {}
    async with Client(server) as client:
        for name in ("note", "save"):
            for text in ("hello", "12", "null", '{"a": 1}', "[1, 2]"):
                arrived.clear()
                answer = await client.call_tool(name, {"content": text})
                found[name, text] = "refused" if answer.is_error else arrived[0]
        [tool] = [tool for tool in (await client.list_tools()).tools if tool.name == "save"]
        print("schema of save's content:", tool.input_schema["properties"]["content"]["anyOf"])
    return found


print("mcp", version("mcp"))
seen = asyncio.run(outcomes())
for (name, text), outcome in seen.items():
    print(f"{name}({text!r}): {outcome!r}")
expected = {(name, text): text for name, text in seen}
expected |= {("save", "null"): None, ("save", '{"a": 1}'): "refused", ("save", "[1, 2]"): "refused"}
sys.exit(seen != expected)
PY
