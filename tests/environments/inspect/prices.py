"""Tasks of Inspect: a tool, and a model that grades."""

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import Score, Scorer, Target, accuracy, includes, model_graded_qa, scorer
from inspect_ai.solver import TaskState, generate, use_tools
from inspect_ai.tool import Tool, tool

PRICES = {"tea": 3, "cup": 8, "pan": 21}


@tool
def price() -> Tool:
    async def execute(item: str) -> str:
        """Price of an item in euro.

        Args:
            item: its name
        """
        return str(PRICES.get(item, "unknown"))

    return execute


@scorer(metrics=[accuracy()])
def odd() -> Scorer:
    async def score(state: TaskState, target: Target) -> Score:
        return Score(value="excellent")  # no value that Inspect knows, which it would count as 0

    return score


def samples() -> MemoryDataset:
    rows = [Sample(id=k, input=f"How much is the {k}?", target=str(v)) for k, v in PRICES.items()]
    return MemoryDataset(rows)


@task
def prices() -> Task:
    cold = GenerateConfig(temperature=0.0)
    solver = [use_tools(price()), generate()]
    return Task(dataset=samples(), solver=solver, scorer=includes(), config=cold, epochs=3)


@task
def graded() -> Task:
    return Task(dataset=samples(), solver=generate(), scorer=[includes(), model_graded_qa()])


@task
def unknown() -> Task:
    return Task(dataset=samples(), solver=generate(), scorer=odd())
