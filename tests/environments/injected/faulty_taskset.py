"""A taskset of verifiers 0.4 with faults in all that a taskset may write."""

from collections.abc import Iterator

import verifiers.v1 as vf

from tests.environments.injected import plugins

__all__ = ["FaultyTaskset"]


class FaultyData(vf.TaskData):
    answer: str


class FaultyTask(vf.Task[FaultyData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await plugins.injected("set-up")

    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await plugins.injected("clean-up")

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        await plugins.injected("scoring")
        return plugins.paid(1.0)


class FaultyTaskset(vf.Taskset[FaultyTask, vf.TasksetConfig]):
    def load(self) -> Iterator[FaultyTask]:
        for i in range(5):
            data = FaultyData(prompt="Say x", answer="x", name=f"faulty-{i}")
            yield FaultyTask(data, self.config.task)
