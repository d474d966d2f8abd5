from openai import OpenAI
from play import ARGUMENT, SCHEMA, SYSTEM, called, play

client = OpenAI()
FUNCTION = {"name": "add", "description": "Add two numbers.", "parameters": SCHEMA}


def chat(questions, streamed):
    messages = [{"role": "system", "content": SYSTEM}]
    options = {"model": "policy", "tools": [{"type": "function", "function": FUNCTION}]}
    for question in questions:
        messages.append({"role": "user", "content": question})
        while True:
            asked = client.chat.completions
            if streamed:
                with asked.stream(messages=messages, **options) as stream:
                    said = stream.get_final_completion().choices[0].message
            else:
                said = asked.create(messages=messages, **options).choices[0].message
            messages.append(said)
            for call in said.tool_calls or ():
                result = called(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if not said.tool_calls:
                break


def responses(questions, streamed):
    items = []
    options = {
        "model": "policy",
        "instructions": SYSTEM,
        "tools": [{"type": "function"} | FUNCTION],
    }
    for question in questions:
        items.append({"role": "user", "content": question})
        while True:
            if streamed:
                with client.responses.stream(input=items, **options) as stream:
                    output = stream.get_final_response().output
            else:
                output = client.responses.create(input=items, **options).output
            items += output
            calls = [item for item in output if item.type == "function_call"]
            for call in calls:
                result = {"type": "function_call_output", "call_id": call.call_id}
                items.append(result | {"output": called(call.arguments)})
            if not calls:
                break


play(responses if ARGUMENT == "responses" else chat)
