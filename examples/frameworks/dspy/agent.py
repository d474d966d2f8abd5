"""Two modules of DSPy: one answers, the other checks. The names of their models are the roles."""

import os

import dspy


def model(name: str) -> dspy.LM:
    url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
    return dspy.LM(f"openai/{name}", api_base=url, api_key=key, cache=False)


solve = dspy.ChainOfThought("question -> answer")
check = dspy.Predict("question, answer -> right: bool")


async def agent(question: str) -> str:
    with dspy.context(lm=model("solver")):
        answer = (await solve.acall(question=question)).answer
    with dspy.context(lm=model("critic")):
        await check.acall(question=question, answer=answer)
    return str(answer)
