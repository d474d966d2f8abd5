"""A metrics sink of your own: `metrics.sinks = ["sink.py:Csv"]`."""

from pathlib import Path


class Csv:
    def __init__(self, config, position):
        self.file = Path(config.output, "reward.csv").open("a")

    def write(self, row):  # returns when the step is kept; after an exception it comes again
        print(row.step, row.metrics["reward/mean"], file=self.file, flush=True)

    def close(self):
        self.file.close()
