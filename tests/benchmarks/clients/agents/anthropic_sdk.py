from anthropic import Anthropic
from play import SCHEMA, SYSTEM, called, play

client = Anthropic()
TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}


def talk(questions, streamed):
    messages = []
    options = {"model": "policy", "max_tokens": 2048, "system": SYSTEM, "tools": [TOOL]}
    options["thinking"] = {"type": "adaptive"}
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            if streamed:
                with client.messages.stream(messages=messages, **options) as stream:
                    said = stream.get_final_message()
            else:
                said = client.messages.create(messages=messages, **options)
            messages.append({"role": "assistant", "content": said.content})
            uses = [block for block in said.content if block.type == "tool_use"]
            if not uses:
                break
            results = [
                {"type": "tool_result", "tool_use_id": use.id, "content": called(use.input)}
                for use in uses
            ]
            messages.append({"role": "user", "content": results})


play(talk)
