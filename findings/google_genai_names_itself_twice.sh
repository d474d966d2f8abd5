#!/usr/bin/env bash
# Guess: names of HTTP headers have no case, so `HttpOptions(headers={"User-Agent": "my-agent"})` of google-genai puts that
#   name in the place of the SDK's, or adds to it.
# So it is: up to google-genai 2.34 only "user-agent" in lower case is found; the capitals of every guide stay beside the
#   SDK's, and each request has the header twice. A server of aiohttp answers 400 before any of its code runs, and has no
#   setting for it; servers of uvicorn and Node take such requests. google-genai 3.6 sends one header.
# Why it matters: an agent (or a framework that sets its own name) that runs against Google and against vLLM fails on the
#   first call behind a gateway, with a 400 that no handler has seen or logged. Write the key in lower case.
set -eu
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; cd "$folder"
get() { # folder, packages
  python3 -m venv "$1"
  "$1/bin/python" -m pip install -q --disable-pip-version-check "${@:2}" >pip.txt 2>&1 || { cat pip.txt; exit 2; }
}
get old google-genai==2.34.0 aiohttp==3.14.5
get new google-genai==3.6.1 aiohttp==3.14.5
cat > try.py <<'PY'
import asyncio
import sys
from importlib.metadata import version

from aiohttp import web
from google import genai
from google.genai import errors, types


async def answer(request):
    content = {"role": "model", "parts": [{"text": request.headers["user-agent"]}]}
    return web.json_response({"candidates": [{"content": content, "finishReason": "STOP"}]})


async def main():
    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    statuses = []
    for name in ("user-agent", "User-Agent"):
        options = types.HttpOptions(base_url=url, headers={name: "my-agent"})
        client = genai.Client(api_key="k", http_options=options)
        asking = asyncio.to_thread(client.models.generate_content, model="m", contents="hello")
        try:
            said = (await asking).text
            statuses.append(200)
        except errors.ClientError as error:
            said = str(error)[:90]
            statuses.append(error.code)
        print(f"google-genai {version('google-genai')}, {name}: {statuses[-1]}, {said}")
    sys.exit(statuses != [200, int(sys.argv[1])])


asyncio.run(main())
PY
old/bin/python try.py 400 2>log.txt || { cat log.txt; exit 1; }
new/bin/python try.py 200 2>log.txt || { cat log.txt; exit 1; }
