"""A streaming agent: it reads the answer as it is generated and stops at the first full stop.

Run it with `describe("the sea")`; it prints as it reads.
"""

import sys

from openai import OpenAI

client = OpenAI()


def describe(subject: str) -> str:
    """Returns one sentence about `subject`."""
    ask = {"role": "user", "content": f"Describe {subject} in one short sentence."}
    sentence = ""
    with client.chat.completions.create(model="policy", messages=[ask], stream=True) as stream:
        for chunk in stream:
            piece = (chunk.choices[0].delta.content if chunk.choices else None) or ""
            print(piece, end="", flush=True, file=sys.stderr)
            sentence += piece
            if "." in piece:
                break  # leaving the block ends the call and the sampling
    return sentence.partition(".")[0].strip() + "."
