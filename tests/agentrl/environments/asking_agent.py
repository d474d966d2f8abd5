"""An agent that asks the model by `agentrl.endpoint()`, in each way in which a rollout can."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import urllib.request
from typing import Any

import agentrl

CHILD = """
import json, sys, urllib.request
url, key, text = sys.argv[1:]
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
request = urllib.request.Request(f"{url}/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def agent(text: str) -> list[str]:
    own = agentrl.endpoint()
    words = [(await own.chat(said(f"{text} async")))["content"]]
    sync = own.role("critic").chat_sync
    words.append((await asyncio.to_thread(sync, said(f"{text} sync")))["content"])
    bare = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME")}
    command = [sys.executable, "-I", "-c", CHILD, own.url, own.key, f"{text} child"]
    child = await asyncio.to_thread(subprocess.check_output, command, env=bare)
    words.append(child.decode().strip())
    thread = threading.Thread(target=lambda: words.append(_by_urllib(f"{text} thread")))
    thread.start()
    await asyncio.to_thread(thread.join)
    return words


def _by_urllib(text: str) -> str:
    own = agentrl.endpoint()
    body = json.dumps({"model": "policy", "messages": said(text)}).encode()
    headers = {"authorization": f"Bearer {own.key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{own.url}/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request))
    text_: str = answer["choices"][0]["message"]["content"]
    return text_


if __name__ == "__main__":
    print(json.dumps(asyncio.run(agent(json.loads(os.environ["AGENTRL_TASK"])))))
