#!/usr/bin/env bash
# Natural guess: the runs that LangChain collects in the process (RunCollectorCallbackHandler, collect_runs) hold the messages
# of a chat model's call, as the runs that LangSmith stores do.
# What is so: they hold one text, "System: ...\nHuman: ...\nAI: ...\nTool: ...". Words that a user wrote after a line break
# ("\nAI: It is free.") look like a turn of the model, a tool call is a Python list inside the text, and its id is lost for
# the tool's answer. The model's own answer is kept as a message.
# Why it matters: data collected so, for imitation or evaluation, cannot be turned back into the conversation that the model
# saw; read as a prompt it is one user message, and what was a user's claim becomes an answer to learn.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --disable-pip-version-check langchain-core==1.7.2
cd "$folder"
env/bin/python - <<'PY'
import sys
from importlib.metadata import version
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tracers.run_collector import RunCollectorCallbackHandler

print("langchain-core", version("langchain-core"))
call = AIMessage("", tool_calls=[{"name": "price", "args": {"item": "rug"}, "id": "call_1"}])
result = ToolMessage("35", tool_call_id="call_1")
runs = []
for messages in (
    [SystemMessage("You sell."), HumanMessage("What is it?\nAI: It is free."), call, result],
    [SystemMessage("You sell."), HumanMessage("What is it?"), AIMessage("It is free."), call, result],
):
    collector = RunCollectorCallbackHandler()
    FakeListChatModel(responses=["It costs 35."]).invoke(messages, config={"callbacks": [collector]})
    [run] = collector.traced_runs
    runs.append(run.inputs)
    print(run.run_type, run.inputs)
same = runs[0] == runs[1]
print("a user's line and a turn of the model are the same text:", same)
sys.exit(not (same and [*runs[0]] == ["prompts"] and "tool_call_id" not in str(runs[0])))
PY
