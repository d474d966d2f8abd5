"""A number-guessing agent with the plain OpenAI SDK; after each guess it is told higher or lower.

Run it with `asyncio.run(play({"secret": 7, "highest": 20}))`.
"""

import re

from openai import AsyncOpenAI

GUESSES = 5

client = AsyncOpenAI()


async def play(game: dict[str, int]) -> int:
    """The number of guesses, or 0 if the number was not found."""
    rule = f"Guess my number between 1 and {game['highest']}. Reply with one number."
    messages = [{"role": "user", "content": rule}]
    for count in range(1, GUESSES + 1):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        guess = re.search(r"\d+", said)
        if guess and int(guess.group()) == game["secret"]:
            return count
        hint = "a number, please"
        if guess:
            hint = "higher" if int(guess.group()) < game["secret"] else "lower"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": hint}]
    return 0
