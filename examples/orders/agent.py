"""Two roles with the OpenAI SDK. Nothing here knows that the instructions may change."""

from datetime import date

from openai import OpenAI

client = OpenAI()


def say(role: str, instructions: str, text: str) -> str:
    answer = client.chat.completions.create(
        model=role,
        messages=[
            {"role": "system", "content": f"{instructions}\nToday is {date.today()}."},
            {"role": "user", "content": text},
        ],
    )
    return answer.choices[0].message.content or ""


def agent(text: str) -> str:
    fields = say("extractor", "Extract the fields of the order.", text)
    return say("formatter", "Write the fields in one line.", fields)
