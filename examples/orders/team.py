"""Two roles: a trained model says to which desk an order goes, another one writes it down."""

from openai import OpenAI

client = OpenAI()


def say(role: str, instructions: str, text: str) -> str:
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": text}]
    answer = client.chat.completions.create(model=role, messages=messages)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def agent(order: str) -> dict[str, str]:
    desk = say("clerk", "Which desk?", order.partition("|")[0])
    return {"desk": desk, "line": say("formatter", "Write the fields in one line.", order)}
