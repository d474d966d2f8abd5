"""What the part keeps of a training run: the credit of its calls, and failed optimizer steps."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from agentrl.algorithms.explain.credit_records import CreditRecorder
from agentrl.algorithms.explain.dump import keep_in
from agentrl.algorithms.train.hooks import Hooks
from agentrl.algorithms.train.load_policies import LoadedModel
from agentrl.algorithms.train.step import Updater
from agentrl.config import RunConfig


class Records(Hooks):
    """The credit of calls (`algorithm.store_credit`), and batches of failed steps in `dumps`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def updater(self, updater: Updater, model: LoadedModel) -> Updater:
        name = updater.policy
        if updater.bad_steps is not None:
            folder = Path(self.config.output, "dumps", name if self.config.policies else "")
            updater.bad_steps.keep = partial(keep_in, folder)
        # What no policy sampled, such as a data set, is in no store.
        stores = updater.limit is not None and updater.config.algorithm.store_credit
        return replace(updater, recorder=CreditRecorder(name)) if stores else updater


def join(config: RunConfig) -> Hooks:
    return Records(config)
