import os

import litellm
from play import ARGUMENT, ROOT, SCHEMA, SYSTEM, called, play

FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}
BASE = os.environ["OPENAI_BASE_URL"] if ARGUMENT == "openai" else ROOT


def talk(questions, streamed):
    messages = [{"role": "system", "content": SYSTEM}]
    options = {"tools": [{"type": "function", "function": FUNCTION}], "api_base": BASE}
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            reply = litellm.completion(
                f"{ARGUMENT}/policy", messages, stream=streamed, max_tokens=2048, **options
            )
            if streamed:
                reply = litellm.stream_chunk_builder(list(reply), messages=messages)
            said = reply.choices[0].message
            messages.append(said.model_dump())
            for call in said.tool_calls or ():
                result = called(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not said.tool_calls:
                break


play(talk)
