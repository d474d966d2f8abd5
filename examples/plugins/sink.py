"""A custom metrics sink, for `metrics.sinks = ["sink.py:Csv"]`."""

from pathlib import Path


class Csv:
    def __init__(self, config, position):
        self.file = Path(config.output, "reward.csv")

    def write(self, row):  # returns when the step is safe; after an exception it is written again
        with self.file.open("a") as file:  # stored steps count from 0
            print(row.step + 1, row.metrics["reward/mean"], file=file)

    def close(self):
        """Every step is in the file already."""
