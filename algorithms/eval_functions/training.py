"""Functions of the run file that measure checkpoints (`eval.functions`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.base import user_code
from agentrl.base.loading import import_error, load_attribute
from agentrl.config import RunConfig
from agentrl.config.policies import initial_version
from agentrl.errors import ConfigError
from agentrl.store.base import Store
from agentrl.types import POLICY


class EvalFunctions(Feature):
    """They are called at each evaluation."""

    live: ServedRun

    async def start(self, run: ServedRun) -> None:
        self.live = run

    async def evaluate(self, step: int, limit: int) -> None:
        live = self.live
        await evaluate_functions(live.store, live.config, live.state.epoch, step)


async def evaluate_functions(store: Store, config: RunConfig, epoch: int, step: int) -> None:
    """Log the results of `eval.functions` on the policy after `step` steps, as
    eval/function/<name>, or <name>/<key> for a mapping. Raises ConfigError if a function raises or
    returns anything but numbers."""
    metrics: dict[str, float] = {}
    state = await store.run(config.name)
    last = state and state.checkpoint and config.checkpoint_path(state.checkpoint)
    begun = "" if config.policies else initial_version(config, POLICY)[1].directory
    checkpoint = Path(last or begun or config.model_path())
    for path in config.eval.functions:
        function = load_attribute(path, Path(config.root), key="eval.functions")
        try:
            result = await user_code.in_thread(function, checkpoint)
        except Exception as error:  # the user's function is a boundary
            raise import_error(f"eval.functions = {path!r}", error) from error
        name = f"eval/function/{path.rpartition(':')[2]}"
        numbers = result if isinstance(result, Mapping) else {"": result}
        try:
            metrics |= {f"{name}/{key}".rstrip("/"): float(x) for key, x in numbers.items()}
        except (TypeError, ValueError):
            raise ConfigError(
                f"eval.functions = {path!r} returned {result!r:.80}; it must return a number, or a "
                "mapping of names to numbers"
            ) from None
    if metrics:
        await store.log(config.name, step, metrics, epoch=epoch)
