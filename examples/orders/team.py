"""Two roles: a trained model chooses the desk of an order, another model writes it in one line."""

from openai import OpenAI

client = OpenAI()


def say(role: str, instructions: str, text: str) -> str:
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": text}]
    answer = client.chat.completions.create(model=role, messages=messages)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def agent(order: str) -> dict[str, str]:
    desk = say("clerk", "Which desk?", order.partition("|")[0])
    return {"desk": desk, "line": say("formatter", "Write the fields in one line.", order)}
